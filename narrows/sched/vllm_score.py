"""VllmScore: how vLLM's internal load balancer chooses a data-parallel engine.

From `DPLBAsyncMPClient.get_core_engine_for_request` (vllm/v1/engine/core_client.py): the score since pull request
49204 of July 2026, the rotation of ties since 47420 of the same month. Departures:

- vLLM routes at arrival and requests wait at their engine. Here they wait before all instances, and only one with room
  is chosen; waiting at an instance are those that are placed there and in no step yet.
- vLLM reads counts and KV usage from snapshots of some 100 ms, its own in-flight count scaled by the number of its
  front ends standing in for what they miss. Here there is one front end and nothing is late, so the in-flight share
  is the batch, and usage counts what was just placed.
"""

import numpy as np
import numpy.typing as npt

from narrows.sched.choosing import whole, with_room
from narrows.sched.group import Ints, Placement, Waiting
from narrows.sched.state import GroupState

Numbers = npt.NDArray[np.float64]


def scores(
    in_flight: Ints,  # [W] this front end's unfinished requests, times the number of front ends
    waiting: Ints,  # [W]
    running: Ints,  # [W]
    kv_usage: Numbers,  # [W] from 0 to 1
) -> Numbers:
    """max(in_flight, waiting + running) + 6 x waiting x max(0, kv_usage - 0.5), [W]."""
    score: Numbers = np.maximum(in_flight, waiting + running) + 6.0 * waiting * np.maximum(0.0, kv_usage - 0.5)
    return score


class VllmScore:
    """Smallest score; of equal ones the first at or after the turn, which advances with every request placed. Degree 1
    always."""

    name = "vllm"
    rebalances = False

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        able = with_room(state, request)
        if not len(able):
            return None
        usage = (state.num_pages - state.free_pages) / np.maximum(1, state.num_pages)
        score = scores(state.batches, state.arriving, state.batches - state.arriving, usage)[able]
        turn = (able - state.num_placed) % state.size
        return whole(int(able[np.lexsort([turn, score])[0]]), request)
