"""Costs of what NanoCP's data plane replaces (section 6.6), around any other cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from narrows.profile.timing import Work
from narrows.sim.cost import Cost, Ints, LayerTimes, StepLoad, StepTimes


@dataclass(frozen=True, slots=True)
class DenseCollective:
    """CP communication by a collective of fixed shape over each node (NCCL all-to-all): as soon as one request of a
    node is spread, every instance exchanges as many queries with each other one as the largest batch has, empty ones
    too."""

    cost: Cost
    per_node: int

    @property
    def name(self) -> str:
        return f"{self.cost.name}, dense collective"

    def decode(self, load: StepLoad) -> StepTimes:
        dense = np.zeros_like(load.sent)
        for first in range(0, load.num_instances, self.per_node):
            node = slice(first, first + self.per_node)
            if load.sent[node].any():
                batch = load.moe_batch[node]
                dense[node] = int(batch.max()) * (len(batch) - 1)
        return self.cost.decode(replace(load, sent=dense, received=dense.copy()))

    def prefill_s(self, batch: Sequence[Work]) -> float:
        return self.cost.prefill_s(batch)

    def transfer_s(self, num_bytes: float, *, across: bool = True) -> float:
        return self.cost.transfer_s(num_bytes, across=across)


@dataclass(frozen=True, slots=True)
class PiecewiseGraph:
    """A CUDA graph for each piece between operations that are launched one by one: every layer waits `gap_s` for the
    processor on each instance that has something to do."""

    cost: Cost
    gap_s: float

    @property
    def name(self) -> str:
        return f"{self.cost.name}, piecewise graphs"

    def decode(self, load: StepLoad) -> StepTimes:
        times = self.cost.decode(load)
        return replace(
            times, moe=self._slower(times.moe, load.moe_batch), dense=self._slower(times.dense, load.moe_batch)
        )

    def _slower(self, layer: LayerTimes, batch: Ints) -> LayerTimes:
        return replace(layer, other=layer.other + np.where(batch > 0, self.gap_s, 0.0))

    def prefill_s(self, batch: Sequence[Work]) -> float:
        return self.cost.prefill_s(batch)

    def transfer_s(self, num_bytes: float, *, across: bool = True) -> float:
        return self.cost.transfer_s(num_bytes, across=across)
