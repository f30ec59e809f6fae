"""The one event schema: the runtime and the simulator produce it, metrics are computed from nothing else."""

from dataclasses import dataclass
from enum import StrEnum

from narrows.core.ids import InstanceId, RequestId
from narrows.core.request import FinishReason, TokenLogprob


class EventKind(StrEnum):
    """Stations of a request. FINISHED comes exactly once and last."""

    ARRIVED = "arrived"
    PLACED = "placed"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    HANDOVER_DONE = "handover_done"  # all KV is at decode
    DECODE_STARTED = "decode_started"
    TOKEN = "token"
    PREEMPTED = "preempted"  # to be recomputed: the pool was full or an instance was lost
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Event:
    """One station of one request. `time_s` is the coordinator's clock at the moment it heard of it."""

    kind: EventKind
    request: RequestId
    time_s: float
    instance: InstanceId | None = None
    token: int | None = None  # FIRST_TOKEN, TOKEN
    logprob: TokenLogprob | None = None
    cached_tokens: int = 0  # FIRST_TOKEN: prompt tokens that prefill did not compute
    num_bytes: int = 0  # HANDOVER_DONE: what crossed the link, frames included
    finish_reason: FinishReason | None = None  # FINISHED
    error: str | None = None  # FINISHED with ERROR: what happened, for the caller
    num_prompt_tokens: int = 0  # ARRIVED
