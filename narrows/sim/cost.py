"""How long things take: the contract of the simulator with whatever knows it, and its null twin.

    StepLoad (what each instance has to do) ──▶ Cost.decode ──▶ StepTimes: phases of a layer on each of W instances

Phases of a MoE layer, in order, with NanoCP's names (section 5.1 and figure 15):

    other ─ q_route ─ attention ─ result_route ─▶ dispatch ─ expert ─ combine
    └────── each instance for itself ─────────┘   └─ all wait for the slowest ┘

`other` is projections, norms, gating, merging and launches. Times are seconds of one layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

from narrows.profile.timing import Work

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StepLoad:
    """One decode step of a lock-step group of W instances. A query that goes to another instance comes back as a
    result, so `sent` counts both what an instance sends of queries and what it receives of results."""

    moe_batch: Ints  # [W] M: requests whose MoE binding it is
    attention_batch: Ints  # [W] N: requests (or shards of them) it attends for, padding of a graph included
    kv_tokens: Ints  # [W] tokens it attends to
    sent: Ints  # [W] queries it sends to others in its node
    received: Ints  # [W] queries it receives from others in its node
    sent_across: Ints | None = None  # [W] queries it sends to other nodes; None: none
    received_across: Ints | None = None  # [W]

    @classmethod
    def local(cls, batch: Ints, kv_tokens: Ints) -> "StepLoad":
        """Every request where its KV is: data parallelism, or one instance alone."""
        none = np.zeros_like(batch)
        return cls(batch, batch, kv_tokens, none, none)

    @property
    def num_instances(self) -> int:
        return len(self.moe_batch)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTimes:
    """Seconds of each phase of one layer on each instance, each [W]."""

    other: Floats
    q_route: Floats
    attention: Floats
    result_route: Floats
    dispatch: Floats
    expert: Floats
    combine: Floats

    @property
    def cp(self) -> Floats:
        """CP communication: both routes."""
        return self.q_route + self.result_route

    @property
    def moe(self) -> Floats:
        """MoE communication: dispatch and combine."""
        return self.dispatch + self.combine

    @property
    def lock_step_s(self) -> float:
        """When the slowest member is through. All need every member's dispatch, so the halves before and after it
        each last as long as on their slowest member."""
        before = self.other + self.q_route + self.attention + self.result_route
        after = self.dispatch + self.expert + self.combine
        return float(before.max(initial=0.0) + after.max(initial=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """A whole step: `num_moe_layers` like `moe`, `num_dense_layers` like `dense` (no dispatch and combine), and
    `once_s` for what is done once: embedding, head, sampling, launching the graph."""

    moe: LayerTimes
    num_moe_layers: int
    dense: LayerTimes
    num_dense_layers: int
    once_s: float

    @property
    def total_s(self) -> float:
        layers = self.num_moe_layers * self.moe.lock_step_s + self.num_dense_layers * self.dense.lock_step_s
        return layers + self.once_s


def overlapped_s(first: StepTimes, second: StepTimes) -> float:
    """A step in two halves of its requests, each computing while the other communicates (two-batch overlap): attention
    and what stands before it overlap with the other half's dispatch and combine, experts with nothing (NanoCP,
    section 7). Each half's times are those of its own load."""

    def layer_s(own: LayerTimes, other: LayerTimes) -> float:
        before = own.other + own.q_route + own.attention + own.result_route
        return max(float(before.max(initial=0.0)), float(other.moe.max(initial=0.0))) + float(
            own.expert.max(initial=0.0)
        )

    def both_s(a: LayerTimes, b: LayerTimes) -> float:
        return layer_s(a, b) + layer_s(b, a)

    layers = first.num_moe_layers * both_s(first.moe, second.moe)
    return layers + first.num_dense_layers * both_s(first.dense, second.dense) + max(first.once_s, second.once_s)


class Cost(Protocol):
    """Pure functions of their arguments; W is the length of the load's arrays."""

    @property
    def name(self) -> str: ...

    def decode(self, load: StepLoad) -> StepTimes:
        """One token of every request of the group."""
        ...

    def prefill_s(self, batch: Sequence[Work]) -> float:
        """Prompts computed together on one instance. Layers take equal parts of it."""
        ...

    def transfer_s(self, num_bytes: float, *, across: bool = True) -> float:
        """Bytes alone on the way to another instance: in another node, or in the same one."""
        ...


@dataclass(frozen=True, slots=True)
class Null:
    """The null twin: every phase and every operation takes a constant time, whatever there is to do."""

    phase_s: float = 1.0
    once_s: float = 0.0
    prefill_step_s: float = 1.0
    transfer_all_s: float = 0.0
    num_layers: int = 1
    name: str = "null"

    def decode(self, load: StepLoad) -> StepTimes:
        every = np.full(load.num_instances, self.phase_s)
        times = LayerTimes(*(every for _ in fields(LayerTimes)))
        return StepTimes(times, self.num_layers, times, 0, self.once_s)

    def prefill_s(self, batch: Sequence[Work]) -> float:
        return self.prefill_step_s

    def transfer_s(self, num_bytes: float, *, across: bool = True) -> float:
        return self.transfer_all_s
