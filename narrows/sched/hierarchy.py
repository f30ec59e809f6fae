"""Deciding in two layers: a light router over groups of nodes, and in each group a scheduler of its own.

NanoCP, section 7, proposes it for large deployments: the router assigns requests by aggregate load summaries, each
group places them by the policy. What one scheduler looks at no longer grows with the deployment.

    GroupView ──▶ split ──▶ route by summaries ──▶ each group: rebalance, admit ──▶ merge ──▶ Decision
                                   ▲                             │
                                   └── whom a group had no room for, to those it has not tried

The paper leaves the rule of the router open. Ours keeps requests and KV even at once: a request goes where it adds
least to the sum of squares of both loads, each in units of its mean. A short one so goes by requests, a long one by KV.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from narrows.sched.base import AdmitsMany, GroupPolicy
from narrows.sched.decide import AGING_S, COMPILED_FROM, admit, decide, fits_when_empty, rebalance
from narrows.sched.group import Bindings, Decision, GroupView, Ints, Placement, Waiting
from narrows.sched.state import GroupState

Flags = npt.NDArray[np.bool_]
Rebalanced = tuple[Ints, tuple[tuple[int, int], ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """`above` this many instances a decision is made in groups of `nodes_per_group` nodes, else at once."""

    above: int = 256
    nodes_per_group: int = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """A group: instances first to last (not included) of the whole, and the rows of its active requests."""

    first: int
    last: int
    rows: Ints
    view: GroupView
    state: GroupState

    @property
    def summary(self) -> tuple[int, int, int, int, int]:
        """All that the router knows: instances, requests, KV tokens, free pages, free places in batches."""
        state = self.state
        batch, free = int(state.batches.sum()), int(state.free_pages.sum())
        return state.size, batch, int(state.kv_tokens.sum()), free, state.size * state.max_num_seqs - batch

    def local(self, request: Waiting) -> Waiting:
        return request if request.cached is None else replace(request, cached=request.cached[self.first : self.last])

    def outside(self, placement: Placement) -> Placement:
        """A placement here, by the numbers of the whole."""
        members = tuple(member + self.first for member in placement.members)
        return Placement(placement.moe + self.first, members, placement.split)


def decide_by_groups(
    view: GroupView,
    policy: GroupPolicy,
    now_s: float,
    *,
    aging_s: float = AGING_S,
    hierarchy: Hierarchy | None = None,
) -> Decision:
    """As `decide`, which it calls unless there are more than `hierarchy.above` instances in several groups; also where
    an active request's KV binding crosses groups.

    Rebalancing, growth and placing stay inside a group. A request that its group has no room for is tried by the other
    ones, so it waits only if all with pages for it have refused it. A group that refuses one that has waited `aging_s`
    admits nobody who is behind it in this step. The head of the line, when it has, is sent first to the group with the
    most free pages of those that could ever hold it, whether it fits or not, so that room is kept for it somewhere.
    """
    group_of = _groups(view, hierarchy or Hierarchy())
    if group_of is None:
        return decide(view, policy, now_s, aging_s=aging_s)
    parts = list(_split(view, group_of))
    large = view.active.num_requests + len(view.waiting) >= COMPILED_FROM
    moe = view.active.moe.copy()
    grown: list[tuple[int, int]] = []
    stuck: list[int] = []
    closed = np.full(len(parts), len(view.waiting))  # [G] the place in the line behind which a group admits nobody
    for i, part in enumerate(parts):
        bindings, more, none = _rebalance(part, policy.rebalances, large)
        moe[part.rows] = bindings + part.first
        grown += [(int(part.rows[row]), instance + part.first) for row, instance in more]
        stuck += part.rows[list(none)].tolist()
        if none:
            closed[i] = -1
    admitted = _admit(view.waiting, parts, policy, now_s, aging_s, closed, large)
    return Decision(moe, tuple(sorted(admitted.items())), tuple(sorted(grown)), tuple(sorted(stuck)))


def fits_when_empty_by_groups(
    view: GroupView, policy: GroupPolicy, request: Waiting, hierarchy: Hierarchy | None = None
) -> bool:
    """As `fits_when_empty`, of the groups that `decide_by_groups` decides in: whether one of them could hold it."""
    group_of = _groups(view, hierarchy or Hierarchy())
    if group_of is None:
        return fits_when_empty(view, policy, request)
    return any(fits_when_empty(part.view, policy, part.local(request)) for part in _split(view, group_of))


def _groups(view: GroupView, hierarchy: Hierarchy) -> Ints | None:
    """The group of each instance [W], ascending. None: the view is decided at once."""
    if len(view.nodes) <= hierarchy.above:
        return None
    group_of = view.nodes // hierarchy.nodes_per_group
    crosses = group_of[view.active.members] != group_of[view.active.moe[view.active.rows]]
    return None if group_of[0] == group_of[-1] or crosses.any() else group_of


def _split(view: GroupView, group_of: Ints) -> Iterator[_Part]:
    active, (groups, starts) = view.active, np.unique(group_of, return_index=True)
    owner, sizes = group_of[active.moe], active.degrees
    order, placed = np.argsort(owner, kind="stable"), np.argsort(np.repeat(owner, sizes), kind="stable")
    ends = np.searchsorted(owner[order], groups, side="right")
    for rows, first, last in zip(np.split(order, ends[:-1]), starts, [*starts[1:], len(group_of)], strict=True):
        degrees = sizes[rows]
        count = int(degrees.sum())
        members, placed = placed[:count], placed[count:]
        bindings = Bindings(
            moe=active.moe[rows] - first,
            starts=np.concatenate([[0], np.cumsum(degrees)]),
            members=active.members[members] - first,
            shards=active.shards[members],
        )
        inside = slice(int(first), int(last))
        part = replace(
            view,
            nodes=view.nodes[inside] - view.nodes[first],
            num_pages=view.num_pages[inside],
            used_pages=view.used_pages[inside],
            kv_tokens=view.kv_tokens[inside],
            arriving=None if view.arriving is None else view.arriving[inside],
            active=bindings,
            waiting=(),
            num_placed=view.num_placed // len(groups),  # its share, so that turns go round inside it too
        )
        yield _Part(int(first), int(last), rows, part, GroupState(part))


def _rebalance(part: _Part, moves: bool, large: bool) -> Rebalanced:
    if not large:
        return rebalance(part.view, part.state, moves)
    from narrows.sched import compiled  # numba is slow to import

    return compiled.rebalance(part.view, part.state, moves)


def _admit(
    waiting: Sequence[Waiting],
    parts: list[_Part],
    policy: GroupPolicy,
    now_s: float,
    aging_s: float,
    closed: Ints,
    large: bool,
) -> dict[int, Placement]:
    """Placements of those that are admitted, by index in `waiting`. Each round asks at least one group more for whoever
    is left, so there are at most as many as groups."""
    admitted: dict[int, Placement] = {}
    tokens = np.array([request.num_tokens for request in waiting], np.int64)
    aged = np.array([now_s - request.since_s >= aging_s for request in waiting], np.bool_)
    tried = np.zeros((len(waiting), len(parts)), np.bool_)
    left = np.arange(len(waiting))
    home = _home(waiting[0], parts, policy, closed) if aged[:1].any() else -1
    while True:
        loads = np.array([part.summary for part in parts])
        chosen = _router(large)(left, tokens, tried, closed, loads, parts[0].view.page_size, home)
        home = -1
        if (chosen < 0).all():
            return admitted
        tried[left[chosen >= 0], chosen[chosen >= 0]] = True
        for i, part in enumerate(parts):
            line = left[chosen == i].tolist()
            requests = [part.local(waiting[index]) for index in line]
            if large and isinstance(policy, AdmitsMany):
                placements = policy.admit(part.state, requests, now_s, aging_s)
            else:
                placements = admit(part.state, requests, policy, now_s, aging_s)
            taken = {line[at]: part.outside(placement) for at, placement in placements}
            admitted |= taken
            refused = next((index for index in line if aged[index] and index not in taken), closed[i])
            closed[i] = min(closed[i], refused)
        left = np.array([index for index in left.tolist() if index not in admitted], np.int64)


def _home(request: Waiting, parts: list[_Part], policy: GroupPolicy, closed: Ints) -> int:
    """The open group with the most free pages among those that could hold the request when empty; -1: none."""
    able = [i for i, part in enumerate(parts) if fits_when_empty(part.view, policy, part.local(request))]
    free = {i: int(parts[i].state.free_pages.sum()) for i in able if closed[i] >= 0}
    return max(free, key=lambda i: (free[i], -i), default=-1)


def _route(
    left: Ints,  # [L] indices in the line
    tokens: Ints,  # [Q]
    tried: Flags,  # [Q, G]
    closed: Ints,  # [G]
    loads: Ints,  # [G, 5] as _Part.summary
    page_size: int,
    home: int,  # of the head of the line; -1: it goes like the others
) -> Ints:
    """The group that each of those left is to try next, -1: none, [L]. Loads count whom it has assigned at once."""
    chosen = np.full(len(left), -1)
    sizes, requests, kv_tokens, pages, seqs = loads.T.copy()
    mean_requests = (requests.sum() + len(left)) / sizes.sum()  # of an instance when all are placed
    mean_tokens = (kv_tokens.sum() + tokens[left].sum()) / sizes.sum()
    for at, index in enumerate(left):
        num_pages = -(-tokens[index] // page_size)
        best, least = -1, np.inf
        for i in range(len(sizes)):
            if tried[index, i] or index > closed[i] or pages[i] < num_pages or seqs[i] < 1:
                continue
            by_requests, by_tokens = requests[i] / sizes[i], kv_tokens[i] / sizes[i]
            cost = by_requests / mean_requests**2 + tokens[index] * by_tokens / mean_tokens**2
            if cost < least:
                best, least = i, cost
        if index == 0 and home >= 0:
            best = home
        chosen[at] = best
        if best >= 0:
            requests[best] += 1
            kv_tokens[best] += tokens[index]
            pages[best] -= num_pages
            seqs[best] -= 1
    return chosen


@cache
def _router(large: bool) -> Callable[..., Ints]:
    """`_route`, compiled for long lines."""
    if not large:
        return _route
    from narrows.sched.compiled import compile_loop  # numba is slow to import

    return compile_loop(_route)
