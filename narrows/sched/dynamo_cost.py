"""DynamoCost: the cost by which NVIDIA Dynamo's KV router chooses a worker.

    cost = weight x (tokens to prefill / block size) + active blocks        (in blocks; the smallest is chosen)

Tokens to prefill are the prompt less what the worker has cached of it; active blocks are those that the worker's
requests hold, the new one's included. From "Routing Concepts" of Dynamo's documentation (1.2, 2026; the same formula
with `kv-overlap-score-weight` since 0.4, 2025), at its default temperature of 0. Departures: Dynamo gives no credit
when it routes to decode workers behind a separate prefill, here `Waiting.cached` says whether there is any; prefill
that a worker has still to do is none at a decode instance; ties go to the lowest instance. A cached prefix is a
credit only: pages are reserved for the whole request.
"""

import numpy as np

from narrows.kv.layout import pages_for
from narrows.sched.choosing import least
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState


class DynamoCost:
    """Smallest cost, then the lowest id. Degree 1 always."""

    rebalances = False

    def __init__(self, weight: float = 1.0) -> None:
        self.name = f"dynamo-cost:{weight:g}"
        self.weight = weight

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        cached = np.zeros(state.size, np.int64) if request.cached is None else np.array(request.cached)
        prefill = np.maximum(0, request.num_tokens - cached) / state.page_size
        active = state.num_pages - state.free_pages + pages_for(request.num_tokens, state.page_size)
        return least(state, request, self.weight * prefill + active)
