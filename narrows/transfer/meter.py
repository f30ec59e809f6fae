"""How fast a link is, from what crosses it anyway: time is an argument."""

_LEAST_BYTES = 32 * 1024  # fewer say nothing of a rate
_TELLING_BYTES = 1024 * 1024  # fewer, in a stretch this short, say as much of latency: the link may be faster
_TELLING_S = 0.08
_LEAST_S = 0.02  # of a busy link, before it is judged while more is on its way
_WEIGHT = 0.4  # of the newest sample


class LinkMeter:
    """The rate of one direction to one peer, judged only over stretches in which something was always on its way."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None  # None: nothing has crossed yet
        self._in_flight = 0
        self._since_s = 0.0
        self._landed = 0
        self._judged = False  # since something has always been on its way
        self._is_bound = False  # the link is at least as fast, so far as is known

    def sent(self, num_bytes: int, now_s: float) -> None:
        """So many bytes are handed to the link."""
        if self._in_flight <= 0:
            self._in_flight, self._landed, self._since_s, self._judged = 0, 0, now_s, False
        self._in_flight += num_bytes

    def landed(self, num_bytes: int, now_s: float) -> None:
        """So many of those sent have arrived (or were given up, and then are not counted: 0 landed is `dropped`)."""
        self._in_flight -= num_bytes
        self._landed += num_bytes
        elapsed_s = now_s - self._since_s
        # What is heard of together may have landed apart, so only a stretch as a whole may be judged by a short time.
        is_whole = self._in_flight <= 0 and not self._judged
        if self._landed >= _LEAST_BYTES and elapsed_s > 0 and (is_whole or elapsed_s >= _LEAST_S):
            sample = self._landed / elapsed_s
            old = self.bytes_per_s
            is_telling = self._landed >= _TELLING_BYTES or elapsed_s >= _TELLING_S
            if old is None:
                self.bytes_per_s = sample
                self._is_bound = not is_telling
            elif self._is_bound and (is_telling or sample > old):  # until now it was but a lower bound
                self.bytes_per_s, self._is_bound = sample, not is_telling
            elif is_telling or sample > old:
                self.bytes_per_s = old + _WEIGHT * (sample - old)
            self._landed, self._since_s, self._judged = 0, now_s, True

    def dropped(self, num_bytes: int) -> None:
        """So many bytes will not arrive: what was measured with them says nothing."""
        self._in_flight -= num_bytes
        self._landed = 0
