"""Dual-balanced placement: Algorithm 1 of NanoCP, lines 7 to 14 (section 4.2)."""

from collections.abc import Iterator, Sequence

import numpy as np

from narrows.sched.degrees import MLA_BUCKET, Bucket
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState
from narrows.sched.waterfill import waterfill


class DualBalanced:
    """The node that owns the fewest requests; there, the instance with the smallest batch as MoE binding (then by KV
    load, then the lowest), further members by smallest KV load up to the degree of `bucket`, tokens by WaterFill.

    Where the paper lets a request wait we go on: the degree grows until the members hold the request, at most to the
    node's size; then the next node is tried, in the same order; and where bindings may cross nodes, members of other
    nodes come last. A member that WaterFill gives nothing is left out, for it would attend to nothing.
    """

    name = "dual-balanced"
    rebalances = True

    def __init__(self, bucket: Bucket = MLA_BUCKET) -> None:
        self.bucket = bucket

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        """In an empty group it finds a place for whatever fits a node (or the group, where bindings cross nodes)."""
        degree = self.bucket(request.num_tokens)
        for members in _member_orders(state):
            placement = _place_among(state, members, degree, request.num_tokens)
            if placement is not None:
                return placement
        return None

    def admit(
        self, state: GroupState, waiting: Sequence[Waiting], now_s: float, aging_s: float
    ) -> tuple[tuple[int, Placement], ...]:
        """decide.admit, compiled."""
        from narrows.sched import compiled  # numba is slow to import

        return compiled.admit_dual_balanced(state, waiting, self.bucket, now_s, aging_s)


def _member_orders(state: GroupState) -> Iterator[list[int]]:
    """Candidates for members in the order they are taken, the MoE binding first: one list for each node that can have
    it, the node with the fewest requests first; where bindings cross nodes, the first with all others appended."""
    able = state.able
    owned = np.bincount(state.nodes, weights=state.batches).astype(np.int64)
    lists: list[list[int]] = []
    for node in sorted(range(len(owned)), key=lambda node: (owned[node], node)):
        inside = state.members_of(node).tolist()
        if bindings := [i for i in inside if able[i]]:
            binding = min(bindings, key=lambda i: (state.batches[i], state.kv_tokens[i], i))
            lists.append([binding, *_by_load(state, [i for i in inside if i != binding])])
            yield lists[-1]
    if state.cross_nodes and lists:
        own = set(state.members_of(int(state.nodes[lists[0][0]])).tolist())
        yield lists[0] + _by_load(state, [i for i in range(state.size) if i not in own])


def _by_load(state: GroupState, instances: Sequence[int]) -> list[int]:
    return sorted(instances, key=lambda i: (state.kv_tokens[i], i))


def _place_among(state: GroupState, order: list[int], degree: int, tokens: int) -> Placement | None:
    """The first `degree` of the order, or as many more as it takes to hold the tokens."""
    capacities = state.capacities
    held = np.cumsum(capacities[order])
    if held[-1] < tokens:
        return None
    count = max(min(degree, len(order)), 1 + int(np.searchsorted(held, tokens)))
    members = sorted(order[:count])
    split = waterfill(
        state.kv_tokens[members].tolist(), capacities[members].tolist(), tokens, binding=members.index(order[0])
    )
    assert split is not None, "they fit"
    shares = [(member, share) for member, share in zip(members, split, strict=True) if share]
    return Placement(order[0], tuple(member for member, _ in shares), tuple(share for _, share in shares))
