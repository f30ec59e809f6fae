"""How an instance selects and hands over KV: from settings and profile files to the objects that do it."""

from dataclasses import dataclass
from pathlib import Path

from narrows.config import EngineConfig
from narrows.core.scheme import SCHEMES, Scheme
from narrows.errors import ConfigError
from narrows.kernels.base import Kernels
from narrows.models.spec import ModelSpec
from narrows.profile.importance import ImportanceProfile
from narrows.profile.timing import Timing
from narrows.runtime.dtypes import DTYPES
from narrows.runtime.files import ProfileFiles
from narrows.select.base import Selector
from narrows.select.registry import NEEDS_CALIBRATION, open_selector
from narrows.select.shape import SelectorShape

FETCH_PATIENCE_S = 30.0  # without a byte, before KV that a step waits for is given up


@dataclass(frozen=True, slots=True)
class Handing:
    """`selector` None: decode reads all KV, so all of it crosses first."""

    scheme: Scheme = SCHEMES["full"]
    selector: Selector | None = None
    profile: ImportanceProfile | None = None
    timing: Timing | None = None
    staged: bool = False
    patience_s: float = FETCH_PATIENCE_S

    def load_profile(self, path: str) -> ImportanceProfile:
        """Raises ConfigError when the file is for another model or selector than the one in use."""
        model = None if self.profile is None else self.profile.model
        selector = None if self.selector is None else self.selector.fingerprint
        return ImportanceProfile.load(Path(path), model=model, selector=selector)


def open_handing(config: EngineConfig, spec: ModelSpec, kernels: Kernels, files: ProfileFiles) -> Handing:
    """Raises ConfigError when a file is missing or for something else."""
    if config.select == "none":
        return Handing()
    shape = SelectorShape(
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        config.page_size,
        DTYPES[config.dtype],
        files.model or None,
    )
    calibration = None if files.calibration is None else Path(files.calibration)
    if config.select in NEEDS_CALIBRATION and calibration is None:
        raise ConfigError(f"select: {config.select} needs a calibration; make it with: narrows profile hash")
    selector = open_selector(
        config.select, shape=shape, ratio=config.select_ratio, kernels=kernels, calibration=calibration
    )
    profile = timing = None
    if files.importance is not None:
        profile = ImportanceProfile.load(
            Path(files.importance), model=files.model or None, selector=selector.fingerprint
        )
    if files.timing is not None:
        timing = Timing.load(Path(files.timing), model=files.model or None, setup=None)
    return Handing(config.scheme, selector, profile, timing, config.landing == "staged")
