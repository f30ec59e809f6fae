"""LeastBatch: the instance with the fewest requests (the least-batch baseline of NanoCP section 6.1)."""

from narrows.core.ids import InstanceId, Role
from narrows.sched.view import ClusterView, Demand, InstanceView


class LeastBatch:
    """Fewest bound requests first, most free pages next, then the lowest id. Degree 1 always."""

    name = "least-batch"

    def choose_prefill(self, view: ClusterView, demand: Demand, now_s: float) -> InstanceId | None:
        return _fewest(view.of(Role.PREFILL), demand.num_tokens)

    def choose_decode(self, view: ClusterView, demand: Demand, now_s: float) -> InstanceId | None:
        return _fewest(view.of(Role.DECODE), demand.num_tokens)


def _fewest(instances: tuple[InstanceView, ...], num_tokens: int) -> InstanceId | None:
    able = [i for i in instances if i.free_seqs > 0 and i.free_pages * i.page_size >= num_tokens]
    return min(able, key=lambda i: (i.running, -i.free_pages, i.id)).id if able else None
