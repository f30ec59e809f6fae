"""What a decode group looked like over time: one sample a stretch of steps; means over the tokens that steps made.

A step counts by its requests, so that the steps in which a run begins and drains do not outweigh what is between.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrows.core.ids import InstanceId
from narrows.sim.cost import Floats, Ints, StepLoad
from narrows.sim.steps import Steps


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """[N] samples of W instances; what is said of a sample holds from start_s to end_s, KV at the start."""

    start_s: Floats  # [N]
    end_s: Floats  # [N]
    steps: Ints  # [N]
    queue: Ints  # [N] requests that wait for room
    batch: Ints  # [N, W] requests by MoE binding
    kv_tokens: Ints  # [N, W] that attention reads
    free_pages: Ints  # [N, W] at the end


class Series:
    """Collects; belongs to one group."""

    def __init__(self, names: Sequence[InstanceId]) -> None:
        self.names = tuple(names)
        self.num_steps = 0
        self.num_tokens = 0
        self.step_s = 0.0  # of all steps together
        self.max_batch = 0
        self.max_kv_tokens = 0
        self.min_free_pages: int | None = None
        self._sums: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._rows: list[tuple[float, float, int, int]] = []
        self._arrays: list[tuple[Ints, Ints, Ints]] = []

    def note(
        self, start_s: float, ends_s: Floats, load: StepLoad, kv_tokens: Ints, free: Ints, queue: int, times: Steps
    ) -> None:
        """`ends_s` [S] of steps that began at start_s, kv_tokens [S, W] of each, all else of all of them."""
        steps = len(ends_s)
        self.num_steps += steps
        self.step_s += float(ends_s[-1]) - start_s
        self.max_batch = max(self.max_batch, int(load.moe_batch.max()))
        self.max_kv_tokens = max(self.max_kv_tokens, int(kv_tokens[-1].max()))
        least = int(free.min())
        self.min_free_pages = least if self.min_free_pages is None else min(self.min_free_pages, least)
        requests = int(load.moe_batch.sum())
        self.num_tokens += steps * requests
        means = np.maximum(kv_tokens.mean(axis=1), 1)
        self._add("batch_cv", requests * steps, float(load.moe_batch.std() / load.moe_batch.mean()))
        self._add("kv_cv", requests, kv_tokens.std(axis=1) / means)
        self._add("attention_s", requests, times.layer_attention_s)
        for name in ("moe_s", "cp_s", "cp_mean_s", "other_s"):
            self._add(name, requests * steps, getattr(times, f"layer_{name}"))
        self._rows.append((start_s, float(ends_s[-1]), steps, queue))
        self._arrays.append((load.moe_batch.astype(np.int32), kv_tokens[0].astype(np.int32), free.astype(np.int32)))

    def _add(self, name: str, weight: int, values: Floats | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + weight * float(np.sum(values))
        self._peaks[name] = max(self._peaks.get(name, 0.0), float(np.max(values)))

    def mean(self, name: str) -> float | None:
        """Over tokens; None: there were none. CVs are those over instances: standard deviation / mean."""
        return self._sums[name] / self.num_tokens if self.num_tokens else None

    def peak(self, name: str) -> float | None:
        """The largest of any step."""
        return self._peaks.get(name)

    def samples(self) -> Samples:
        rows: Any = np.array(self._rows, np.float64).reshape(-1, 4)
        width = len(self.names)
        arrays = [np.array([item[i] for item in self._arrays], np.int64).reshape(-1, width) for i in range(3)]
        return Samples(rows[:, 0], rows[:, 1], rows[:, 2].astype(np.int64), rows[:, 3].astype(np.int64), *arrays)
