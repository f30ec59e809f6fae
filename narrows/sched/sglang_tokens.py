"""SGLangTokens: SGLang's `--load-balance-method total_tokens`.

From `DPBudget.dispatch` (sglang, python/sglang/srt/managers/data_parallel_controller.py): the rank with the fewest
tokens, of equal ones that with the fewest requests; so since pull request 16258 of January 2026, counting a request's
tokens as soon as it is dispatched since 22614 of April 2026. There tokens include those of requests that wait at
their rank; here requests wait before all instances, so what is left of the difference to least-cache is the tie.
"""

from narrows.sched.choosing import least
from narrows.sched.group import Placement, Waiting
from narrows.sched.state import GroupState


class SGLangTokens:
    """Fewest tokens first, fewest requests next, then the lowest id. Degree 1 always."""

    name = "sglang-tokens"
    rebalances = False

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        return least(state, request, state.kv_tokens, state.batches)
