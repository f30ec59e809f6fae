"""ElasticCP: groups of instances whose CP degree grows with the load of the whole group.

After LoongServe (Wu et al., SOSP 2024, arXiv:2404.09526): elastic sequence parallelism adds instances to a group that
runs short of memory, without moving the KV it has, and in multi-master decoding any of its instances may run the
layers of a request. The degree is the group's, not the request's (NanoCP, section 1). Departures: groups are aligned
runs of 1, 2, 4, ... instances of a node, and which one takes a request follows from the loads alone: the smallest size
at which some group stays below `mark` of its pages with it. LoongServe also scales by predicted iteration times and
moves KV to shrink groups; here they shrink as requests end. Tokens are shared out by WaterFill.
"""

import numpy as np

from narrows.kv.layout import pages_for
from narrows.sched.choosing import cp_groups, placed, smallest
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState
from narrows.sched.waterfill import waterfill


class ElasticCP:
    """Of the groups of one size the one with the smallest part of its pages in use, then the lowest; there the
    smallest batch. A whole node may be filled beyond the mark."""

    rebalances = True

    def __init__(self, mark: float = 0.75) -> None:
        self.name = f"elastic-cp:{mark:g}"
        self.mark = mark

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        largest = int(np.bincount(state.nodes).max())
        degree, limit = 1, self.mark
        while True:
            if degree >= largest:
                limit = 1.0
            placement = self._place(state, request, degree, limit)
            if placement is not None or degree >= largest:
                return placement
            degree *= 2

    def _place(self, state: GroupState, request: Waiting, degree: int, limit: float) -> Placement | None:
        bounds = cp_groups(state.nodes, degree)
        there = np.add.reduceat(state.num_pages, bounds[:-1])
        free = np.add.reduceat(state.free_pages, bounds[:-1]) - pages_for(request.num_tokens, state.page_size)
        used = (there - free) / np.maximum(1, there)
        able = state.able
        for group in np.argsort(used, kind="stable"):
            if used[group] > limit:
                return None
            members = np.arange(bounds[group], bounds[group + 1])
            bindings = members[able[members]]
            if not len(bindings):
                continue
            moe = smallest(state, bindings)
            loads, capacities = state.kv_tokens[members].tolist(), state.capacities[members].tolist()
            split = waterfill(loads, capacities, request.num_tokens, binding=members.tolist().index(moe))
            if split is not None:
                return placed(moe, list(zip(members.tolist(), split, strict=True)))
        return None
