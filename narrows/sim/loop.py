"""The discrete-event loop: a heap of actions on virtual time. No clock, no randomness."""

import heapq
import math
from collections.abc import Callable
from typing import Any


class Timer:
    """An action to come; belongs to its loop. `cancelled` ones are passed over."""

    __slots__ = ("action", "cancelled", "time_s")

    def __init__(self, time_s: float, action: Callable[[], Any]) -> None:
        self.time_s = time_s
        self.action = action
        self.cancelled = False


class Loop:
    """Runs actions in the order of their times. At equal times the lower rank goes first, then what was asked for
    first, so that a run depends on nothing but its inputs.

    `at` costs O(log n). A cancelled timer stays in the heap until its time.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_run = 0
        self._heap: list[tuple[float, int, int, Timer]] = []
        self._asked = 0

    def at(self, time_s: float, action: Callable[[], Any], rank: int = 0) -> Timer:
        """Run the action at that time, which is not in the past."""
        assert time_s >= self.now_s, (time_s, self.now_s)
        timer = Timer(time_s, action)
        heapq.heappush(self._heap, (time_s, rank, self._asked, timer))
        self._asked += 1
        return timer

    def after(self, seconds: float, action: Callable[[], Any], rank: int = 0) -> Timer:
        return self.at(self.now_s + seconds, action, rank)

    def next_s(self) -> float:
        """When something happens next; inf: never."""
        while self._heap and self._heap[0][3].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def step(self) -> bool:
        """Run one action; False when there is none."""
        if self.next_s() == math.inf:
            return False
        self.now_s, _, _, timer = heapq.heappop(self._heap)
        self.num_run += 1
        timer.action()
        return True

    def run(self, until_s: float = math.inf) -> None:
        """Run what comes up to and at `until_s`; virtual time ends there, or with the last action when it is inf."""
        while self.next_s() <= until_s and self.step():
            pass
        if until_s < math.inf:
            self.now_s = max(self.now_s, until_s)
