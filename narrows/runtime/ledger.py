"""The coordinator's two ledgers, and its list of members. See coordinator.py for why they are kept apart."""

from dataclasses import dataclass, field

from narrows.core.ids import InstanceId
from narrows.core.request import Request
from narrows.core.topology import InstanceInfo
from narrows.core.wire import Load, Produced
from narrows.runtime.client import Sink

HoldKey = tuple[str, int]  # request, generation


@dataclass(slots=True)
class Hold:
    """What one attempt occupies, and how far its release has come."""

    request: Request  # as the attempt began
    num_tokens: int  # whose KV decode must have room for, the next step's token included
    prefill: InstanceId | None = None
    decode: InstanceId | None = None
    ending: bool = False
    released: set[InstanceId] = field(default_factory=set)  # told to release


def needs_decode(attempt: Request) -> bool:
    """Whether it wants more than the token that prefill gives."""
    limit = attempt.params.max_tokens
    return limit is None or limit - len(attempt.output) > 1


@dataclass(slots=True)
class Track:
    """A live request."""

    request: Request  # of the current generation; `output` grows with every token
    sink: Sink
    prompt_done: bool = False  # prefill's token of this generation has come
    decoding: bool = False  # all KV of this generation is at decode
    early: dict[int, tuple[InstanceId, Produced]] = field(default_factory=dict)  # tokens ahead of their turn
    cached_tokens: int | None = None  # of the first attempt
    losses: int = 0

    @property
    def key(self) -> HoldKey:
        return self.request.id, self.request.generation


@dataclass(slots=True)
class Member:
    """An instance that is ready."""

    info: InstanceInfo
    load: Load = field(default_factory=Load)
