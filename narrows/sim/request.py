"""One simulated request: how far it is, and what is told of it, in the engine's events."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId, RequestId
from narrows.core.request import FinishReason
from narrows.core.wire import Delivered
from narrows.metrics.definitions import RequestMetrics, measure
from narrows.sim.workload import HASH_BLOCK, Arrival

_OWN = 1 << 40  # token ids of what only one request has: below minus this


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens behind the first that came at these times, one a step."""

    times_s: npt.NDArray[np.float64]
    instance: InstanceId | None
    selected: int = 0  # KV entries read in layers that select; see Event
    fetched: int = 0


@dataclass(slots=True, eq=False)
class Life:
    """A request from its arrival to its end. `produced` counts its tokens so far; `generation` its attempts before;
    `room` is what decode must have room for in this one: what was known at its beginning and the next token."""

    id: RequestId
    index: int  # in the trace
    arrival: Arrival
    produced: int = 0
    generation: int = 0
    room: int = 0
    cached_tokens: int = 0  # of the first attempt
    finished: bool = False
    log: list[Event | Tokens] = field(default_factory=list)  # tokens by time; what is delivered stands before them

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt, then output."""
        return self.arrival.num_prompt + self.produced

    def __post_init__(self) -> None:
        self.room = self.num_tokens + 1

    def start_over(self, time_s: float) -> None:
        """Preempted: to be prefilled again from all tokens known so far."""
        self.tell(EventKind.PREEMPTED, time_s)
        self.generation += 1
        self.room = self.num_tokens + 1

    def sample(self, time_s: float, instance: InstanceId | None) -> None:
        """Prefill's token."""
        if self.produced == 0:
            self.tell(EventKind.FIRST_TOKEN, time_s, instance, cached_tokens=self.cached_tokens)
        else:
            self.log.append(Tokens(np.array([time_s]), instance))
        self.produced += 1

    @property
    def num_left(self) -> int:
        return self.arrival.num_output - self.produced

    def tell(self, kind: EventKind, time_s: float, instance: InstanceId | None = None, **facts: object) -> None:
        self.log.append(Event(kind, self.id, time_s, instance, **facts))  # type: ignore[arg-type]

    def deliver(self, time_s: float, instance: InstanceId, delivered: Delivered) -> None:
        self.tell(EventKind.DELIVERED, time_s, instance, delivered=delivered)

    def finish(self, time_s: float) -> None:
        self.finished = True
        self.tell(EventKind.FINISHED, time_s, finish_reason=FinishReason.LENGTH)

    def tokens(self) -> "array[int]":
        """Token ids that are equal to those of another request just where the trace says that prefixes are equal. What
        the trace has no prefix id for, and the output, is this request's own."""
        ids = array("q")
        for prefix in self.arrival.prefix_ids:
            ids.extend(array("q", [prefix]) * HASH_BLOCK)
        del ids[self.arrival.num_prompt :]
        missing = self.num_tokens - len(ids)
        ids.extend(array("q", [-_OWN - self.index]) * missing)
        return ids

    def events(self) -> Iterator[Event]:
        """In order, one for each token."""
        return iter(sorted(self._expanded(), key=lambda event: event.time_s))

    def _expanded(self) -> Iterator[Event]:
        kind, id = EventKind.TOKEN, self.id
        for entry in self.log:
            if isinstance(entry, Event):
                yield entry
            else:
                at, selected, fetched = entry.instance, entry.selected, entry.fetched
                for time_s in entry.times_s.tolist():
                    yield Event(kind, id, time_s, at, selected=selected, fetched=fetched)

    def measure(self) -> RequestMetrics:
        """As `metrics.measure` of all its events, without making one for each token."""
        stations = [entry for entry in self.log if isinstance(entry, Event)]
        times_s: list[float] = []
        on_demand: list[tuple[int, int]] = []
        for entry in self.log:
            if isinstance(entry, Tokens):
                times_s += entry.times_s.tolist()
                on_demand += [(entry.selected, entry.fetched)] * len(entry.times_s)
            elif entry.kind is EventKind.FIRST_TOKEN:
                times_s.append(entry.time_s)
        measured = measure(stations)[self.id]
        return replace(measured, token_times_s=tuple(times_s), on_demand=tuple(on_demand))


def shared_tokens(a: Life, b: Life) -> int:
    """Length of the longest common prefix of two requests, by their prefix ids."""
    blocks = 0
    for one, other in zip(a.arrival.prefix_ids, b.arrival.prefix_ids, strict=False):
        if one != other:
            break
        blocks += 1
    return min(blocks * HASH_BLOCK, a.arrival.num_prompt, b.arrival.num_prompt)
