"""LeastBatch: the instance with the fewest requests (the least-batch baseline of NanoCP sections 2.3.1 and 6.1).

The paper calls it vLLM's default policy; what vLLM does since July 2026 is in vllm_score.py. Equally many requests:
the one with the most free pages, which the paper leaves open.
"""

from narrows.core.ids import InstanceId, Role
from narrows.sched.choosing import least
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState
from narrows.sched.view import ClusterView, Demand, InstanceView


class LeastBatch:
    """Fewest bound requests first, most free pages next, then the lowest id. Degree 1 always."""

    name = "least-batch"
    rebalances = False

    def choose_prefill(self, view: ClusterView, demand: Demand, now_s: float) -> InstanceId | None:
        able = [i for i in view.of(Role.PREFILL) if _has_room(i, demand)]
        return min(able, key=lambda i: (i.running, -i.free_pages, i.id)).id if able else None

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        return least(state, request, state.batches, -state.free_pages)


def _has_room(instance: InstanceView, demand: Demand) -> bool:
    return instance.free_seqs > 0 and instance.free_pages * instance.page_size >= demand.num_tokens
