"""LeastCache: the instance that holds the least KV (the least-cache baseline of NanoCP sections 2.3.1 and 6.1)."""

from narrows.sched.choosing import least
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState


class LeastCache:
    """Fewest tokens of KV, then the lowest id. Blind to batches. Degree 1 always."""

    name = "least-cache"
    rebalances = False

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        return least(state, request, state.kv_tokens)
