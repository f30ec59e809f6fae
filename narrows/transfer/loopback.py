"""Transports of one process, joined by a hub: the short reference of the contract, without threads or sockets.

Everything moves at once, in the caller's thread, unless the hub is paused: then posts and messages queue, and each
`step()` moves one frame, most urgent first. That makes every state between post and Done reachable in a test.
"""

import itertools
import threading
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from narrows.errors import PeerLost, TransportError
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
    TransportConfig,
    TransportEvent,
    TransportStats,
)
from narrows.transfer.frames import MAX_MESSAGE_BYTES
from narrows.transfer.memory import RegionTable, Revocations, allocate_private, misfit
from narrows.transfer.outbox import Outbox, OutMessage, OutPost
from narrows.transfer.signal import Signal


class LoopbackHub:
    """Where loopback transports find each other. Its lock covers all of them, so each may have its own owner thread."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._transports: dict[str, LoopbackTransport] = {}
        self._paused = False
        self._numbers = itertools.count(1)

    def pause(self) -> None:
        """From now on only step() moves anything."""
        self._paused = True

    def resume(self) -> None:
        """Move all that waits, and everything at once from now on."""
        self._paused = False
        self.settle()

    def step(self) -> bool:
        """Move one frame of some transport's most urgent item. False when nothing waits."""
        with self.lock:
            return any(transport.step() for transport in list(self._transports.values()))

    def settle(self) -> None:
        """Move everything unless paused."""
        while not self._paused and self.step():
            pass

    def join(self, transport: "LoopbackTransport") -> str:
        address = f"loopback:{next(self._numbers)}"
        self._transports[address] = transport
        return address

    def leave(self, address: str) -> None:
        self._transports.pop(address, None)

    def find(self, address: str) -> "LoopbackTransport | None":
        return self._transports.get(address)


@dataclass(slots=True)
class _Peer:
    transport: "LoopbackTransport"
    outbox: Outbox
    gone: str | None = None


class LoopbackTransport:
    """See narrows.transfer.base. Neither shaped nor checksummed: nothing crosses a wire."""

    kind = "loopback"

    def __init__(self, config: TransportConfig, hub: LoopbackHub) -> None:
        if config.link_gbps is not None or config.checksums:
            warnings.warn(f"transport {self.kind}: link_gbps and checksums have no effect", stacklevel=2)
        self.name = PeerName(config.name)
        self.stats = TransportStats()
        self.config = config
        self._hub = hub
        self._regions = RegionTable(self.kind)
        self._revoked = Revocations()
        self._peers: dict[PeerName, _Peer] = {}
        self._events: deque[TransportEvent] = deque()
        self._news = Signal()
        self._next_post = 0
        self._closed = False
        self.address = hub.join(self)

    def allocate(self, num_bytes: int) -> Region:
        self._require_open()
        return self._regions.add(allocate_private(num_bytes))

    def connect(self, address: str, *, timeout_s: float = 10.0) -> PeerName:
        self._require_open()
        with self._hub.lock:
            other = self._hub.find(address)
            if other is None:
                raise PeerLost(address, "can not be reached: nobody listens there")
            if other.name == self.name:
                raise TransportError(f"both sides are named {self.name}: a transport can not connect to itself")
            if other.config.secret != self.config.secret:
                raise TransportError("the secrets differ")
            self._meet(other)
            other._meet(self)
            return other.name

    def post(self, peer: PeerName, post: Post) -> PostId:
        with self._hub.lock:
            outbox = self._outbox_to(peer)
            self._next_post += 1
            item = OutPost(PostId(self._next_post), post, self.kind, self.config.block_bytes)
            self.stats.posts += 1
            outbox.put(item)
            self._hub.settle()
            return item.id

    def send(self, peer: PeerName, payload: bytes, priority: Priority = Priority.ON_DEMAND) -> None:
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ValueError(f"send: a message of {len(payload)} bytes is longer than {MAX_MESSAGE_BYTES}")
        with self._hub.lock:
            self._outbox_to(peer).put(OutMessage(payload, priority, self.config.block_bytes))
            self._hub.settle()

    def poll(self) -> Sequence[TransportEvent]:
        if not self._closed:
            self._news.clear()
        events: list[TransportEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def fileno(self) -> int:
        return self._news.fileno()

    def cancel(self, request: str, generation: int) -> None:
        self._require_open()
        with self._hub.lock:
            for name, peer in self._peers.items():
                for post in peer.outbox.cancel(request, generation):
                    self._emit(Dropped(post.id, name, post.tag, "cancelled"))
            self._hub.settle()

    def revoke(self, request: str, generation: int) -> None:
        self._require_open()
        with self._hub.lock:
            self._revoked.add(request, generation)

    def close(self) -> None:
        with self._hub.lock:
            if self._closed:
                return
            self._hub.leave(self.address)
            for peer in self._peers.values():
                self._drop_all(peer, "the transport is closed")
                peer.transport._lose(self.name, "the connection was closed by the other side")
            self._closed = True
            self._regions.clear()
            self._news.close()

    def step(self) -> bool:
        """Move one frame of the most urgent item; called by the hub under its lock."""
        heads = [(peer, head) for peer in self._peers.values() if (head := peer.outbox.head()) is not None]
        if not heads:
            return False
        peer, item = min(heads, key=lambda pair: pair[1].priority)
        num_bytes = item.next_bytes()
        self.stats.sent_bytes[item.priority] += num_bytes
        if isinstance(item, OutMessage):
            peer.outbox.advance(item, num_bytes)
            if item.sent:
                peer.transport.stats.received_bytes += len(item.payload)
                peer.transport._emit(Message(self.name, item.payload))
            return True
        error = "cancelled" if item.aborted else self._move(peer.transport, item)
        peer.outbox.advance(item, num_bytes)
        if error:
            # ending a post that has begun leaves its abort in the queue, which comes by here again, without effect
            if peer.outbox.end(item.id) is not None:
                self._emit(Dropped(item.id, peer.transport.name, item.tag, error))
        elif item.sent:
            peer.outbox.end(item.id)
            peer.transport.stats.received_bytes += item.num_bytes
            peer.transport._emit(Arrived(self.name, item.tag, item.note, item.num_bytes))
            self._emit(Done(item.id, peer.transport.name, item.tag, item.wire_bytes))
        return True

    def _move(self, target: "LoopbackTransport", item: OutPost) -> str | None:
        """Write the next frame of `item` into the target's regions. Returns why it was refused, if it was."""
        if target._revoked.covers(item.tag.request, item.tag.generation):
            target.stats.refused_frames += 1
            return "the target has revoked this attempt"
        for token, offset, data in item.writes():
            region = target._regions.find(token)
            error = misfit(region, offset, len(data))
            if error or region is None:
                target.stats.refused_frames += 1
                return error
            self._store(region, offset, data)
        return None

    def _store(self, region: memoryview, offset: int, data: bytes | bytearray | memoryview) -> None:
        region[offset : offset + len(data)] = data

    def _meet(self, other: "LoopbackTransport") -> None:
        known = self._peers.get(other.name)
        if known is None or known.gone is not None:
            self._peers[other.name] = _Peer(other, Outbox())

    def _lose(self, name: PeerName, reason: str) -> None:
        peer = self._peers.get(name)
        if peer is not None and peer.gone is None and not self._closed:
            self._drop_all(peer, reason)
            self._emit(PeerGone(name, reason))

    def _drop_all(self, peer: _Peer, reason: str) -> None:
        peer.gone = reason
        for post in peer.outbox.open.values():
            self._emit(Dropped(post.id, peer.transport.name, post.tag, reason))
        peer.outbox = Outbox()

    def _outbox_to(self, name: PeerName) -> Outbox:
        self._require_open()
        peer = self._peers.get(name)
        if peer is None:
            raise PeerLost(name, "not connected")
        if peer.gone is not None:
            raise PeerLost(name, peer.gone)
        return peer.outbox

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError(f"transport {self.name} is closed")

    def _emit(self, event: TransportEvent) -> None:
        if not self._closed:
            self._events.append(event)
            self._news.set()
