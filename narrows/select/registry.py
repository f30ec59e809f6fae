"""Selection algorithms by name."""

from pathlib import Path

from narrows.errors import ConfigError
from narrows.kernels.base import Kernels
from narrows.select.base import Selector
from narrows.select.exact import ExactSelector
from narrows.select.hata import HataSelector
from narrows.select.infinigen import InfinigenSelector
from narrows.select.quest import QuestSelector
from narrows.select.shape import SelectorShape
from narrows.select.streaming import StreamingSelector

SELECTORS = ("exact", "quest", "infinigen", "hata", "streaming")
NEEDS_CALIBRATION = frozenset({"quest", "infinigen", "hata"})


def open_selector(
    name: str, *, shape: SelectorShape, ratio: float, kernels: Kernels, calibration: Path | None = None
) -> Selector:
    """The algorithm called `name`, reading `ratio` of a request's entries.

    `calibration` is the file that profile.measuring.calibrate made, for those in NEEDS_CALIBRATION. Raises ConfigError
    naming the fix: an unknown name, a ratio that is none, a file that is missing or not for this model.
    """
    if name not in SELECTORS:
        raise ConfigError(f"select: {name!r} is unknown; use none or one of {', '.join(SELECTORS)}")
    if name == "infinigen":
        return InfinigenSelector(shape, ratio, kernels, calibration)
    if name == "hata":
        return HataSelector(shape, ratio, kernels, calibration)
    if name == "quest":
        return QuestSelector(shape, ratio, kernels, calibration)
    return ExactSelector(shape, ratio, kernels) if name == "exact" else StreamingSelector(shape, ratio)
