"""How two transports get to know each other, without a socket in sight.

    dialer                      listener
    HELLO nonce, name, address  ->
                                <- HELLO nonce, name, address
    PROOF                       ->
                                <- PROOF, or REFUSED with a reason

A proof is an HMAC under the secret over both hellos and the side's role: the secret never travels, and neither an old
proof nor one's own can be played back. The link itself is neither encrypted nor signed: trusted networks only.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from narrows.errors import TransportError

VERSION = 1

_MAGIC = b"NARROWS\0"
_PRELUDE = struct.Struct("<8sHHI")  # magic, version, step, body bytes: the same in all versions
_MAX_BODY_BYTES = 4096
_NONCE_BYTES = 32


class _Step(IntEnum):
    HELLO = 1
    PROOF = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """Who speaks: the transport's kind, the name with its incarnation, where it listens, and how long a silence it
    bears."""

    kind: str
    name: str
    address: str
    silence_s: float

    def encode(self) -> bytes:
        return "\0".join((self.kind, self.name, self.address, repr(self.silence_s))).encode()


class Handshake:
    """One side of one handshake. Send `take()` whenever it is not empty; read exactly `wanted` bytes, `feed` them.

    Finished when `peer` is set (and the last take() is sent). `feed` raises TransportError on a peer to be turned away;
    take() then still has the refusal that tells it why.
    """

    def __init__(self, me: Identity, secret: str, *, dialer: bool) -> None:
        self.peer: Identity | None = None
        self.wanted = _PRELUDE.size
        self._me = me
        self._secret = secret.encode()
        self._dialer = dialer
        self._hello = secrets.token_bytes(_NONCE_BYTES) + me.encode()
        self._their_hello: bytes | None = None
        self._step: _Step | None = None  # of the body being read; None: a prelude is next
        self._out = b""
        if dialer:
            self._say(_Step.HELLO, self._hello)

    def take(self) -> bytes:
        """What is to be sent now; empty when nothing is."""
        out, self._out = self._out, b""
        return out

    def feed(self, data: bytes) -> None:
        """Exactly `wanted` bytes from the peer."""
        assert len(data) == self.wanted
        if self._step is None:
            self._read_prelude(data)
        else:
            step, self._step = self._step, None
            self.wanted = _PRELUDE.size
            self._read_body(step, data)

    def _read_prelude(self, data: bytes) -> None:
        magic, version, step, num_bytes = _PRELUDE.unpack(data)
        if magic != _MAGIC or num_bytes > _MAX_BODY_BYTES or step not in list(_Step):
            raise TransportError("the other side is not a Narrows transport")
        if version != VERSION:
            self._refuse(f"the other side speaks transport version {version}, this side version {VERSION}")
        self._step = _Step(step)
        self.wanted = num_bytes
        if not num_bytes:
            self.feed(b"")

    def _read_body(self, step: _Step, body: bytes) -> None:
        if step is _Step.REFUSED:
            raise TransportError(f"turned away by the other side: {body.decode(errors='replace')}")
        if step is _Step.HELLO and self._their_hello is None:
            self._read_hello(body)
        elif step is _Step.PROOF and self._their_hello is not None:
            self._read_proof(body, self._their_hello)
        else:
            self._refuse("the handshake is out of order")

    def _read_hello(self, body: bytes) -> None:
        self._their_hello = body
        their = _decode_identity(body[_NONCE_BYTES:])
        if len(body) < _NONCE_BYTES or their is None:
            self._refuse("the hello is malformed")
        elif their.kind != self._me.kind:
            self._refuse(f"the other side is a {their.kind} transport, this side {self._me.kind}")
        elif their.name == self._me.name:
            self._refuse(f"both sides are named {self._me.name}: a transport can not connect to itself")
        if self._dialer:
            self._say(_Step.PROOF, self._proof(self._hello, body, dialer=True))
        else:
            self._say(_Step.HELLO, self._hello)

    def _read_proof(self, body: bytes, their_hello: bytes) -> None:
        expected = self._proof(their_hello, self._hello, dialer=True)
        if self._dialer:
            expected = self._proof(self._hello, their_hello, dialer=False)
        if not hmac.compare_digest(body, expected):
            self._refuse("the secrets differ")
        if not self._dialer:
            self._say(_Step.PROOF, self._proof(their_hello, self._hello, dialer=False))
        self.peer = _decode_identity(their_hello[_NONCE_BYTES:])

    def _proof(self, dialer_hello: bytes, listener_hello: bytes, *, dialer: bool) -> bytes:
        role = b"dialer" if dialer else b"listener"
        parts = (role, len(dialer_hello).to_bytes(4, "little"), dialer_hello, listener_hello)
        return hmac.digest(self._secret, b"".join(parts), "sha256")

    def _say(self, step: _Step, body: bytes) -> None:
        self._out += _PRELUDE.pack(_MAGIC, VERSION, step, len(body)) + body

    def _refuse(self, reason: str) -> NoReturn:
        self._out = b""
        self._say(_Step.REFUSED, reason.encode())
        raise TransportError(reason)


def _decode_identity(data: bytes) -> Identity | None:
    try:
        kind, name, address, silence = data.decode().split("\0")
        identity = Identity(kind, name, address, float(silence))
    except ValueError:
        return None
    return identity if kind and name and address and identity.silence_s > 0.0 else None
