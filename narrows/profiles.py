"""What is measured before serving: what is missing is made on first use and kept.

    profiles/MODEL-FINGERPRINT/calibration-SELECTOR-...   what a selector learns of a model
                               importance-SELECTOR-...    which KV blocks matter, by length of the prompt
                               timing-...                 how long prefill computes here

Whatever a file is true for is part of its name, so nothing here loads torch when all files are there.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from narrows import __version__
from narrows.cache import cache_root, make_once
from narrows.config import EngineConfig
from narrows.errors import ConfigError
from narrows.kv.blocks import NUM_BLOCKS
from narrows.models.fingerprint import folder_fingerprint
from narrows.models.spec import ModelSpec, read_spec
from narrows.profile import importance, timing
from narrows.profile.importance import ImportanceProfile
from narrows.profile.measuring.texts import read_texts
from narrows.profile.timing import Timing
from narrows.runtime.files import ProfileFiles

if TYPE_CHECKING:
    from narrows.kernels.base import Kernels
    from narrows.models.layers.decoder import Model
    from narrows.select.base import Selector

console = Console(stderr=True, highlight=False)

# First use waits for these; `narrows profile importance` measures more.
QUICK_GROUPS = (512, 2048, 4096)
QUICK_LIMIT_S = 20.0
CALIBRATED = ("hata", "infinigen", "quest")

OnProgress = Callable[[int, int], None]


# ---- on first use


def ensure_files(config: EngineConfig, folder: Path) -> ProfileFiles:
    """All that an instance with these settings needs of the model in `folder`, made where it is missing.

    Raises ConfigError when `importance` names a file that is not for this model, or a file can not be kept.
    """
    if config.select == "none":
        return ProfileFiles()
    made = Workshop(config, folder)
    calibration = ensure_calibration(made)
    if config.importance is not None:
        chosen = Path(config.importance)
        ImportanceProfile.load(chosen, model=made.model_id, selector=None)  # instances check the selector too
    else:
        chosen = ensure_importance(made)
    return ProfileFiles(
        model=made.model_id,
        calibration=None if calibration is None else str(calibration),
        importance=str(chosen),
        timing=str(ensure_timing(made)),
    )


def ensure_calibration(workshop: "Workshop") -> Path | None:
    """The file of a selector that learns from the model; None for one that does not."""
    if workshop.config.select not in CALIBRATED:
        return None
    path = workshop.calibration_path

    def check(path: Path) -> None:
        workshop.selector(path)

    return _keep(path, f"calibrating {workshop.config.select}", workshop.calibrate, check)


def ensure_importance(workshop: "Workshop") -> Path:
    """Importance at QUICK_GROUPS, as far as the model's context goes, in about QUICK_LIMIT_S seconds."""
    calibration = ensure_calibration(workshop)

    def make(path: Path, progress: OnProgress) -> None:
        workshop.importance([], calibration, progress, groups=QUICK_GROUPS, limit_s=QUICK_LIMIT_S).save(path)

    def check(path: Path) -> None:
        ImportanceProfile.load(path, model=workshop.model_id, selector=None)

    return _keep(workshop.importance_path(calibration), "measuring which KV matters", make, check)


def ensure_timing(workshop: "Workshop") -> Path:
    """Prefill time with these kernels, dtype and threads on this processor."""

    def make(path: Path, progress: OnProgress) -> None:
        workshop.timing(progress).save(path)

    def check(path: Path) -> None:
        Timing.load(path, model=workshop.model_id, setup=workshop.setup)

    return _keep(workshop.timing_path, "measuring prefill", make, check)


def _keep(
    path: Path,
    what: str,
    make: Callable[[Path, OnProgress], None],
    check: Callable[[Path], None] | None = None,
) -> Path:
    """`path`, made with a progress bar if it is missing or does not pass `check`."""

    def make_visibly(scratch: Path) -> None:
        with progress_bar(f"{what}, once") as progress:
            make(scratch, progress)

    try:
        if check is not None and path.exists():
            try:
                check(path)
            except ConfigError:
                path.unlink(missing_ok=True)
        return make_once(path, make_visibly)
    except OSError as error:
        raise ConfigError(
            f"profile: {path} can not be kept: {error}; make room there, or set NARROWS_CACHE to a folder that can be "
            "written"
        ) from error


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[OnProgress]:
    """A bar where a person watches, else one line."""
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_interactive,
    )
    if not console.is_interactive:
        console.print(f"{what} ...", style="dim", soft_wrap=True)
    task = bar.add_task("", total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


class Workshop:
    """A model, and what profiles of it are made with; each part is loaded when it is first needed."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.model_id = folder_fingerprint(folder)
        self.spec: ModelSpec = read_spec(folder)

    # ---- where files are kept

    @property
    def _shelf(self) -> Path:
        return cache_root() / "profiles" / f"{self.folder.name[:48]}-{self.model_id}"

    @property
    def calibration_path(self) -> Path:
        return self._shelf / f"calibration-{self.config.select}-{_digest(__version__)}.safetensors"

    def importance_path(self, calibration: Path | None) -> Path:
        """Another ratio, page size, dtype, calibration or longest group is another file."""
        config = self.config
        content = b"" if calibration is None else calibration.read_bytes()
        longest = min(QUICK_GROUPS[-1], self.max_positions)
        key = _digest(
            __version__,
            importance.VERSION,
            config.select_ratio,
            config.page_size,
            config.dtype,
            longest,
            hashlib.sha256(content).hexdigest(),
        )
        return self._shelf / f"importance-{config.select}-{key}.safetensors"

    @property
    def timing_path(self) -> Path:
        return self._shelf / f"timing-{_digest(__version__, timing.VERSION, self.setup)}.safetensors"

    @property
    def max_positions(self) -> int:
        return min(self.config.max_model_len or self.spec.max_positions, self.spec.max_positions)

    @property
    def setup(self) -> str:
        """What prefill time depends on beside the model."""
        from narrows.bench.results import environment

        threads = self.config.threads or os.cpu_count()
        return f"{self.config.kernels} kernels, {self.config.dtype}, {threads} threads, {environment()['cpu']}"

    # ---- what they are made with

    @cached_property
    def kernels(self) -> "Kernels":
        from narrows.kernels import load

        return load(self.config.kernels, self.config.threads)

    @cached_property
    def model(self) -> "Model":
        from narrows.models.load import load_model
        from narrows.runtime.dtypes import DTYPES

        return load_model(self.folder, DTYPES[self.config.dtype], self.kernels, max_positions=self.max_positions)

    def text(self, files: Sequence[Path]) -> tuple[list[int], list[int]]:
        """Tokens of the files, and what the tokenizer begins every prompt with."""
        from narrows.server.tokenizer import Tokenizer

        tokenizer = Tokenizer(self.folder)
        beginning = tokenizer.encode("")
        tokens = tokenizer.encode("\n\n".join(read_texts(files)), add_special_tokens=False)
        bos = tokenizer.bos_token_id
        return tokens, [bos] if bos is not None and beginning[:1] == [bos] else []

    def selector(self, calibration: Path | None) -> "Selector":
        from narrows.runtime.dtypes import DTYPES
        from narrows.select.registry import open_selector
        from narrows.select.shape import SelectorShape

        config, spec = self.config, self.spec
        shape = SelectorShape(
            spec.num_layers,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            config.page_size,
            DTYPES[config.dtype],
            self.model_id,
        )
        return open_selector(
            config.select, shape=shape, ratio=config.select_ratio, kernels=self.kernels, calibration=calibration
        )

    # ---- making them

    def calibrate(self, path: Path, progress: OnProgress, files: Sequence[Path] = ()) -> None:
        from narrows.profile.measuring.calibrate import calibrate

        tokens, prefix = self.text(files)
        with self._threads():
            calibrate(self.config.select, self.folder, [[*prefix, *tokens]], path, progress, kernels=self.kernels)

    def importance(
        self,
        files: Sequence[Path],
        calibration: Path | None,
        progress: OnProgress,
        *,
        groups: Sequence[int] | None = None,
        num_blocks: int = NUM_BLOCKS,
        num_prompts: int | None = None,
        limit_s: float | None = None,
    ) -> ImportanceProfile:
        """`groups` None: the usual ones, as far as the text goes."""
        from narrows.profile.measuring.importance import GROUPS, NUM_ROWS, fit_groups, measure_importance

        tokens, prefix = self.text(files)
        if self.max_positions <= NUM_ROWS:
            raise ConfigError(
                f"max_model_len: {self.max_positions} tokens are too few to measure importance with; "
                f"use at least {NUM_ROWS + 1}, or select none"
            )
        if groups is None:
            groups = fit_groups(GROUPS, self.max_positions, len(tokens) + len(prefix))
        with self._threads():
            return measure_importance(
                self.model,
                self.kernels,
                self.selector(calibration),
                tokens,
                fingerprint=self.model_id,
                groups=groups,
                num_blocks=num_blocks,
                num_prompts=num_prompts,
                prefix=prefix,
                progress=progress,
                limit_s=limit_s,
            )

    def check_groups(self, groups: Sequence[int]) -> None:
        """Raises ConfigError for prompts that do not fit the context, with what is decoded behind each."""
        from narrows.profile.measuring.importance import NUM_ROWS

        longest = self.max_positions - NUM_ROWS
        if groups and max(groups) > longest > 0:
            raise ConfigError(
                f"groups: {max(groups)} tokens and the {NUM_ROWS} that are decoded behind do not fit a context of "
                f"{self.max_positions}; use at most {longest}"
            )

    def timing(self, progress: OnProgress) -> Timing:
        from narrows.profile.measuring.timing import measure_timing

        with self._threads():
            return measure_timing(
                self.model, self.kernels, fingerprint=self.model_id, setup=self.setup, progress=progress
            )

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """Torch with as many threads as an instance gives it, and afterwards as many as before."""
        import torch

        from narrows.runtime.dtypes import DTYPES

        before = torch.get_num_threads()
        relies = self.kernels.relies_on_torch(DTYPES[self.config.dtype])
        torch.set_num_threads((self.config.threads or before) if relies else 1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
