"""A link of a given rate, as arithmetic: time is an argument."""


class TokenBucket:
    """Says when bytes may leave so that no more than the rate passes.

    Bytes are paid for before they leave: n bytes on an idle link leave n / rate after they were asked for, as their
    last byte would on a real one. While a backlog waits, tokens pile up for `catch_up_s`, so a late wake-up costs no
    rate; an idle link keeps only `idle_bytes`, so a rest earns no burst.
    """

    def __init__(self, bytes_per_s: float, now: float, *, idle_bytes: int = 4096, catch_up_s: float = 0.02) -> None:
        assert bytes_per_s > 0
        self._rate = bytes_per_s
        self._idle_bytes = float(idle_bytes)
        self._catch_up_bytes = max(bytes_per_s * catch_up_s, idle_bytes)
        self._level = float(idle_bytes)  # bytes that may leave now; negative after charge() beyond it
        self._now = now

    def wait_s(self, num_bytes: int, now: float) -> float:
        """Seconds until `num_bytes` may leave; 0 when they may now. Takes nothing."""
        self._fill(now, num_bytes)
        return max(0.0, (num_bytes - self._level) / self._rate)

    def charge(self, num_bytes: int, now: float) -> None:
        """Count bytes that leave now, allowed or not: what leaves too early delays what comes after."""
        self._fill(now, num_bytes)
        self._level -= num_bytes

    def rest(self, now: float) -> None:
        """Nothing waits: forget tokens beyond the idle allowance."""
        self._fill(now, 0)
        self._level = min(self._level, self._idle_bytes)

    def _fill(self, now: float, num_bytes: int) -> None:
        # a frame larger than the cap must still become payable
        cap = max(self._catch_up_bytes, num_bytes)
        self._level = min(self._level + (now - self._now) * self._rate, max(cap, self._level))
        self._now = now


def bucket_for(link_gbps: float | None, now: float) -> TokenBucket | None:
    """The bucket of a link of so many 10^9 bits per second, or None for an unshaped one."""
    return None if link_gbps is None else TokenBucket(link_gbps * 1e9 / 8, now)
