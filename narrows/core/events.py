"""The one event schema: the runtime and the simulator produce it, metrics are computed from nothing else."""

from dataclasses import dataclass
from enum import StrEnum

from narrows.core.ids import InstanceId, RequestId
from narrows.core.request import FinishReason, TokenLogprob
from narrows.core.wire import Delivered


class EventKind(StrEnum):
    """Stations of a request. FINISHED comes exactly once and last, but for what is heard of its KV (DELIVERED)."""

    ARRIVED = "arrived"
    PLACED = "placed"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    HANDOVER_DONE = "handover_done"  # decode has what it waits for: all KV, or what it begins with
    DECODE_STARTED = "decode_started"
    DELIVERED = "delivered"  # all KV is at decode, or no more of it comes
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
    num_bytes: int = 0  # HANDOVER_DONE: what crossed the link until then, frames included
    delivered: Delivered | None = None  # DELIVERED: what crossed in all, by path
    selected: int = 0  # TOKEN: KV entries that its step read in layers that select, while some were at prefill
    fetched: int = 0  # TOKEN: and those of them that were fetched
    finish_reason: FinishReason | None = None  # FINISHED
    error: str | None = None  # FINISHED with ERROR: what happened, for the caller
    num_prompt_tokens: int = 0  # ARRIVED
