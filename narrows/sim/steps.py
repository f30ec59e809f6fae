"""How long the steps of a lock-step group take, many at once: only what attention reads changes between decisions.

Legend: S steps, W instances.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from narrows.sim.cost import Cost, Floats, Ints, LayerTimes, StepLoad, StepTimes


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Seconds of S steps, and of what a MoE layer (a dense one, where there is no other) of each is made of: the
    slowest instance's attention, MoE communication, CP communication and the rest."""

    total_s: Floats  # [S]
    attention_s: Floats  # [S] of all layers together, the slowest instance's
    layer_attention_s: Floats  # [S]
    layer_moe_s: float
    layer_cp_s: float
    layer_cp_mean_s: float  # over instances
    layer_other_s: float

    def first(self, steps: int) -> "Steps":
        """Of the first so many."""
        return self._part(slice(steps))

    def behind(self, steps: int) -> "Steps":
        """Of those behind the first so many."""
        return self._part(slice(steps, None))

    def _part(self, part: slice) -> "Steps":
        return replace(
            self,
            total_s=self.total_s[part],
            attention_s=self.attention_s[part],
            layer_attention_s=self.layer_attention_s[part],
        )


def time_steps(cost: Cost, halves: Sequence[tuple[StepLoad, Ints]]) -> Steps:
    """Of S steps whose loads differ in nothing but the KV tokens [S, W] that stand beside each load.

    One load: as StepTimes has it. Two are those of two-batch overlap, as cost.overlapped_s has it.
    """
    timed = [_Half(cost, load, kv_tokens) for load, kv_tokens in halves]
    first = timed[0].times
    moe_s, dense_s = _layer_s([half.moe for half in timed]), _layer_s([half.dense for half in timed])
    total = first.num_moe_layers * moe_s + first.num_dense_layers * dense_s
    total = total + max(half.times.once_s for half in timed)
    moe_attention = np.sum([half.moe_attention.max(axis=1, initial=0.0) for half in timed], axis=0)
    dense_attention = np.sum([half.dense_attention.max(axis=1, initial=0.0) for half in timed], axis=0)
    layers = [half.times.moe if first.num_moe_layers else half.times.dense for half in timed]
    return Steps(
        total,
        first.num_moe_layers * moe_attention + first.num_dense_layers * dense_attention,
        moe_attention if first.num_moe_layers else dense_attention,
        sum(float(layer.moe.max(initial=0.0)) for layer in layers),
        sum(float(layer.cp.max(initial=0.0)) for layer in layers),
        sum(float(layer.cp.mean()) for layer in layers),
        sum(float((layer.other + layer.expert).max(initial=0.0)) for layer in layers),
    )


class _Half:
    """One load's times; attention for each of its S steps."""

    def __init__(self, cost: Cost, load: StepLoad, kv_tokens: Ints) -> None:
        steps, width = kv_tokens.shape
        self.times: StepTimes = cost.decode(load)
        # Attention is each instance's own affair, so S steps of W instances are one of S * W.
        none = np.zeros(steps * width, np.int64)
        wide = StepLoad(none, np.tile(load.attention_batch, steps), kv_tokens.reshape(-1), none, none)
        times = cost.decode(wide)
        self.moe_attention = times.moe.attention.reshape(steps, width)
        self.dense_attention = times.dense.attention.reshape(steps, width)
        self.moe = _phases(self.times.moe, self.moe_attention)
        self.dense = _phases(self.times.dense, self.dense_attention)


_Phases = tuple[Floats, float, float, float]


def _phases(layer: LayerTimes, attention: Floats) -> _Phases:
    """The slowest member's time before dispatch [S], behind it, and of the latter: communication, experts."""
    before = layer.other + layer.q_route + attention + layer.result_route
    after = layer.dispatch + layer.expert + layer.combine
    moe, expert = float(layer.moe.max(initial=0.0)), float(layer.expert.max(initial=0.0))
    return before.max(axis=1, initial=0.0), float(after.max(initial=0.0)), moe, expert


def _layer_s(phases: Sequence[_Phases]) -> Floats:
    """One layer of all micro-batches, [S]."""
    if len(phases) == 1:
        before, after, _, _ = phases[0]
        alone: Floats = before + after
        return alone
    (first, _, first_moe_s, first_expert_s), (second, _, second_moe_s, second_expert_s) = phases
    one, other = np.maximum(first, second_moe_s) + first_expert_s, np.maximum(second, first_moe_s) + second_expert_s
    overlapped: Floats = one + other
    return overlapped


def load_of(nodes: Ints, moe: Ints, rows: Ints, members: Ints, shards: Ints) -> StepLoad:
    """What each of W instances has to do for R requests: bindings as in sched.group.Bindings, `rows` the request of
    each member, `shards` with this step's token."""
    width = len(nodes)
    own = moe[rows]
    away = members != own
    across = away & (nodes[members] != nodes[own])
    inside = away & ~across

    def count(which: Ints) -> Ints:
        return np.bincount(which, minlength=width)

    return StepLoad(
        moe_batch=count(moe),
        attention_batch=count(members),
        kv_tokens=np.bincount(members, shards, width).astype(np.int64),
        sent=count(own[inside]),
        received=count(members[inside]),
        sent_across=count(own[across]) if across.any() else None,
        received_across=count(members[across]) if across.any() else None,
    )
