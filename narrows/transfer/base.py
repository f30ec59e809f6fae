"""The transport contract: one-sided scatter/gather writes with an ordered trailing write, small messages, events.

    a = Transport(...)                       b = Transport(...)
    src = a.allocate(n)                      dst = b.allocate(n)          dst.key travels over the control channel
    peer = a.connect(b.address)
    a.post(peer, Post(tag, priority, [Copy(src, ...offsets)], dst.key, trailing=[Put(mask.key, offset, data)]))
    a.poll() -> [Done(post_id, ...)]         b.poll() -> [Arrived(peer, tag, note)]

Rules every transport keeps (one contract test runs against all of them):

1. Nothing blocks but `close` (bounded) and `connect` (by its timeout). Completion, arrival and loss are events.
2. When any byte of a post's trailing puts is visible at the target, all bytes of its copies are; `Arrived` follows.
   Each put, and the note, is at most `block_bytes` long.
3. `Done` means: landed at the target. Until Done, Dropped or PeerGone the source bytes are the transport's to read.
4. A more urgent class never waits behind more than one block (`block_bytes`) of a less urgent one to the same peer;
   on an unshaped link that moves several blocks a millisecond, behind no more than it moves in a millisecond.
   Posts of one class to one peer are sent in the order of their posting.
5. `cancel(request, generation)` drops what has not been put on the wire; each dropped post reports Dropped, a post
   partly sent may report either. After `Dropped`/`Done` of all its posts nothing more of the attempt will be written.
6. `revoke(request, generation)` at the target: no byte of that attempt is written by this transport afterwards where
   the transport can refuse (tcp, loopback); shared memory can not refuse, hence rule 5 at the source.
7. A write outside the registered region, or to an unknown one, is refused at the target (or earlier) and reported at
   the source as Dropped with the error; neither side's other traffic suffers.
8. A peer that dies, or stays silent longer than `silence_s` while traffic or a heartbeat is due, gives exactly one
   PeerGone(peer, reason) and every open post to it ends with Dropped. Later posts to it raise PeerLost.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from narrows.core.plan import RegionKey
from narrows.errors import ConfigError

PeerName = NewType("PeerName", str)
PostId = NewType("PostId", int)
Offsets = npt.NDArray[np.int64]


BLOCK_BYTES = 64 * 1024


class Priority(IntEnum):
    """Classes of traffic on one link, most urgent first."""

    ON_DEMAND = 0
    PROACTIVE = 1
    SPECULATIVE = 2


@dataclass(frozen=True, slots=True)
class Tag:
    """What every frame carries, so that late traffic of an attempt that is over can be told from a new one."""

    request: str
    generation: int
    layer: int


@dataclass(frozen=True, slots=True)
class Region:
    """Registered memory of this process. `buffer` is writable, flat, and stays valid until the transport closes."""

    key: RegionKey
    buffer: memoryview


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks to move: bytes [source_offsets[i], +lengths[i]) of `source` to target_offsets[i] of the post's target.

    All three are int64 arrays of one length. Runs that are contiguous on both sides are merged by the transport.
    """

    source: Region
    source_offsets: Offsets
    target_offsets: Offsets
    lengths: Offsets

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True)
class Put:
    """A small literal write (at most one frame), ordered after the post's copies: the mask update."""

    target: RegionKey
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Post:
    """One batch: copies into `target`, then `trailing` in order, then the `note` as the target's Arrived event."""

    tag: Tag
    priority: Priority
    target: RegionKey
    copies: tuple[Copy, ...]
    trailing: tuple[Put, ...] = ()
    note: bytes = b""

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self.copies) + sum(len(put.data) for put in self.trailing)


@dataclass(frozen=True, slots=True)
class Done:
    """A post of ours has landed. `num_bytes` counts all that crossed for it, frame headers included."""

    post: PostId
    peer: PeerName
    tag: Tag
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """A post of ours ended without landing: cancelled, refused or its peer is gone."""

    post: PostId
    peer: PeerName
    tag: Tag
    error: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """A peer's post has landed here, trailing puts included."""

    peer: PeerName
    tag: Tag
    note: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """A small message from a peer (see Transport.send)."""

    peer: PeerName
    payload: bytes


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A peer died or fell silent; reported once."""

    peer: PeerName
    reason: str


TransportEvent = Done | Dropped | Arrived | Message | PeerGone


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """Settings common to all transports; one that has no effect on a transport is said so by its `open`."""

    name: str  # this side's name, as its peers see it; carries the incarnation
    listen: str = "127.0.0.1"  # host to listen on; the port is chosen
    link_gbps: float | None = None  # token-bucket shaping of everything this side sends, all peers together
    checksums: bool = False  # verify each frame's payload; a mismatch drops the post with an error
    block_bytes: int = BLOCK_BYTES  # largest frame of payload, and so the longest wait of a more urgent class
    silence_s: float = 10.0
    secret: str = ""  # peers must know the same one; it never travels

    def __post_init__(self) -> None:
        if not self.name or "\0" in self.name:
            raise ConfigError(f"transport.name: {self.name!r} is not usable; give a text that no other incarnation has")
        if self.link_gbps is not None and not 0.0 < self.link_gbps < math.inf:
            raise ConfigError(f"transport.link_gbps: {self.link_gbps} is not a rate; leave it out for an unshaped link")
        if not 1024 <= self.block_bytes <= 16 << 20:
            raise ConfigError(f"transport.block_bytes: {self.block_bytes} is not between 1024 and {16 << 20}")
        if not 0.0 < self.silence_s < math.inf:
            raise ConfigError(f"transport.silence_s: {self.silence_s} is not a positive number of seconds")


@dataclass(slots=True)
class TransportStats:
    """Counters since opening, for metrics: bytes by priority include frame headers."""

    sent_bytes: dict[Priority, int] = field(default_factory=lambda: dict.fromkeys(Priority, 0))
    received_bytes: int = 0  # of posts and messages that have landed here
    refused_frames: int = 0  # late, revoked or outside their region
    posts: int = 0


class Transport(Protocol):
    """See the module's text for the rules. One owner thread calls these; the transport may have threads of its own."""

    name: PeerName
    address: str  # what a peer passes to connect
    stats: TransportStats

    def allocate(self, num_bytes: int) -> Region:
        """New zeroed, page-aligned memory that peers may write to."""
        ...

    def connect(self, address: str, *, timeout_s: float = 10.0) -> PeerName:
        """Reach a peer (again at no cost). Raises PeerLost when it is not there, TransportError on another version
        or secret."""
        ...

    def post(self, peer: PeerName, post: Post) -> PostId:
        """Queue a batch of writes. Raises PeerLost when the peer is known to be gone, ValueError on ranges outside
        the source region."""
        ...

    def send(self, peer: PeerName, payload: bytes, priority: Priority = Priority.ON_DEMAND) -> None:
        """Queue a message of at most 1 MiB; ordered among messages of its class."""
        ...

    def poll(self) -> Sequence[TransportEvent]:
        """All that happened since the last call; returns at once."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while poll would return something."""
        ...

    def cancel(self, request: str, generation: int) -> None:
        """Stop sending this attempt's posts (rule 5). Posts made later are not affected."""
        ...

    def revoke(self, request: str, generation: int) -> None:
        """Let nobody write for this request in this or an earlier generation any more (rule 6); holds on return."""
        ...

    def close(self) -> None:
        """End everything within seconds: open posts end as Dropped, peers see this side gone. poll() still gives the
        last events; every other call raises TransportError. Idempotent."""
        ...
