"""Time as an argument: the deciding half never reads a clock, the doing half reads one of these."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since an arbitrary start; never goes back."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's own clock; comparable between processes of one machine."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that a test or the simulator moves by hand."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0.0
        self._now_s += seconds
