"""Handshakes on sockets: blocking for the one who dials, in the I/O thread's selector for the one who listens."""

import errno
import logging
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial

from narrows.errors import TransportError
from narrows.transfer.handshake import Handshake, Identity

_GREETING_S = 10.0  # a caller that takes longer is turned away
_MAX_PENDING = 128
_log = logging.getLogger(__name__)


def greet(sock: socket.socket, me: Identity, secret: str, deadline: float) -> Identity:
    """Dialer's side: blocks until `deadline` at most. Raises OSError when the peer is lost, TransportError when it
    differs."""
    handshake = Handshake(me, secret, dialer=True)
    try:
        while handshake.peer is None:
            if out := handshake.take():
                sock.sendall(out)
            handshake.feed(_read(sock, handshake.wanted, deadline))
    except TransportError:
        if out := handshake.take():
            sock.sendall(out)  # so that the other side knows why, too
        raise
    return handshake.peer


def _read(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the connection was closed by the other side")
        data += part
    return data


class _Caller:
    """One accepted connection whose handshake is not finished."""

    def __init__(self, sock: socket.socket, handshake: Handshake, deadline: float) -> None:
        self.sock = sock
        self.handshake = handshake
        self.deadline = deadline
        self.data = b""

    def advance(self) -> Identity | None:
        """Read and answer what is there. Raises OSError or TransportError when the caller must go."""
        handshake = self.handshake
        part = self.sock.recv(handshake.wanted - len(self.data))
        if not part:
            raise ConnectionError("hung up during the handshake")
        self.data += part
        if len(self.data) == handshake.wanted:
            data, self.data = self.data, b""
            try:
                handshake.feed(data)
            finally:
                # a fresh connection has room for these few bytes
                self.sock.sendall(handshake.take())
        return handshake.peer


class Greetings:
    """The listening socket and its callers; all methods belong to the thread that runs the selector."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        me: Identity,
        secret: str,
        adopt: Callable[[socket.socket, Identity], None],
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._me = me
        self._secret = secret
        self._adopt = adopt
        self._callers: list[_Caller] = []
        self._listening = True
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._on_call)

    def expire(self, now: float) -> None:
        """Turn away callers past their time; listen again after a lack of descriptors."""
        for caller in [caller for caller in self._callers if now > caller.deadline]:
            self._turn_away(caller, "took too long")
        if not self._listening:
            self._listening = True
            self._selector.register(self._listener, selectors.EVENT_READ, self._on_call)

    def close(self) -> None:
        for caller in self._callers:
            caller.sock.close()
        self._callers.clear()
        self._listener.close()

    def _on_call(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                _log.warning("%s: can not accept a connection: %s", self._me.name, error)
                self._selector.unregister(self._listener)
                self._listening = False
            return  # else the caller has left again
        sock.setblocking(False)
        if len(self._callers) >= _MAX_PENDING:
            self._turn_away(self._callers[0], "made room for a newer caller")
        deadline = time.monotonic() + _GREETING_S
        caller = _Caller(sock, Handshake(self._me, self._secret, dialer=False), deadline)
        self._callers.append(caller)
        self._selector.register(sock, selectors.EVENT_READ, partial(self._on_words, caller))

    def _on_words(self, caller: _Caller, _: int) -> None:
        if caller not in self._callers:
            return  # turned away while this event waited its turn
        try:
            identity = caller.advance()
        except BlockingIOError:
            return
        except (OSError, TransportError) as error:
            self._turn_away(caller, str(error))
            return
        if identity is None:
            return
        self._callers.remove(caller)
        self._selector.unregister(caller.sock)
        try:
            self._adopt(caller.sock, identity)
        except TransportError as error:
            _log.warning("%s: turned a caller away: %s", self._me.name, error)
            caller.sock.close()

    def _turn_away(self, caller: _Caller, reason: str) -> None:
        _log.warning("%s: turned a caller away: %s", self._me.name, reason)
        self._callers.remove(caller)
        self._selector.unregister(caller.sock)
        caller.sock.close()
