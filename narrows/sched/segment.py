"""Segment: an instance holds at most one segment of a request, so the degree is ceil(tokens / segment).

Medha's KV-cache parallelism (Agrawal et al., arXiv:2409.17264, 2024) gives a request another worker whenever those it
has are full to a set number of tokens (`max_num_tokens_per_kvp_group` in Vajra, its open engine). Departures: a
request comes with all its tokens, so all its members are chosen at once, as NanoCP does (section 4.2.3: the node with
the fewest requests, there the smallest batch and the least KV), and instead of filling one after the other the whole
blocks of KV, here pages, are shared out by WaterFill over the pages in use. Where that many members can not hold the
request it takes more of the node, else it tries the next one.
"""

import numpy as np

from narrows.kv.layout import pages_for
from narrows.sched.choosing import node_orders, placed
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState
from narrows.sched.waterfill import waterfill


class Segment:
    """Degree by length alone, shards of whole pages; what the last page lacks, it lacks at the MoE binding."""

    rebalances = True

    def __init__(self, segment: int = 65_536) -> None:
        self.name = f"segment:{segment}"
        self.segment = segment

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        num_pages = pages_for(request.num_tokens, state.page_size)
        degree = pages_for(request.num_tokens, self.segment)
        for order in node_orders(state):
            held = np.cumsum(state.free_pages[order])
            if held[-1] < num_pages:
                continue
            count = max(min(degree, len(order)), 1 + int(np.searchsorted(held, num_pages)))
            members = sorted(order[:count])
            used, free = (state.num_pages - state.free_pages)[members], state.free_pages[members]
            pages = waterfill(used.tolist(), free.tolist(), num_pages, binding=members.index(order[0]))
            assert pages is not None, "they fit"
            lacking = num_pages * state.page_size - request.num_tokens
            return placed(
                order[0],
                [(i, n * state.page_size - lacking * (i == order[0])) for i, n in zip(members, pages, strict=True)],
            )
        return None
