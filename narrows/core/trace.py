"""A timeline: what an instance computed and what crossed its links, when. Recorded only when asked for."""

from collections.abc import Callable
from dataclasses import dataclass

# Lanes of a timeline. Those of traffic are named by path: metadata, proactive, on_demand, speculative.
COMPUTE, GATHER, WAIT, FETCH, KEEP = "compute", "gather", "wait", "fetch", "keep"


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took a while in one lane. Times are this machine's monotonic clock, the same in all processes."""

    lane: str
    name: str
    start_s: float
    end_s: float
    layer: int = -1
    num_bytes: int = 0


class Tracer:
    """Collects spans of one instance, from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._spans: list[Span] = []

    def add(self, lane: str, name: str, start_s: float, *, layer: int = -1, num_bytes: int = 0) -> float:
        """Something that began at start_s ends now; returns now."""
        now_s = self.clock()
        self._spans.append(Span(lane, name, start_s, now_s, layer, num_bytes))
        return now_s

    def take(self) -> tuple[Span, ...]:
        """All since the last call."""
        spans, self._spans = self._spans, []
        return tuple(spans)
