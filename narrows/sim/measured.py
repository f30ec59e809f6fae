"""Costs from measurements: interpolated between the measured points, or fitted to them by affine functions.

Both are read from one kind of file (docs/simulator-costs.md). Phases that a file does not have take no time; prefill
and transfers must be there once they are asked for.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.errors import ConfigError
from narrows.profile.timing import Timing, Work, non_negative_least_squares
from narrows.sim import names
from narrows.sim.cost import Floats, LayerTimes, StepLoad, StepTimes

VERSION = 1
# What each phase is measured over, in the order of its table's dims.
AXES: dict[str, tuple[str, ...]] = {
    "attention": ("batch", "kv_tokens"),
    "other": ("batch",),
    "mlp": ("batch",),
    "dispatch": ("batch",),
    "expert": ("batch",),
    "combine": ("batch",),
    "q_route": ("queries",),
    "result_route": ("queries",),
    "prefill": ("uncached", "context"),
    "transfer_within": ("bytes",),
    "transfer_across": ("bytes",),
}
REQUIRED = ("attention", "other")


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """A phase's measured seconds over its axes, each ascending."""

    axes: tuple[Floats, ...]
    seconds: Floats  # [len(axis), ...]

    def __call__(self, *at: npt.ArrayLike) -> Floats:
        """Linear between points. Before an axis's first point it is as at that; beyond the last it goes on as between
        the last two, yet never falls below zero."""
        values = [np.asarray(a, dtype=np.float64) for a in at]
        total = np.zeros(np.broadcast_shapes(*(value.shape for value in values)))
        corners: list[tuple[tuple[Any, ...], Any]] = [((), 1.0)]
        for axis, value in zip(self.axes, values, strict=True):
            if len(axis) == 1:
                low = high = np.zeros(value.shape, dtype=np.int64)
                part = np.zeros(value.shape)
            else:
                low = np.clip(np.searchsorted(axis, value, side="right") - 1, 0, len(axis) - 2)
                high = low + 1
                part = np.maximum(value - axis[low], 0.0) / (axis[high] - axis[low])
            corners = [
                ((*place, index), weight * share)
                for place, weight in corners
                for index, share in ((low, 1 - part), (high, part))
            ]
        for place, weight in corners:
            total = total + weight * self.seconds[place]
        return np.maximum(total, 0.0)

    @property
    def points(self) -> tuple[Floats, Floats]:
        """Places [n, dims] and seconds [n]."""
        mesh = np.meshgrid(*self.axes, indexing="ij")
        return np.stack([part.ravel() for part in mesh], axis=1), self.seconds.ravel()


@dataclass(frozen=True, slots=True)
class Affine:
    """constant + slopes . place, none of them negative."""

    constant: float
    slopes: tuple[float, ...]

    @classmethod
    def fit(cls, grid: Grid) -> "Affine":
        """By least squares of relative errors, so that short times are met as well as long ones."""
        places, seconds = grid.points
        weights = 1 / np.maximum(seconds, max(float(seconds.max()) * 1e-6, 1e-12))
        features = np.column_stack([np.ones(len(seconds)), places])
        found = non_negative_least_squares(features * weights[:, None], seconds * weights)
        return cls(float(found[0]), tuple(map(float, found[1:])))

    def __call__(self, *at: npt.ArrayLike) -> Floats:
        total: Floats = np.asarray(self.constant, dtype=np.float64)
        for slope, value in zip(self.slopes, at, strict=True):
            total = total + slope * np.asarray(value, dtype=np.float64)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class CostFile:
    """What a file of measured costs says."""

    path: Path
    name: str
    num_moe_layers: int
    num_dense_layers: int
    once_s: float
    grids: Mapping[str, Grid]


class _Measured:
    """A cost whose phases are functions of the load. An idle instance takes no time, whatever a constant says."""

    def __init__(self, file: CostFile, phases: Mapping[str, Callable[..., Floats]]) -> None:
        self.file, self.phases = file, phases
        self.name = file.name

    def decode(self, load: StepLoad) -> StepTimes:
        batch = load.moe_batch
        nothing = np.zeros(load.num_instances)
        queries = np.maximum(load.sent, load.received)
        if load.sent_across is not None and load.received_across is not None:
            queries = queries + np.maximum(load.sent_across, load.received_across)

        def phase(name: str, busy: npt.NDArray[np.int64], *at: npt.ArrayLike) -> Floats:
            return np.where(busy > 0, self.phases[name](*at), 0.0) if name in self.phases else nothing

        larger = np.maximum(batch, batch.mean())  # an instance's experts serve an equal part of everyone's tokens
        everyone = np.full(load.num_instances, batch.sum())
        before = (
            phase("other", batch, batch),
            phase("q_route", queries, queries),
            phase("attention", load.attention_batch, load.attention_batch, load.kv_tokens),
            phase("result_route", queries, queries),
        )
        moe = LayerTimes(
            *before,
            phase("dispatch", everyone, larger),
            phase("expert", everyone, np.full(load.num_instances, batch.mean())),
            phase("combine", everyone, larger),
        )
        dense = LayerTimes(*before, nothing, phase("mlp", batch, batch), nothing)
        return StepTimes(moe, self.file.num_moe_layers, dense, self.file.num_dense_layers, self.file.once_s)

    def transfer_s(self, num_bytes: float, *, across: bool = True) -> float:
        return float(self._needed("transfer_across" if across else "transfer_within")(num_bytes))

    def _needed(self, name: str) -> Callable[..., Floats]:
        if name not in self.phases:
            raise ConfigError(f"{self.file.path}: {name}: missing, and this scenario needs it; measure and add it")
        return self.phases[name]


class Table(_Measured):
    """Interpolated between the measured points."""

    def __init__(self, file: CostFile) -> None:
        super().__init__(file, file.grids)

    def prefill_s(self, batch: Sequence[Work]) -> float:
        """The sum of what each prompt takes alone: what a step does once is counted for each."""
        prefill = self._needed("prefill")
        return sum(float(prefill(work.uncached, work.context)) for work in batch)


class Fitted(_Measured):
    """Affine in the load, fitted to the measured points; prefill as profile.timing fits it."""

    def __init__(self, file: CostFile) -> None:
        super().__init__(file, {name: Affine.fit(grid) for name, grid in file.grids.items()})

    def prefill_s(self, batch: Sequence[Work]) -> float:
        self._needed("prefill")
        return _timing(self.file).prefill_s(batch)


def _timing(file: CostFile) -> Timing:
    places, seconds = file.grids["prefill"].points
    measured = [
        ([Work(int(uncached), int(context))], s) for (uncached, context), s in zip(places, seconds, strict=True)
    ]
    return Timing.fit([(work, s) for work, s in measured if work[0].uncached <= work[0].context], model="", setup="")


# -- files -----------------------------------------------------------------------------------------------------------


def read_costs(path: Path) -> CostFile:
    """A file of measured costs. Raises ConfigError naming the file, the field and the fix."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"costs: {path} can not be read: {error.strerror or error}; name a file that exists"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"costs: {path} is not JSON: {error}; see docs/simulator-costs.md") from None
    if not isinstance(said, dict):
        raise ConfigError(f"costs: {path} is not a JSON object; see docs/simulator-costs.md")
    known = ("version", "name", "source", "moe_layers", "dense_layers", "once_us", *AXES)
    for key in said:
        if key not in known:
            raise ConfigError(f"{path}: {key}: unknown field{names.nearest(key, known)}")
    if said.get("version") != VERSION:
        raise ConfigError(f"{path}: version: {said.get('version')!r} is not {VERSION}, the one this program reads")
    for key in REQUIRED:
        if key not in said:
            raise ConfigError(f"{path}: {key}: missing; measure and add it")
    moe, dense = (_count(path, key, said.get(key, 0)) for key in ("moe_layers", "dense_layers"))
    if moe + dense == 0:
        raise ConfigError(f"{path}: moe_layers: there is no layer; give moe_layers, dense_layers or both")
    once = _numbers(path, "once_us", [said.get("once_us", 0.0)])[0]
    grids = {key: _grid(path, key, said[key], axes) for key, axes in AXES.items() if key in said}
    return CostFile(path, str(said.get("name", path.stem)), moe, dense, once * 1e-6, grids)


def _grid(path: Path, key: str, said: Any, names_of_axes: tuple[str, ...]) -> Grid:
    fields = (*names_of_axes, "us")
    if not isinstance(said, dict) or set(said) != set(fields):
        raise ConfigError(f"{path}: {key}: must be an object of {', '.join(fields)}, each a list of numbers")
    axes = []
    for name in names_of_axes:
        axis = np.array(_numbers(path, f"{key}.{name}", said[name]))
        if (np.diff(axis) <= 0).any():
            raise ConfigError(f"{path}: {key}.{name}: does not ascend; sort it, each value once")
        axes.append(axis)
    shape = tuple(len(axis) for axis in axes)
    rows = said["us"] if len(axes) == 2 else [said["us"]]
    if not isinstance(rows, list) or len(rows) != (shape[0] if len(axes) == 2 else 1):
        raise ConfigError(f"{path}: {key}.us: must have {shape[0]} rows, one for each {names_of_axes[0]}")
    seconds = []
    for index, row in enumerate(rows):
        where = f"{key}.us[{index}]" if len(axes) == 2 else f"{key}.us"
        values = _numbers(path, where, row)
        if len(values) != shape[-1]:
            raise ConfigError(f"{path}: {where}: {len(values)} times for {shape[-1]} values of {names_of_axes[-1]}")
        seconds.append(values)
    return Grid(tuple(axes), np.array(seconds).reshape(shape) * 1e-6)


def _numbers(path: Path, where: str, said: Any) -> list[float]:
    if not isinstance(said, list) or not said:
        raise ConfigError(f"{path}: {where}: must be a list of numbers, at least one")
    for value in said:
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{path}: {where}: {value!r} is not allowed; use numbers of at least 0")
    return [float(value) for value in said]


def _count(path: Path, key: str, said: Any) -> int:
    if type(said) is not int or said < 0:
        raise ConfigError(f"{path}: {key}: {said!r} is not allowed; use a whole number of at least 0")
    return said
