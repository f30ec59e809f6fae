"""How long prefill computes (Tp) and a transfer takes (Tt): the two sides of SmartGen's equation 2.

A prefill step's time is a sum of what it does: something once a step, something for each token that is computed
(products with weights), something for each position that a token attends to. So

    Tp = a + b * uncached + c * attended

with a, b, c >= 0 fitted to measurements on this machine, for this model and these kernels. Tokens whose KV is cached
are not computed: they only make later ones attend further. What serving observes corrects the whole by one factor:
what changes there (other work on the cores, clock rates) slows all parts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from narrows.errors import ConfigError
from narrows.profile import file

KIND, VERSION = "timing", 1
_WEIGHT = 0.2  # of an observation against all before it
_MOST = 4.0  # one observation counts as at most this many times slower or faster than expected


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt's part of a prefill step."""

    uncached: int  # tokens computed, the prompt's last ones; at least 1
    context: int  # of the prompt in all, cached ones included

    @property
    def attended(self) -> int:
        """Positions that the computed tokens attend to: (context - uncached + 1) + ... + context."""
        return self.uncached * (2 * self.context - self.uncached + 1) // 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Tp of one model on one machine. A value: `observe` gives a new one."""

    model: str  # its fingerprint
    setup: str  # what else it is true for: kernels, dtype, threads
    version: int  # of the file's format
    step_s: float  # a
    token_s: float  # b
    attended_s: float  # c
    factor: float = 1.0  # of the seconds seen while serving over those expected

    @classmethod
    def fit(cls, measured: Iterable[tuple[Sequence[Work], float]], *, model: str, setup: str) -> "Timing":
        """From seconds of steps, each with the prompts it computed. Errors count relative to each step's time, so that
        short prompts are met as well as long ones."""
        rows = [(_features(batch), seconds) for batch, seconds in measured]
        seconds = np.array([s for _, s in rows])
        assert len(rows) and (seconds > 0).all()
        coefficients = non_negative_least_squares(np.array([f for f, _ in rows]) / seconds[:, None], np.ones(len(rows)))
        return cls(model, setup, VERSION, *map(float, coefficients))

    def prefill_s(self, batch: Sequence[Work]) -> float:
        """Seconds until all prompts of the batch, computed together, have their KV."""
        return self.factor * self._expected(batch)

    def observe(self, batch: Sequence[Work], seconds: float) -> "Timing":
        """With the factor moved towards what was seen: an exponentially weighted mean of ratios, in the logarithm,
        so that twice as slow and twice as fast cancel out."""
        expected = self._expected(batch)
        if expected <= 0 or seconds <= 0:
            return self
        ratio = seconds / (expected * self.factor)
        return replace(self, factor=self.factor * min(max(ratio, 1 / _MOST), _MOST) ** _WEIGHT)

    def _expected(self, batch: Sequence[Work]) -> float:
        return float(np.dot(_features(batch), (self.step_s, self.token_s, self.attended_s)))

    def save(self, path: Path) -> None:
        """Write one file, replacing an old one by rename. Raises ConfigError when it can not be written."""
        values = np.array([self.step_s, self.token_s, self.attended_s, self.factor])
        file.write(path, KIND, self.version, {"model": self.model, "setup": self.setup}, {"coefficients": values})

    @classmethod
    def load(cls, path: Path, *, model: str | None, setup: str | None) -> "Timing":
        """Read a file for the model and setup (None: whichever it is for).

        Raises ConfigError when the file is for others, damaged, truncated or of another version.
        """
        header, arrays = file.read(path, KIND, VERSION)
        for name, wanted in (("model", model), ("setup", setup)):
            if wanted is not None and header[name] != wanted:
                raise ConfigError(
                    f"profile: {path} was measured with another {name} ({header[name]}, now {wanted}); "
                    f"measure it anew with: narrows profile {KIND}"
                )
        return cls(header["model"], header["setup"], VERSION, *map(float, arrays["coefficients"]))


def transfer_s(num_bytes: int, bytes_per_s: float) -> float:
    """Tt: seconds that a link of this rate is busy with so many bytes; inf where nothing gets through."""
    return num_bytes / bytes_per_s if bytes_per_s > 0 else math.inf


def _features(batch: Sequence[Work]) -> tuple[float, float, float]:
    return (1.0, float(sum(w.uncached for w in batch)), float(sum(w.attended for w in batch)))


def non_negative_least_squares(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """x >= 0 that minimizes |a x - b|, for a few unknowns.

    At the minimum some unknowns are zero and the others solve the ordinary problem, so the best of all such choices
    that has no negative value is the answer.
    """
    size = a.shape[1]
    best, least = np.zeros(size), float(b @ b)
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            part = a[:, chosen]
            scale = np.linalg.norm(part, axis=0)
            scale[scale == 0] = 1
            x = np.linalg.lstsq(part / scale, b, rcond=None)[0] / scale
            error = float(np.sum((part @ x - b) ** 2))
            if (x >= 0).all() and error < least:
                best, least = np.zeros(size), error
                best[list(chosen)] = x
    return best
