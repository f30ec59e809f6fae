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
