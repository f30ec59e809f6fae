"""One step's decision: MoE bindings of active requests, room for their next tokens, admission (NanoCP, Algorithm 1).

    view ──▶ rebalance ──▶ grow ──▶ admit ──▶ Decision          all on one GroupState, in this order

A request's next token is stored at its MoE binding. A member *can store* it when the last page of its shard has room
(its tokens are no multiple of the page size) or the pool has a free page that nobody else takes in this step.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from narrows.sched.base import GroupPolicy
from narrows.sched.group import Bindings, Decision, GroupView, Ints, Placement, Waiting
from narrows.sched.state import GroupState

AGING_S = 5.0  # how long a request that does not fit may be overtaken
COMPILED_FROM = 256  # requests, active and waiting; below, plain Python is fast enough and compiles nothing


def decide(view: GroupView, policy: GroupPolicy, now_s: float, *, aging_s: float = AGING_S) -> Decision:
    """What happens in the step that begins now.

    Waiting requests are tried in their order. A younger one may overtake one that does not fit until that has waited
    `aging_s`; from then on nobody behind it is admitted before it, so whatever fits the empty group is admitted at the
    latest when the active ones have ended. While a request is stuck nobody is admitted: the room is for those inside.

    Large groups are decided about by compiled loops, to the same result; compiled.prepare() makes them beforehand.
    """
    if view.active.num_requests + len(view.waiting) < COMPILED_FROM:
        return decide_plainly(view, policy, now_s, aging_s=aging_s)
    from narrows.sched import compiled  # numba is slow to import

    return compiled.decide(view, policy, now_s, aging_s=aging_s)


def decide_plainly(view: GroupView, policy: GroupPolicy, now_s: float, *, aging_s: float = AGING_S) -> Decision:
    """`decide` in plain Python: the reference for the compiled one."""
    state = GroupState(view)
    moe, grown, stuck = rebalance(view, state, policy.rebalances)
    admitted = () if stuck else admit(state, view.waiting, policy, now_s, aging_s)
    return Decision(moe, admitted, grown, stuck)


def rebalance(
    view: GroupView, state: GroupState, moves: bool
) -> tuple[Ints, tuple[tuple[int, int], ...], tuple[int, ...]]:
    """MoE bindings of active requests [R], who has grown onto which instance, who is stuck. `state` has it counted.

    By ascending size of the KV binding, then age, each goes to the member with the fewest assigned that can store its
    next token (Algorithm 1, lines 2 and 3). Should that fill a batch beyond `max_num_seqs`, which a greedy order can,
    all keep their bindings but those whose next token has no room there; so it is throughout where nobody `moves`.
    """
    assigned = _assign(view, state, keep=False) if moves else None
    if assigned is None:
        assigned = _assign(view, state, keep=True)
        assert assigned is not None
    moe, batches, free, homeless = assigned
    grown: list[tuple[int, int]] = []
    stuck: list[int] = []
    for row in sorted(homeless):
        instance = _further_member(view, row, batches, free) if moves else None
        if instance is None:
            stuck.append(row)
        else:
            grown.append((row, instance))
            moe[row] = instance
            batches[instance] += 1
            free[instance] -= 1
    state.kv_tokens += batches if view.arriving is None else batches - view.arriving  # one new token each
    state.batches, state.free_pages = batches, free
    return moe, tuple(grown), tuple(stuck)


def _assign(view: GroupView, state: GroupState, keep: bool) -> tuple[Ints, Ints, Ints, list[int]] | None:
    """MoE bindings, batches, free pages and the rows that no member can take. None: a batch has become too large."""
    active, page_size = view.active, view.page_size
    moe, free = active.moe.copy(), state.free_pages.copy()
    if keep:
        batches = state.batches.copy()
    else:
        batches = np.zeros_like(state.batches) if view.arriving is None else view.arriving.copy()
    homeless: list[int] = []
    for row in np.argsort(active.degrees, kind="stable").tolist():
        places = range(int(active.starts[row]), int(active.starts[row + 1]))
        able = [i for i in places if active.shards[i] % page_size or free[active.members[i]] > 0]
        here = [i for i in able if active.members[i] == moe[row]]
        if keep and not here:
            batches[moe[row]] -= 1
        if not (keep and here):
            small = [i for i in able if batches[active.members[i]] < view.max_num_seqs]
            if able and not small and not keep:
                return None
            if not small:
                homeless.append(row)
                continue
            here = [min(small, key=lambda i: (batches[active.members[i]], i))]
            moe[row] = active.members[here[0]]
            batches[moe[row]] += 1
        free[moe[row]] -= active.shards[here[0]] % page_size == 0
    return moe, batches, free, homeless


def _further_member(view: GroupView, row: int, batches: Ints, free: Ints) -> int | None:
    """The instance with the least KV load that could join a request's KV binding and store its next token."""
    members = view.active.members[view.active.starts[row] : view.active.starts[row + 1]].tolist()
    node = view.nodes[members[0]]
    able = [
        i
        for i in range(len(view.nodes))
        if (view.cross_nodes or view.nodes[i] == node)
        and i not in members
        and free[i] > 0
        and batches[i] < view.max_num_seqs
    ]
    return min(able, key=lambda i: (view.kv_tokens[i], i), default=None)


def admit(
    state: GroupState, waiting: Sequence[Waiting], policy: GroupPolicy, now_s: float, aging_s: float
) -> tuple[tuple[int, Placement], ...]:
    """Who is admitted, by index in `waiting`, and where; `state` has them counted."""
    admitted: list[tuple[int, Placement]] = []
    for index, request in enumerate(waiting):
        if not state.able.any():
            break
        placement = policy.place(state, request, now_s)
        if placement is not None:
            state.commit(placement)
            admitted.append((index, placement))
        elif now_s - request.since_s >= aging_s:
            break
    return tuple(admitted)


def fits_when_empty(view: GroupView, policy: GroupPolicy, request: Waiting) -> bool:
    """Whether the request could be placed if nothing else were in the group. One that could not would wait for ever,
    and hold up all behind it: it must be refused."""
    nobody = np.zeros(0, np.int64)
    nothing = np.zeros_like(view.used_pages)
    bindings = Bindings(nobody, np.zeros(1, np.int64), nobody, nobody)
    empty = replace(view, used_pages=nothing, kv_tokens=nothing, active=bindings, waiting=(), arriving=None)
    return policy.place(GroupState(empty), request, request.since_s) is not None
