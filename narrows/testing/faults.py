"""Things that go wrong with transports, on purpose and reproducibly.

FaultyTransport wraps any transport and disturbs what its owner sees of it; Relay stands between two TCP transports and
disturbs the bytes themselves.
"""

import contextlib
import itertools
import random
import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from narrows.errors import PeerLost
from narrows.transfer.base import (
    Arrived,
    Done,
    Dropped,
    Message,
    PeerGone,
    PeerName,
    Post,
    PostId,
    Priority,
    Region,
    Tag,
    Transport,
    TransportEvent,
    TransportStats,
)
from narrows.transfer.signal import Signal


@dataclass(frozen=True, slots=True)
class Faults:
    """What to disturb. Chances are per event or post, from 0 to 1."""

    delay: float = 0.0  # hold an event back
    max_delay_polls: int = 10  # for up to so many polls; later events of its kind and peer wait behind it
    reorder: float = 0.0  # let Done and Dropped of different posts change places
    drop: float = 0.0  # a post is not sent at all and ends as Dropped
    corrupt: float = 0.0  # flip a bit of a message or a note
    lose_after_posts: int | None = None  # the peer of that post is gone from then on


class FaultyTransport:
    """A Transport whose owner has bad luck, the same for the same seed and the same events.

    Delays are counted in polls, not in seconds; while events are held back, fileno stays readable.
    """

    def __init__(self, inner: Transport, faults: Faults, seed: int) -> None:
        self._inner = inner
        self._faults = faults
        self._random = random.Random(seed)
        self._held: list[tuple[int, TransportEvent]] = []  # (poll from which it is seen, event), in order
        self._poll = 0
        self._posts = 0
        self._open: dict[PostId, tuple[PeerName, Tag]] = {}
        self._gone: dict[PeerName, str] = {}
        self._next_fake = -1  # ids of posts that never reach the inner transport
        self._signal = Signal()
        # one descriptor for two: it is readable while any of what it watches is
        self._watch = select.epoll()
        self._watch.register(inner.fileno(), select.EPOLLIN)
        self._watch.register(self._signal.fileno(), select.EPOLLIN)

    @property
    def name(self) -> PeerName:
        return self._inner.name

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def stats(self) -> TransportStats:
        return self._inner.stats

    def allocate(self, num_bytes: int) -> Region:
        return self._inner.allocate(num_bytes)

    def connect(self, address: str, *, timeout_s: float = 10.0) -> PeerName:
        peer = self._inner.connect(address, timeout_s=timeout_s)
        self._require_alive(peer)
        return peer

    def post(self, peer: PeerName, post: Post) -> PostId:
        self._require_alive(peer)
        self._posts += 1
        if self._random.random() < self._faults.drop:
            self._next_fake -= 1
            id = PostId(self._next_fake)
            self._hold(Dropped(id, peer, post.tag, "dropped by a fault"))
        else:
            id = self._inner.post(peer, post)
            self._open[id] = (peer, post.tag)
        if self._posts == self._faults.lose_after_posts:
            self.lose(peer)
        return id

    def send(self, peer: PeerName, payload: bytes, priority: Priority = Priority.ON_DEMAND) -> None:
        self._require_alive(peer)
        self._inner.send(peer, payload, priority)

    def lose(self, peer: PeerName, reason: str = "lost by a fault") -> None:
        """From now on this peer is gone to the owner. What is on its way may still land, as it would."""
        if peer in self._gone:
            return
        self._gone[peer] = reason
        for id, (of, tag) in list(self._open.items()):
            if of == peer:
                del self._open[id]
                self._hold(Dropped(id, peer, tag, reason))
        self._hold(PeerGone(peer, reason))

    def poll(self) -> Sequence[TransportEvent]:
        self._poll += 1
        for event in self._shuffled(self._inner.poll()):
            if event.peer in self._gone:
                continue
            if isinstance(event, PeerGone):
                self._gone[event.peer] = event.reason
            if isinstance(event, (Done, Dropped)):
                self._open.pop(event.post, None)
            self._hold(self._damaged(event))
        due = [event for at, event in self._held if at <= self._poll]
        self._held = [(at, event) for at, event in self._held if at > self._poll]
        self._signal.clear()
        if self._held:
            self._signal.set()
        return due

    def fileno(self) -> int:
        return self._watch.fileno()

    def cancel(self, request: str, generation: int) -> None:
        self._inner.cancel(request, generation)

    def revoke(self, request: str, generation: int) -> None:
        self._inner.revoke(request, generation)

    def close(self) -> None:
        if not self._watch.closed:
            self._watch.close()
            self._inner.close()
            self._signal.close()

    def _require_alive(self, peer: PeerName) -> None:
        if peer in self._gone:
            raise PeerLost(peer, self._gone[peer])

    def _hold(self, event: TransportEvent) -> None:
        at = self._poll
        if self._random.random() < self._faults.delay:
            at += self._random.randint(1, self._faults.max_delay_polls)
        # order among messages, and between a peer's last words and its end, is promised
        before = [due for due, other in self._held if other.peer == event.peer and _ordered(other, event)]
        self._held.append((max([at, *before]), event))
        self._signal.set()

    def _shuffled(self, events: Sequence[TransportEvent]) -> list[TransportEvent]:
        shuffled = list(events)
        ends = [index for index, event in enumerate(shuffled) if isinstance(event, (Done, Dropped))]
        for one, other in itertools.pairwise(ends):
            if self._random.random() < self._faults.reorder:
                shuffled[one], shuffled[other] = shuffled[other], shuffled[one]
        return shuffled

    def _damaged(self, event: TransportEvent) -> TransportEvent:
        if self._random.random() >= self._faults.corrupt:
            return event
        if isinstance(event, Message) and event.payload:
            return replace(event, payload=self._flip(event.payload))
        if isinstance(event, Arrived) and event.note:
            return replace(event, note=self._flip(event.note))
        return event

    def _flip(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        damaged[self._random.randrange(len(damaged))] ^= 1 << self._random.randrange(8)
        return bytes(damaged)


def _ordered(first: TransportEvent, second: TransportEvent) -> bool:
    """Whether the contract promises the first before the second."""
    return (type(first) is type(second) and isinstance(first, (Message, Arrived))) or isinstance(second, PeerGone)


_CHUNK_BYTES = 64 * 1024


class Relay:
    """A TCP relay in a thread: dial `address` instead of the transport's own. Use as a context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._needle = b""
        self._flow = threading.Event()
        self._flow.set()
        self._left: int | None = None  # bytes that may pass before the black hole; None: all
        self._stopped = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def black_hole(self, after_bytes: int = 0) -> None:
        """Pass so many bytes more, both directions together, then nothing, without closing anything."""
        self._left = after_bytes
        if not after_bytes:
            self._flow.clear()

    def resume(self) -> None:
        """Pass everything again, what was held back first."""
        self._left = None
        self._flow.set()

    def corrupt(self, needle: bytes) -> None:
        """Flip a bit in the next place where these bytes pass in one piece."""
        self._needle = needle

    def __enter__(self) -> "Relay":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._flow.set()
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):  # not connected any more
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10.0)

    def _start(self, target: object, *args: socket.socket) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            far = socket.create_connection(self._target)
            self._sockets += [near, far]
            self._start(self._pump, near, far)
            self._start(self._pump, far, near)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either side closed
            while data := source.recv(_CHUNK_BYTES):
                data = self._damaged(data)
                if self._left is not None and self._flow.is_set():
                    passing, data = data[: self._left], data[self._left :]
                    self._left -= len(passing)
                    target.sendall(passing)
                    if not self._left:
                        self._flow.clear()
                self._flow.wait()
                if self._stopped:
                    return
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _damaged(self, data: bytes) -> bytes:
        at = data.find(self._needle) if self._needle else -1
        if at < 0:
            return data
        self._needle = b""
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
