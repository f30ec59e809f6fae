"""The messages between coordinator and instances. Plain values: the channel decides how they are encoded.

    coordinator -> decode    Reserve, Release, Shutdown
    coordinator -> prefill   Prefill, Push, Release, Shutdown
    both    -> coordinator   Ready or Refused, then Progress, Heartbeat
    prefill -> decode        HandOver, as the note of the last post

A request's `generation` is in every message, so an answer to an attempt that is over is recognized and dropped.

Pages at decode are written by a peer, so they are given back only when that peer can write no more: the coordinator
sends Release to prefill first and to decode after prefill's Released (or its death).
"""

from dataclasses import dataclass, field

from narrows.core.plan import Landing
from narrows.core.request import FinishReason, Request, SampledToken
from narrows.core.topology import InstanceInfo


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
    held at decode. Prefill's token and decode's first come from two processes, so in either order."""

    request: str
    generation: int
    index: int
    token: SampledToken
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """This attempt can not go on here. `retry`: another attempt may succeed. `held`: its pages stay until Release,
    since a peer may still write to them or read from them."""

    request: str
    generation: int
    error: str
    retry: bool = False
    held: bool = True


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
class Progress:
    """All that one turn of an instance has to say, in order, and its load after the turn."""

    reserved: tuple[Reserved, ...] = ()
    started: tuple[Started, ...] = ()
    produced: tuple[Produced, ...] = ()
    failed: tuple[Failed, ...] = ()
    released: tuple[Released, ...] = ()
    load: Load = field(default_factory=Load)


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
class HandOver:
    """Prefill to decode, behind the last byte of KV: what decode continues from."""

    token: int  # sampled at prefill, its KV not computed yet
    num_tokens: int  # whose KV has been pushed


ToInstance = Reserve | Prefill | Push | Release | Shutdown
ToCoordinator = Ready | Refused | Progress | Heartbeat
