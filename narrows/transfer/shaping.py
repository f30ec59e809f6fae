"""A link of a given rate, as arithmetic: time is an argument."""


class TokenBucket:
    """Says when bytes may leave so that no more than the rate passes.

    Bytes are paid for before they leave: n bytes on an idle link leave n / rate after they were asked for, as their
    last byte would on a real one. While a backlog waits, tokens pile up for `catch_up_s`, so a late wake-up costs no
    rate; an idle link keeps only `idle_bytes`, so a rest earns no burst.
    """

    def __init__(self, bytes_per_s: float, now: float, *, idle_bytes: int = 4096, catch_up_s: float = 0.05) -> None:
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


_FAST_BLOCKS = 4  # a window: 2 Gbit/s with the usual 64 KiB and 1 ms


class Pace:
    """How many bytes of a link's less urgent traffic may be ahead of an urgent frame: one block, or on a link that
    moves several blocks in `window_s`, as much as it moves in that time. Learned from how fast a backlog drains; a
    shaped link keeps to one block.

    Fast links need it: a frame of 64 KiB takes a 20 Gbit/s link less time than it takes Python to make the next one.
    """

    def __init__(self, block_bytes: int, *, fixed: bool, window_s: float = 0.001, most_bytes: int = 2 << 20) -> None:
        self.burst_bytes = block_bytes
        self._block_bytes = block_bytes
        self._most_bytes = block_bytes if fixed else max(block_bytes, most_bytes)
        self._window_s = window_s
        self._since: float | None = None  # when the backlog began, or was last judged
        self._sent = 0

    def count(self, num_bytes: int) -> None:
        """The link has taken so many bytes."""
        self._sent += num_bytes

    def judge(self, now: float) -> bool:
        """Called while a backlog waits. Returns whether burst_bytes has changed."""
        if self._since is None:
            self._since, self._sent = now, 0
            return False
        elapsed_s = now - self._since
        if elapsed_s < 2 * self._window_s:
            return False
        before = self.burst_bytes
        drained = int(self._sent / elapsed_s * self._window_s)
        wished = self._block_bytes
        if drained >= _FAST_BLOCKS * self._block_bytes:
            wished = max(wished, min(drained, 2 * before, self._most_bytes))
        # a change costs a call into the kernel, so small ones are let be, but not the way back to one block
        if not 0.75 * before < wished < 1.5 * before or wished in (self._block_bytes, self._most_bytes):
            self.burst_bytes = wished
        self._since, self._sent = now, 0
        return self.burst_bytes != before

    def rest(self) -> None:
        """No backlog: what passes now says nothing about the link."""
        self._since = None


def bucket_for(link_gbps: float | None, now: float) -> TokenBucket | None:
    """The bucket of a link of so many 10^9 bits per second, or None for an unshaped one."""
    return None if link_gbps is None else TokenBucket(link_gbps * 1e9 / 8, now)
