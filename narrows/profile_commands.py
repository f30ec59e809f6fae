"""The commands of `narrows profile`: measure, save, print."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from narrows.bench.results import document
from narrows.config import EngineConfig
from narrows.errors import ConfigError
from narrows.kv.layout import DENSE_LAYERS
from narrows.models.catalog import resolve
from narrows.profile.importance import ImportanceProfile
from narrows.profile.timing import Timing, Work
from narrows.profiles import CALIBRATED, Workshop, ensure_calibration, progress_bar

_TIMES = ((128, 128), (1024, 1024), (4096, 4096), (128, 4096), (1024, 4096))  # (uncached, context) that are shown


def profile_importance(
    config: EngineConfig,
    files: Sequence[Path],
    groups: Sequence[int] | None,
    num_blocks: int,
    num_prompts: int | None,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Measure, save (by default where serving with the same settings finds it) and print."""
    workshop = Workshop(config, resolve(config.model))
    workshop.check_groups(groups or ())
    calibration = ensure_calibration(workshop)
    with progress_bar("measuring which KV matters") as progress:
        made = workshop.importance(
            files, calibration, progress, groups=groups, num_blocks=num_blocks, num_prompts=num_prompts
        )
    out = out or workshop.importance_path(calibration)
    made.save(out)
    rows = importance_rows(made)
    _print_rows(f"importance of KV, {config.select}, {workshop.folder.name}", rows)
    print(out)
    _save(json_file, "profile importance", {"model": config.model, "select": config.select}, rows)


def profile_timing(config: EngineConfig, out: Path | None, json_file: Path | None) -> None:
    """Measure prefill time, save (by default where serving finds it) and print."""
    workshop = Workshop(config, resolve(config.model))
    with progress_bar("measuring prefill") as progress:
        made = workshop.timing(progress)
    out = out or workshop.timing_path
    made.save(out)
    rows = timing_rows(made)
    _print_rows(f"seconds of prefill, {workshop.folder.name}; {made.setup}", rows)
    print(out)
    _save(json_file, "profile timing", {"model": config.model, "setup": made.setup}, rows)


def profile_hash(config: EngineConfig, files: Sequence[Path], out: Path | None) -> None:
    """Make what the selector learns of a model, and save it where serving finds it, or in `out`."""
    workshop = Workshop(config, resolve(config.model))
    if config.select not in CALIBRATED:
        raise ConfigError(f"select: {config.select} learns nothing of a model; {', '.join(CALIBRATED)} do")
    out = out or workshop.calibration_path
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with progress_bar(f"calibrating {config.select}") as progress:
            workshop.calibrate(partial, progress, files)
        partial.replace(out)
    except OSError as error:
        raise ConfigError(f"out: {out} can not be written: {error.strerror or error}; name another file") from error
    finally:
        partial.unlink(missing_ok=True)
    print(out)


def profile_show(path: Path, png: Path | None) -> None:
    """Print what a profile file says; `png` draws importance as a heat map."""
    try:
        made = ImportanceProfile.load(path, model=None, selector=None)
    except ConfigError:
        if png is not None or not path.is_file():
            raise
        try:
            measured = Timing.load(path, model=None, setup=None)
        except ConfigError as error:
            raise ConfigError(f"profile: {path} is neither a profile of importance nor one of timing") from error
        _print_rows(f"seconds of prefill, model {measured.model}; {measured.setup}", timing_rows(measured))
        return
    _print_rows(f"importance of KV: model {made.model}, selector {made.selector}", importance_rows(made))
    if png is not None:
        from narrows.profile.measuring.heatmap import draw

        draw(made, png, f"how often decode selects a KV entry ({path.stem})")
        print(png)


def importance_rows(made: ImportanceProfile) -> list[dict[str, Any]]:
    """A row a group. Shares are of all selections behind the first two layers: where an even spread gives 1, 25 and
    50 %."""
    rows = []
    for group in made.groups:
        selected = made.importance_for(group.num_tokens, 100)[DENSE_LAYERS:].astype(np.float64)
        total = max(float(selected.sum()), 1e-12)
        ranked = np.sort(selected, axis=None)[::-1]
        layers = selected.mean(axis=1) if len(selected) else np.zeros(1)
        rows.append(
            {
                "prompt_tokens": group.num_tokens,
                "blocks": group.matrix.shape[1],
                "selected": float(selected.mean()) if selected.size else 0.0,
                "first_1_percent": float(selected[:, 0].sum() / total),
                "last_25_percent": float(selected[:, 75:].sum() / total),
                "top_half": float(ranked[: len(ranked) // 2].sum() / total),
                "least_selected_layer": DENSE_LAYERS + int(layers.argmin()),
                "most_selected_layer": DENSE_LAYERS + int(layers.argmax()),
            }
        )
    return rows


def timing_rows(made: Timing) -> list[dict[str, Any]]:
    return [{"uncached_tokens": u, "context_tokens": c, "prefill_s": made.prefill_s([Work(u, c)])} for u, c in _TIMES]


def _print_rows(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else f"{v:,}" for v in row.values()))
    output = Console(highlight=False)
    output = output if output.is_terminal else Console(width=140, highlight=False)
    output.print(title, soft_wrap=True)
    output.print(table)


def _save(json_file: Path | None, name: str, config: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(document(name, config, rows), indent=2) + "\n")
