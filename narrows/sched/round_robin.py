"""RoundRobin: one instance after the other, whatever it holds.

The default of SGLang's data-parallel controller (`--load-balance-method round_robin`, data_parallel_controller.py,
2025) and of Dynamo's router (`--router-mode round-robin`, router guide, 2025). They keep a counter; here it is the
number of requests that the group ever took in, part of the view, so that the policy keeps nothing. An instance without
room is passed over, and the turn after it comes as if it had taken its own.
"""

import numpy as np

from narrows.sched.choosing import whole, with_room
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState


class RoundRobin:
    """The turn goes by the number of requests placed so far, modulo W. Degree 1 always."""

    name = "round-robin"
    rebalances = False

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        able = with_room(state, request)
        if not len(able):
            return None
        next_one = np.searchsorted(able, state.num_placed % state.size)  # the first at or after the turn
        return whole(int(able[next_one % len(able)]), request)
