"""What the latency figures of a request are, computed from its events and from nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from narrows.core.events import Event, EventKind
from narrows.core.ids import RequestId
from narrows.core.request import FinishReason
from narrows.core.wire import Delivered

TOKEN_KINDS = (EventKind.FIRST_TOKEN, EventKind.TOKEN)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """One request's figures; None where it has too few tokens for one. All times in seconds."""

    request: RequestId
    arrival_s: float
    token_times_s: tuple[float, ...] = ()
    num_prompt_tokens: int = 0
    cached_tokens: int = 0
    handover_bytes: int = 0  # until decode could begin, all attempts together
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None  # None: still running
    delivered: tuple[Delivered, ...] = ()  # what crossed in all, by attempt
    delivered_s: float | None = None  # when the last of it had
    on_demand: tuple[tuple[int, int], ...] = ()  # of each token behind the first: entries selected, entries fetched

    @property
    def num_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def total_bytes(self) -> int:
        """All that crossed for its KV, on every path."""
        return sum(delivered.num_bytes for delivered in self.delivered)

    @property
    def on_demand_ratio(self) -> tuple[float, ...]:
        """Of each token behind the first: KV entries fetched / entries selected, the first two layers excluded."""
        return tuple(fetched / selected if selected else 0.0 for selected, fetched in self.on_demand)

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def ttst_s(self) -> float | None:
        """First token to the second: where an exposed hand-over shows."""
        return self.token_times_s[1] - self.token_times_s[0] if self.num_tokens > 1 else None

    @property
    def second_token_s(self) -> float | None:
        """Arrival to the second token."""
        return self.token_times_s[1] - self.arrival_s if self.num_tokens > 1 else None

    @property
    def tbt_s(self) -> tuple[float, ...]:
        """The gaps behind the second token, without the time to the second (as in SmartGen)."""
        return tuple(later - earlier for earlier, later in pairwise(self.token_times_s[1:]))

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (tokens - 1), the time to the second token included (as in NanoCP)."""
        if self.num_tokens < 2:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - 1)

    @property
    def cumulative_s(self) -> tuple[float, ...]:
        """(time of token i - arrival) / i, for i = 1, 2, ..."""
        return tuple((time_s - self.arrival_s) / i for i, time_s in enumerate(self.token_times_s, start=1))


def measure(events: Iterable[Event]) -> dict[RequestId, RequestMetrics]:
    """Figures of each request, in the order of arrival. `events` may mix requests; each request's are in order.

    Events of a request whose arrival is not among them are left out.
    """
    by_request: dict[RequestId, list[Event]] = {}
    for event in events:
        if event.kind is EventKind.ARRIVED:
            by_request[event.request] = [event]
        elif event.request in by_request:
            by_request[event.request].append(event)
    return {request: _measure_one(its_events) for request, its_events in by_request.items()}


def _measure_one(events: Sequence[Event]) -> RequestMetrics:
    arrived = events[0]
    return RequestMetrics(
        request=arrived.request,
        arrival_s=arrived.time_s,
        token_times_s=tuple(event.time_s for event in events if event.kind in TOKEN_KINDS),
        num_prompt_tokens=arrived.num_prompt_tokens,
        cached_tokens=sum(event.cached_tokens for event in events if event.kind is EventKind.FIRST_TOKEN),
        handover_bytes=sum(event.num_bytes for event in events if event.kind is EventKind.HANDOVER_DONE),
        delivered_s=max((event.time_s for event in events if event.kind is EventKind.DELIVERED), default=None),
        delivered=tuple(event.delivered for event in events if event.delivered is not None),
        on_demand=tuple((event.selected, event.fetched) for event in events if event.kind is EventKind.TOKEN),
        num_preemptions=sum(event.kind is EventKind.PREEMPTED for event in events),
        finish_reason=next((event.finish_reason for event in events if event.kind is EventKind.FINISHED), None),
    )


def ctl_s(requests: Iterable[RequestMetrics]) -> list[float]:
    """Mean cumulative per-token latency over the token number i = 1, 2, ...: at i the mean of (time of token i -
    arrival) / i over the requests that have i tokens."""
    curves = sorted((request.cumulative_s for request in requests), key=len, reverse=True)
    longest = len(curves[0]) if curves else 0
    means = []
    for i in range(longest):
        while len(curves[-1]) <= i:
            curves.pop()
        means.append(sum(curve[i] for curve in curves) / len(curves))
    return means


def check_lifetime(events: Iterable[Event]) -> None:
    """Assert what holds for all events of requests that are over, whatever happened to them.

    For each request: ARRIVED comes once and first, FINISHED once, with a reason, and behind it at most DELIVERED; time
    does not go back; the first token comes once and before the others. AssertionError names the request.
    """
    by_request: dict[RequestId, list[Event]] = {}
    for event in events:
        by_request.setdefault(event.request, []).append(event)
    for request, its_events in by_request.items():
        kinds = [event.kind for event in its_events]
        said = f"request {request}: {' '.join(kinds)}"
        assert kinds.count(EventKind.FINISHED) == 1, f"not exactly one ending: {said}"
        rest = kinds[kinds.index(EventKind.FINISHED) + 1 :]
        assert set(rest) <= {EventKind.DELIVERED}, f"something after the ending: {said}"
        reason = its_events[kinds.index(EventKind.FINISHED)].finish_reason
        assert reason is not None, f"an ending without a reason: {said}"
        assert kinds.count(EventKind.ARRIVED) == 1, f"not exactly one arrival: {said}"
        assert kinds[0] is EventKind.ARRIVED, f"something before the arrival: {said}"
        tokens = [kind for kind in kinds if kind in TOKEN_KINDS]
        assert EventKind.FIRST_TOKEN not in tokens[1:], f"a first token that is not the first: {said}"
        assert not tokens or tokens[0] is EventKind.FIRST_TOKEN, f"tokens without a first: {said}"
        for earlier, later in pairwise(its_events):
            assert earlier.time_s <= later.time_s, f"{later.kind} is earlier than {earlier.kind}: {said}"
