"""The messages between coordinator and instances. Plain values: the channel decides how they are encoded.

    coordinator -> decode    Reserve, Release, PeerDown, Shutdown
    coordinator -> prefill   Prefill, Release, PeerDown, Shutdown
    decode  -> coordinator   Ready, Reserved, Progress, Released, Heartbeat
    prefill -> coordinator   Ready, Progress, Released, Heartbeat

A request's `generation` is in every message, so an answer to an attempt that is over is recognized and dropped.
"""

from dataclasses import dataclass, field

from narrows.core.ids import InstanceId, RequestId
from narrows.core.plan import Landing
from narrows.core.request import FinishReason, Request, SampledToken
from narrows.core.topology import InstanceInfo


@dataclass(frozen=True, slots=True)
class Ready:
    """An instance has loaded its model and can work."""

    info: InstanceInfo


@dataclass(frozen=True, slots=True)
class Reserve:
    """Make room for this request's KV, which `source` will push; answer with Reserved."""

    request: Request
    source: InstanceId


@dataclass(frozen=True, slots=True)
class Reserved:
    """Room is made (`landing`), or there is none now (None): the coordinator tries again later."""

    request: RequestId
    generation: int
    landing: Landing | None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute this request's KV and its next token, and push the KV to the landing."""

    request: Request
    landing: Landing


@dataclass(frozen=True, slots=True)
class Started:
    """A phase has begun on this request; at decode, `handover_bytes` have arrived."""

    request: RequestId
    generation: int
    handover_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Produced:
    """One token of a request, and whether it is the last."""

    request: RequestId
    generation: int
    token: SampledToken
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """This attempt is over without an ending; `retry` says that another attempt may succeed."""

    request: RequestId
    generation: int
    error: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Forget this attempt: stop computing, cancel what is not sent, give pages back when nothing can write to them."""

    request: RequestId
    generation: int


@dataclass(frozen=True, slots=True)
class Released:
    """Nothing of this attempt is left here: no page is held, nothing more will be sent or written."""

    request: RequestId
    generation: int


@dataclass(frozen=True, slots=True)
class Progress:
    """All that one step of an instance has to say, in order, with its load after the step."""

    started: tuple[Started, ...] = ()
    produced: tuple[Produced, ...] = ()
    failed: tuple[Failed, ...] = ()
    load: "Load" = field(default_factory=lambda: Load())


@dataclass(frozen=True, slots=True)
class Load:
    """What an instance holds: pages not free (cached pages that can be dropped count as free), requests in a batch."""

    used_pages: int = 0
    cached_pages: int = 0
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Either side is alive."""

    load: Load | None = None


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Coordinator to instances: this incarnation of an instance is dead and can write no more."""

    instance: InstanceId
    incarnation: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish nothing more; close and exit."""
