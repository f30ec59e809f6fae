"""One sender's link: bytes at a rate, the most urgent class first, one transfer at a time inside a class.

The rule is that of the transports (transfer.base): a more urgent class waits for no more than one block of a less
urgent one, and what has one class is sent in the order in which it was asked for. Between block edges bytes flow
evenly, so a transfer costs a few heap operations however long it is. What a receiver takes in from several senders
does not contend.
"""

import heapq
import math
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from narrows.sim.loop import Loop, Timer

BLOCK_BYTES = 64 * 1024
_SLACK = 1e-6  # of a byte, for sums of seconds that should be whole blocks


class Priority(IntEnum):
    """Classes of traffic, most urgent first; the transports' own."""

    ON_DEMAND = 0
    PROACTIVE = 1
    SPECULATIVE = 2


class Transfer:
    """Bytes on their way. `sent` is how much has crossed when it was last looked at; see Link.sent."""

    __slots__ = (
        "asked_s",
        "cancelled",
        "done",
        "num_bytes",
        "on_done",
        "order",
        "path",
        "priority",
        "sent",
        "started_s",
    )

    def __init__(
        self, num_bytes: float, priority: Priority, path: str, on_done: Callable[[], Any], order: int, asked_s: float
    ) -> None:
        self.num_bytes = num_bytes
        self.priority = priority
        self.path = path
        self.on_done = on_done
        self.order = order
        self.asked_s = asked_s
        self.started_s = math.nan  # when it first had the link
        self.sent = 0.0
        self.done = False
        self.cancelled = False


class Link:
    """`bytes_per_s` of one sender; inf: all crosses in no time. What has crossed is heard of `latency_s` later."""

    def __init__(
        self,
        loop: Loop,
        bytes_per_s: float,
        *,
        block_bytes: int = BLOCK_BYTES,
        latency_s: float = 0.0,
        observe: Callable[[Transfer, float], None] | None = None,  # a transfer that has crossed, and when
    ) -> None:
        assert bytes_per_s > 0 and block_bytes > 0
        self.bytes_per_s = bytes_per_s
        self.busy_s = 0.0  # of transfers that had the link, the current one not included
        self._loop = loop
        self._block_bytes = block_bytes
        self._latency_s = latency_s
        self._observe = observe
        self._waiting: list[tuple[int, int, Transfer]] = []
        self._orders = 0
        self._current: Transfer | None = None
        self._since_s = 0.0  # when the current transfer got the link this time
        self._timer: Timer | None = None
        self._stop = 0.0  # how much of the current one will have crossed when the timer ends

    def send(self, num_bytes: float, priority: Priority, path: str, on_done: Callable[[], Any]) -> Transfer:
        """Send so many bytes; `on_done` is called when the last one has arrived."""
        assert num_bytes >= 0
        transfer = Transfer(num_bytes, priority, path, on_done, self._orders, self._loop.now_s)
        self._orders += 1
        self._wait(transfer)
        if self._current is None:
            self._next()
        elif priority < self._current.priority:
            self._yield()
        return transfer

    def cancel(self, transfer: Transfer) -> float:
        """Send no more of it, from the next block edge on; returns the bytes that cross of it in all."""
        if transfer.done or transfer.cancelled:
            return transfer.sent
        transfer.cancelled = True
        if transfer is self._current:
            self._yield()
            return self._stop
        return transfer.sent

    def sent(self, transfer: Transfer) -> float:
        """Bytes of a transfer that have crossed by now."""
        if transfer is not self._current:
            return transfer.sent
        flowed = 0.0 if self._loop.now_s == self._since_s else (self._loop.now_s - self._since_s) * self.bytes_per_s
        return min(transfer.sent + flowed, self._stop)

    @property
    def waiting_bytes(self) -> float:
        """Of transfers that are not done, cancelled ones left out."""
        waiting = sum(t.num_bytes - t.sent for _, _, t in self._waiting if not t.cancelled)
        current = self._current
        return waiting + (0.0 if current is None else self._stop - self.sent(current))

    def _wait(self, transfer: Transfer) -> None:
        heapq.heappush(self._waiting, (transfer.priority, transfer.order, transfer))

    def _next(self) -> None:
        """The link is free: whoever is first gets it."""
        while self._waiting and self._waiting[0][2].cancelled:
            heapq.heappop(self._waiting)
        if not self._waiting:
            self._current = None
            return
        transfer = self._current = heapq.heappop(self._waiting)[2]
        self._since_s = self._loop.now_s
        if math.isnan(transfer.started_s):
            transfer.started_s = self._since_s
        self._stop = transfer.num_bytes
        self._set_timer()

    def _yield(self) -> None:
        """The current transfer keeps the link to the end of the block that is crossing."""
        assert self._current is not None
        sent = self.sent(self._current)
        edge = math.ceil((sent - _SLACK) / self._block_bytes) * self._block_bytes
        if edge < self._stop:
            self._stop = float(max(edge, sent))
            self._set_timer()

    def _set_timer(self) -> None:
        assert self._current is not None
        if self._timer is not None:
            self._timer.cancelled = True
        seconds = (self._stop - self._current.sent) / self.bytes_per_s
        self._timer = self._loop.at(max(self._since_s + seconds, self._loop.now_s), self._crossed)

    def _crossed(self) -> None:
        transfer, now_s = self._current, self._loop.now_s
        assert transfer is not None
        self._timer, self._current = None, None
        self.busy_s += now_s - self._since_s
        transfer.sent = self._stop
        if transfer.sent >= transfer.num_bytes:
            transfer.done = True
            if self._observe is not None:
                self._observe(transfer, now_s)
            if not transfer.cancelled:
                if self._latency_s:
                    self._loop.after(self._latency_s, transfer.on_done)
                else:
                    transfer.on_done()
        elif not transfer.cancelled:
            self._wait(transfer)
        elif self._observe is not None:
            self._observe(transfer, now_s)
        if self._current is None:
            self._next()
