"""The messages between coordinator and instances. Plain values: the channel decides how they are encoded.

    coordinator -> decode    Reserve, Release, Shutdown
    coordinator -> prefill   Prefill, Push, Release, Shutdown
    both    -> coordinator   Ready or Refused, then Progress, Heartbeat
    prefill -> decode        HandOver, as the note of the last post decode waits for; Refusal, Settled
    decode  -> prefill       Fetch, Grant, over the transport

A request's `generation` is in every message, so an answer to an attempt that is over is recognized and dropped.

Pages at decode are written by a peer, so they are given back only when that peer can write no more: the coordinator
sends Release to prefill first and to decode after prefill's Released (or its death).
"""

from dataclasses import dataclass, field

from narrows.core.plan import Landing, RegionKey
from narrows.core.request import FinishReason, Request, SampledToken
from narrows.core.scheme import SCHEMES, Scheme
from narrows.core.topology import InstanceInfo
from narrows.core.trace import Span


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance holds after a step: pages that are not free (cached pages can be dropped and count as free),
    requests in its batch and requests it keeps waiting."""

    used_pages: int = 0
    cached_pages: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """An instance has loaded its model and can work."""

    info: InstanceInfo


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make room for the KV of this request's tokens, which a prefill instance will push; answered by Reserved."""

    request: Request


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room is made (`landing`), or there is none now (None): the coordinator tries again later."""

    request: str
    generation: int
    landing: Landing | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute this request's KV and sample its next token. The KV waits until Push names its landing."""

    request: Request


@dataclass(frozen=True, slots=True)
class Push:
    """Room was found for a request that was sent for prefill: push its KV there, layer by layer as it is computed."""

    landing: Landing


@dataclass(frozen=True, slots=True)
class Started:
    """A phase has begun on this request; at decode, `handover_bytes` have arrived for it."""

    request: str
    generation: int
    handover_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Produced:
    """One token of a request, the `index`th of its output, and whether it is the last. After the last one nothing is
    held at decode, unless KV is still on its way there (`held`). Prefill's token and decode's first come from two
    processes, so in either order."""

    request: str
    generation: int
    index: int
    token: SampledToken
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    held: bool = False
    selected: int = 0  # KV entries the step read in layers that select
    fetched: int = 0  # and those of them that came from prefill


@dataclass(frozen=True, slots=True)
class Failed:
    """This attempt can not go on here. `retry`: another attempt may succeed. `held`: its pages stay until Release,
    since a peer may still write to them or read from them. `preempted`: nothing went wrong, room was needed."""

    request: str
    generation: int
    error: str
    retry: bool = False
    held: bool = True
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Forget this attempt: stop computing, cancel what is not sent, give its pages back; answered by Released."""

    request: str
    generation: int


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing of this attempt is left here: no page is held, nothing will be sent or written for it any more.

    Prefill says so unasked when all has been delivered.
    """

    request: str
    generation: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """What prefill sent for an attempt, when all of it has arrived or the attempt is over. Bytes include frames'
    headers; `wasted_bytes` counts KV that was sent although decode had it already."""

    request: str
    generation: int
    metadata_bytes: int = 0
    proactive_bytes: int = 0
    on_demand_bytes: int = 0
    speculative_bytes: int = 0
    wasted_bytes: int = 0
    pushed_blocks: int = 0  # KV blocks sent before decode began
    num_blocks: int = 0
    prefill_s: float = 0.0  # Tp of equation 2, as predicted when the hand-over was planned
    transfer_s: float = 0.0  # Tt
    full: bool = True

    @property
    def num_bytes(self) -> int:
        return self.metadata_bytes + self.proactive_bytes + self.on_demand_bytes + self.speculative_bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """All that one turn of an instance has to say, in order, and its load after the turn."""

    reserved: tuple[Reserved, ...] = ()
    started: tuple[Started, ...] = ()
    produced: tuple[Produced, ...] = ()
    failed: tuple[Failed, ...] = ()
    released: tuple[Released, ...] = ()
    delivered: tuple[Delivered, ...] = ()
    load: Load = field(default_factory=Load)


@dataclass(frozen=True, slots=True)
class Traced:
    """A piece of an instance's timeline."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """An instance is alive though it may be computing."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish nothing more; close and exit."""


@dataclass(frozen=True, slots=True)
class Refused:
    """An instance can not start; the text says why, for the user."""

    error: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """From the next request on hand over by this scheme and importance profile (None: the one in use)."""

    scheme: Scheme
    profile: str | None = None  # a file


@dataclass(frozen=True, slots=True)
class HandOver:
    """Prefill to decode, behind all that decode waits for: what it continues from."""

    token: int  # sampled at prefill, its KV not computed yet
    num_tokens: int  # whose KV is computed
    full: bool  # all of it has been pushed; else metadata, and what the mask says is there
    scheme: Scheme = SCHEMES["full"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """KV entries of one request and layer that decode lacks. `positions` is coded (transfer.positions), a row per KV
    head; row h's entries go to byte `target` + h * `stride` of the fetch's region, in order of position."""

    request: str
    generation: int
    positions: bytes
    target: int
    stride: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Decode asks a prefill instance for KV entries of one layer, of all its requests at once."""

    ticket: int  # names the answer
    layer: int
    region: RegionKey
    wanted: tuple[Wanted, ...]
    packed: bool = False  # each row as Kernels.pack_entries makes it, which may be shorter than its stride


@dataclass(frozen=True, slots=True)
class Fetched:
    """The note of a fetch's answer, behind its last byte. What it lacks: requests all whose KV had arrived meanwhile
    (`delivered`), and those that are not here any more (`lost`)."""

    ticket: int
    delivered: tuple[tuple[str, int], ...] = ()
    lost: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A fetch that will not be answered."""

    ticket: int
    error: str


@dataclass(frozen=True, slots=True)
class Settled:
    """Prefill to decode: all KV of this attempt has landed and nothing more will be written for it."""

    request: str
    generation: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Decode's network is idle: prefill may send more of these requests' KV. Stands for so many layers' attentions,
    whose idle windows together are about idle_s."""

    requests: tuple[tuple[str, int], ...]
    layers: int
    idle_s: float


ToInstance = Reserve | Prefill | Push | Release | Adopt | Shutdown
BetweenInstances = HandOver | Fetch | Fetched | Refusal | Grant | Settled
ToCoordinator = Ready | Refused | Progress | Heartbeat | Traced
