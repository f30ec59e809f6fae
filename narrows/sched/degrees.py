"""Bucket: how many instances share a request's KV, by its length (NanoCP, section 4.2.2)."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from narrows.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bucket:
    """CP degree by length: degrees[i] up to and with thresholds[i] tokens, degrees[-1] beyond the last.

    Raises ConfigError unless thresholds ascend from 1 and degrees, one more of them, do not fall.
    """

    thresholds: tuple[int, ...] = ()  # tokens
    degrees: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if len(self.degrees) != len(self.thresholds) + 1:
            raise ConfigError(
                f"bucket.degrees: {len(self.degrees)} for {len(self.thresholds)} thresholds; give one degree more than "
                "thresholds, the last for all longer requests"
            )
        if any(below >= above for below, above in pairwise((0, *self.thresholds))):
            raise ConfigError(f"bucket.thresholds: {list(self.thresholds)} do not ascend; use tokens from 1 on, rising")
        if self.degrees[0] < 1 or any(above < below for below, above in pairwise(self.degrees)):
            raise ConfigError(f"bucket.degrees: {list(self.degrees)} fall or are below 1; longer needs as many or more")

    def __call__(self, length: int) -> int:
        """The degree of a request of that many tokens."""
        return self.degrees[bisect_left(self.thresholds, length)]


# For MLA on nodes of eight: an estimate, until a profile of the machine replaces it. DeepSeek-V3's attention takes some
# 0.48 ns a token and layer (278 kFLOP at the 580 TFLOP/s that FlashMLA states for H800). Going from k to 2k members
# saves half of each one's share; it is taken to cost 8 us of routing a layer, of which NanoCP states 60.4 us on average
# and 35.5 us at most for the all-to-all alone (sections 6.5 and 6.7). It pays from 2k * 8 us / 0.48 ns = k * 33 K on.
MLA_BUCKET = Bucket((32_768, 65_536, 131_072), (1, 2, 4, 8))
