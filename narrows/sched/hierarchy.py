"""Deciding in two layers: a light router over groups of nodes, and in each group a scheduler of its own.

NanoCP, section 7, proposes it for large deployments: the router assigns requests by aggregate load summaries, each
group places them by the policy. What one scheduler looks at no longer grows with the deployment.

    GroupView ──▶ split ──▶ route by summaries ──▶ each group: rebalance, admit ──▶ merge ──▶ Decision
                                   ▲                             │
                                   └── whom a group had no room for, to those it has not tried

The paper leaves the rule of the router open. Ours keeps requests and KV even at once: a request goes where it adds
least to the sum of squares of both loads, each in units of its mean. A short one so goes by requests, a long one by KV.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from narrows.kv.layout import pages_for
from narrows.sched.base import GroupPolicy
from narrows.sched.decide import AGING_S, admit, decide, fits_when_empty, rebalance
from narrows.sched.group import Bindings, Decision, GroupView, Ints, Placement, Waiting
from narrows.sched.state import GroupState


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """`above` this many instances a decision is made in groups of `nodes_per_group` nodes, else at once."""

    above: int = 64
    nodes_per_group: int = 4


@dataclass(slots=True)
class Summary:
    """All that the router knows of a group. Its own assignments are counted at once."""

    size: int  # instances
    requests: int
    kv_tokens: int
    free_pages: int
    free_seqs: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A group: instances first to last (not included) of the whole, and the rows of its active requests."""

    first: int
    last: int
    rows: Ints
    view: GroupView
    state: GroupState

    def summary(self) -> Summary:
        state = self.state
        batch, free = int(state.batches.sum()), int(state.free_pages.sum())
        return Summary(state.size, batch, int(state.kv_tokens.sum()), free, state.size * state.max_num_seqs - batch)

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
    ones, so it waits only if all that could hold it have refused it. One that has waited `aging_s` is sent to the group
    with the most free pages first, and a group that refuses it admits nobody who is behind it in this step.
    """
    group_of = _groups(view, hierarchy or Hierarchy())
    if group_of is None:
        return decide(view, policy, now_s, aging_s=aging_s)
    parts = list(_split(view, group_of))
    moe = view.active.moe.copy()
    grown: list[tuple[int, int]] = []
    stuck: list[int] = []
    closed: dict[int, int] = {}  # groups that admit nobody behind this place in the line
    for i, part in enumerate(parts):
        bindings, more, none = rebalance(part.view, part.state, policy.rebalances)
        moe[part.rows] = bindings + part.first
        grown += [(int(part.rows[row]), instance + part.first) for row, instance in more]
        stuck += part.rows[list(none)].tolist()
        if none:
            closed[i] = -1
    admitted = _admit(view.waiting, parts, policy, now_s, aging_s, closed)
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
    groups, starts = np.unique(group_of, return_index=True)
    owner = group_of[view.active.moe]
    degrees = view.active.degrees
    for group, first, last in zip(groups, starts, [*starts[1:], len(group_of)], strict=True):
        rows = np.flatnonzero(owner == group)
        members = np.repeat(owner == group, degrees)
        bindings = Bindings(
            moe=view.active.moe[rows] - first,
            starts=np.concatenate([[0], np.cumsum(degrees[rows])]),
            members=view.active.members[members] - first,
            shards=view.active.shards[members],
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


def _admit(
    waiting: Sequence[Waiting],
    parts: list[_Part],
    policy: GroupPolicy,
    now_s: float,
    aging_s: float,
    closed: dict[int, int],
) -> dict[int, Placement]:
    """Placements of those that are admitted, by index in `waiting`. Each round asks at least one group more for whoever
    is left, so there are at most as many as groups."""
    admitted: dict[int, Placement] = {}
    tried: dict[int, set[int]] = {index: set() for index in range(len(waiting))}
    while True:
        lines = _route(waiting, parts, now_s - aging_s, tried, closed)
        if not any(lines):
            return admitted
        for i, (part, line) in enumerate(zip(parts, lines, strict=True)):
            if not line:
                continue
            local = replace(part.view, waiting=tuple(part.local(waiting[index]) for index in line))
            taken = {line[at]: placement for at, placement in admit(local, part.state, policy, now_s, aging_s)}
            for index in line:
                tried[index].add(i)
                if index in taken:
                    admitted[index] = part.outside(taken[index])
                    del tried[index]
                elif waiting[index].since_s <= now_s - aging_s:
                    closed[i] = min(index, closed.get(i, index))


def _route(
    waiting: Sequence[Waiting],
    parts: list[_Part],
    aged_s: float,
    tried: dict[int, set[int]],
    closed: dict[int, int],
) -> list[list[int]]:
    """For each group the indices of those that it is to try next, in their order."""
    groups = [part.summary() for part in parts]
    size = sum(group.size for group in groups)
    requests = (sum(group.requests for group in groups) + len(tried)) / size  # means of an instance, all placed
    tokens = (sum(group.kv_tokens for group in groups) + sum(waiting[index].num_tokens for index in tried)) / size
    lines: list[list[int]] = [[] for _ in groups]
    for index in sorted(tried):
        request = waiting[index]
        num_pages = pages_for(request.num_tokens, parts[0].view.page_size)
        per_request, per_token = 1 / requests**2, request.num_tokens / tokens**2
        best, least = None, math.inf
        for i, group in enumerate(groups):
            if i in tried[index] or index > closed.get(i, index):
                continue
            if group.free_pages < num_pages or group.free_seqs < 1:
                continue
            if request.since_s <= aged_s:
                cost = -float(group.free_pages)
            else:
                cost = (group.requests * per_request + group.kv_tokens * per_token) / group.size
            if cost < least:
                best, least = i, cost
        if best is not None:
            lines[best].append(index)
            groups[best].requests += 1
            groups[best].kv_tokens += request.num_tokens
            groups[best].free_pages -= num_pages
            groups[best].free_seqs -= 1
    return lines
