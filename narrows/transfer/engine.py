"""What the socket transports have in common: the owner thread's calls. The I/O thread's part is in io_loop.

Posting, sending and cancelling are commands to the I/O thread; revoking takes effect at once, under the receive lock.
"""

import socket
import time
from collections.abc import Sequence
from functools import partial

from narrows.errors import PeerLost, TransportError
from narrows.transfer.base import PeerName, Post, PostId, Priority, Region, TransportConfig, TransportEvent
from narrows.transfer.frames import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES
from narrows.transfer.greeting import greet
from narrows.transfer.io_loop import IoLoop
from narrows.transfer.link import Link
from narrows.transfer.outbox import OutMessage, OutPost

_CLOSE_S = 5.0


class Engine(IoLoop):
    """A Transport once a subclass provides `_listen`, `_dial` and `_allocate`. See narrows.transfer.base."""

    def __init__(self, config: TransportConfig) -> None:
        self._next_post = 0
        super().__init__(config)

    def _dial(self, address: str, timeout_s: float) -> socket.socket:
        """A connected socket. Raises OSError when nobody listens there, TransportError on a malformed address."""
        raise NotImplementedError

    def _allocate(self, num_bytes: int) -> memoryview:
        """Zeroed memory for a region."""
        raise NotImplementedError

    def allocate(self, num_bytes: int) -> Region:
        self._require_open()
        return self._regions.add(self._allocate(num_bytes))

    def connect(self, address: str, *, timeout_s: float = 10.0) -> PeerName:
        self._require_open()
        known = self._addresses.get(address)
        if known is not None and (link := self._links.get(known)) is not None and link.gone is None:
            return known
        deadline = time.monotonic() + timeout_s
        try:
            sock = self._dial(address, timeout_s)
        except OSError as error:
            raise PeerLost(address, f"can not be reached: {error}") from error
        try:
            self._tune(sock)
            identity = greet(sock, self._identity, self.config.secret, deadline)
        except OSError as error:
            sock.close()
            raise PeerLost(address, f"gave up the handshake: {error}") from error
        except TransportError:
            sock.close()
            raise
        link = self._make_link(sock, identity, dialed=True)
        self._addresses[address] = link.peer
        self._command(partial(self._adopt, link))
        return link.peer

    def post(self, peer: PeerName, post: Post) -> PostId:
        link = self._link_to(peer)
        if len(post.tag.request.encode()) > MAX_REQUEST_BYTES:
            raise ValueError(f"post.tag.request: longer than {MAX_REQUEST_BYTES} bytes")
        self._next_post += 1
        item = OutPost(PostId(self._next_post), post, self.kind, self.config.block_bytes)
        self.stats.posts += 1
        self._command(partial(self._start, link, item))
        return item.id

    def send(self, peer: PeerName, payload: bytes, priority: Priority = Priority.ON_DEMAND) -> None:
        link = self._link_to(peer)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ValueError(f"send: a message of {len(payload)} bytes is longer than {MAX_MESSAGE_BYTES}")
        item = OutMessage(payload, priority, self.config.block_bytes)
        self._command(partial(self._start, link, item))

    def poll(self) -> Sequence[TransportEvent]:
        if self._failure is not None and not self._thread.is_alive() and not self._events:
            raise TransportError(f"transport {self.name} failed: {self._failure!r}") from self._failure
        if not self._closing and self._failure is None:  # a failed one stays readable, so that its error is met
            self._news.clear()
        events: list[TransportEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def fileno(self) -> int:
        return self._news.fileno()

    def cancel(self, request: str, generation: int) -> None:
        self._require_open()
        self._command(partial(self._cancel, request, generation))

    def revoke(self, request: str, generation: int) -> None:
        self._require_open()
        with self._receiving:
            self._target.revoked.add(request, generation)
            for link in list(self._live):
                self._redirect(link)

    def close(self) -> None:
        """Drop what is not sent, end the thread, close every socket. Open posts end as Dropped events; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise TransportError(f"transport {self.name}: its thread did not end within {_CLOSE_S} s")
        self._regions.clear()
        self._wake.close()
        self._news.close()

    def _link_to(self, peer: PeerName) -> Link:
        self._require_open()
        link = self._links.get(peer)
        if link is None:
            raise PeerLost(peer, "not connected")
        if link.gone is not None:
            raise PeerLost(peer, link.gone)
        return link

    def _require_open(self) -> None:
        if self._failure is not None:
            raise TransportError(f"transport {self.name} failed: {self._failure!r}") from self._failure
        if self._closing:
            raise TransportError(f"transport {self.name} is closed")

    def _redirect(self, link: Link) -> None:
        """Owner thread, receive lock held: keep what is left of a revoked frame out of its region."""
        if link.gone is None and (frame := link.reader.frame) is not None:
            targets = link.inbox.drain(frame, link.reader.wanted)
            if targets is not None:
                link.reader.redirect(targets)
                self._wake.set()  # the refusal waits to be sent
