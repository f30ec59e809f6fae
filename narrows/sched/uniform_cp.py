"""UniformCP: the same CP degree for every request, in fixed groups of instances.

Helix parallelism (Bhatia et al., arXiv:2507.07120, 2025) shards every request's KV over one fixed group;
NanoCP compares with it as 16DP2CP, 8DP4CP and 4DP8CP (sections 2.3.2 and 6.1). The groups are runs of consecutive
instances of a node; a group is chosen like vLLM's default chooses an instance there, by its number of requests. Helix
binds a request's MoE to all of its group by tensor or expert parallelism; here, as in NanoCP's figure 7, to the member
with the smallest batch. Instances of a node beyond a multiple of the degree form a smaller group.
"""

import numpy as np

from narrows.sched.choosing import cp_groups, placed, smallest
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState


class UniformCP:
    """The group with the fewest requests for each of its instances, of equal ones the least KV, then the lowest; there
    the smallest batch (then the least KV), and the same number of tokens on each member. Where that leaves a rest, the
    MoE binding and the lowest others take one more; a request with fewer tokens than members has fewer of them."""

    rebalances = False

    def __init__(self, degree: int = 8) -> None:
        self.name = f"uniform-cp:{degree}"
        self.degree = degree

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        bounds = cp_groups(state.nodes, self.degree)
        sizes = np.diff(bounds)
        requests = np.add.reduceat(state.batches, bounds[:-1]) / sizes
        kv_tokens = np.add.reduceat(state.kv_tokens, bounds[:-1]) / sizes
        for group in np.lexsort([kv_tokens, requests]):
            members = np.arange(bounds[group], bounds[group + 1])
            moe = smallest(state, members)
            split = np.full(len(members), request.num_tokens // len(members))
            split[np.argsort(members != moe, kind="stable")[: request.num_tokens % len(members)]] += 1
            placement = placed(moe, list(zip(members.tolist(), split.tolist(), strict=True)))
            if state.can_allocate(placement):
                return placement
        return None
