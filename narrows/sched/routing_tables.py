"""A decision lowered into what instances execute: who sends which query where, and which result back (NanoCP, 5.1).

Legend: W_cp instances of a routing domain (a node's; the whole group's where bindings may cross nodes), M requests
whose MoE binding an instance is, N requests for which it attends.

    Q-Route [W_cp, M]    the query of local request m goes to instance d of the domain: d is in its KV binding
    Res-Route [W_cp, N]  the partial result of attended request n goes to instance d: d is its MoE binding

Requests are numbered by their row in the view's `active`; the j-th admitted one is R + j. Columns ascend by number. Who
is stuck is in no table.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.sched.decide import COMPILED_FROM
from narrows.sched.group import Decision, GroupView, Ints

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class InstanceTables:
    """What one instance executes in a step."""

    first: int  # the domain's first instance
    local: Ints  # [M] requests
    attended: Ints  # [N] requests
    q_route: Flags  # [W_cp, M]
    res_route: Flags  # [W_cp, N]

    @property
    def domain(self) -> Ints:
        """The instances that the rows of both tables stand for, [W_cp]."""
        return np.arange(self.first, self.first + len(self.q_route))


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTables:
    """Those of all instances, one behind the other in flat arrays; `of` gives one instance's as views of them."""

    first: Ints  # [W] the first instance of each instance's routing domain
    sizes: Ints  # [W] W_cp
    local_starts: Ints  # [W + 1]
    local: Ints  # [sum of M]
    attended_starts: Ints  # [W + 1]
    attended: Ints  # [sum of N]
    q_starts: Ints  # [W + 1]
    q_route: Flags  # [sum of W_cp * M]
    res_starts: Ints  # [W + 1]
    res_route: Flags  # [sum of W_cp * N]

    def of(self, instance: int) -> InstanceTables:
        size, after = int(self.sizes[instance]), instance + 1
        return InstanceTables(
            int(self.first[instance]),
            self.local[self.local_starts[instance] : self.local_starts[after]],
            self.attended[self.attended_starts[instance] : self.attended_starts[after]],
            self.q_route[self.q_starts[instance] : self.q_starts[after]].reshape(size, -1),
            self.res_route[self.res_starts[instance] : self.res_starts[after]].reshape(size, -1),
        )


def lower(view: GroupView, decision: Decision) -> RoutingTables:
    """The tables of the step that `decision` is about. Compiled where there are many requests."""
    if view.active.num_requests + len(decision.admitted) < COMPILED_FROM:
        return lower_plainly(view, decision)
    from narrows.sched import compiled  # numba is slow to import

    return compiled.lower(view, decision)


def lower_plainly(view: GroupView, decision: Decision) -> RoutingTables:
    """`lower` in plain Python: the reference for the compiled one."""
    moe, members = bindings(view, decision)
    size = len(view.nodes)
    first, sizes = domains(view)
    local: list[list[int]] = [[] for _ in range(size)]
    attended: list[list[int]] = [[] for _ in range(size)]
    for request, instance in enumerate(moe):
        for member in members[request]:
            attended[member].append(request)
        if members[request]:
            local[instance].append(request)
    q_tables, res_tables = [], []
    for instance in range(size):
        q_route = np.zeros((sizes[instance], len(local[instance])), np.bool_)
        for column, request in enumerate(local[instance]):
            q_route[np.array(members[request]) - first[instance], column] = True
        res_route = np.zeros((sizes[instance], len(attended[instance])), np.bool_)
        for column, request in enumerate(attended[instance]):
            res_route[moe[request] - first[instance], column] = True
        q_tables.append(q_route.ravel())
        res_tables.append(res_route.ravel())
    return RoutingTables(
        first,
        sizes,
        _starts([len(requests) for requests in local]),
        np.array([request for requests in local for request in requests], np.int64),
        _starts([len(requests) for requests in attended]),
        np.array([request for requests in attended for request in requests], np.int64),
        _starts([table.size for table in q_tables]),
        np.concatenate(q_tables),
        _starts([table.size for table in res_tables]),
        np.concatenate(res_tables),
    )


def bindings(view: GroupView, decision: Decision) -> tuple[list[int], list[list[int]]]:
    """MoE and KV binding of each request in the step, in the order of their numbers. Who is stuck has no members."""
    active = view.active
    moe = decision.moe.tolist() + [placement.moe for _, placement in decision.admitted]
    members = [active.members[begin:end].tolist() for begin, end in zip(active.starts, active.starts[1:], strict=False)]
    for row, instance in decision.grown:
        members[row] = sorted([*members[row], instance])
    for row in decision.stuck:
        members[row] = []
    return moe, members + [list(placement.members) for _, placement in decision.admitted]


def domains(view: GroupView) -> tuple[Ints, Ints]:
    """The first instance and the size of each instance's routing domain, [W] both."""
    size = len(view.nodes)
    if view.cross_nodes:
        return np.zeros(size, np.int64), np.full(size, size, np.int64)
    _, first, counts = np.unique(view.nodes, return_index=True, return_counts=True)
    return np.repeat(first, counts).astype(np.int64), np.repeat(counts, counts).astype(np.int64)


def _starts(sizes: list[int]) -> Ints:
    return np.cumsum([0, *sizes], dtype=np.int64)


def steps_valid(view: GroupView, decision: Decision, limit: int) -> int:
    """How many steps in a row the decision can be executed, at most `limit`: as long as every MoE binding has slots for
    its requests' new tokens, those of its free pages included (multi-step execution: NanoCP, section 6.1). Requests
    that end meanwhile only make room. At least 1; who is stuck does not count."""
    active = view.active
    held = np.zeros(active.num_requests, np.int64)
    rows = active.rows
    there = active.members == decision.moe[rows]
    held[rows[there]] = active.shards[there]
    taking = np.ones(active.num_requests, np.bool_)
    taking[list(decision.stuck)] = False
    placements = [placement for _, placement in decision.admitted]
    shares = [placement.split[placement.members.index(placement.moe)] for placement in placements]
    # The slot of an admitted request's first token is part of its share.
    held = np.concatenate([held[taking], np.array(shares, np.int64) - 1])
    moe = np.concatenate([decision.moe[taking], np.array([placement.moe for placement in placements], np.int64)])
    pages = np.concatenate(
        [-(-held[: taking.sum()] // view.page_size), -(-np.array(shares, np.int64) // view.page_size)]
    )
    free = view.num_pages - view.used_pages
    for placement in placements:
        for member, share in zip(placement.members, placement.split, strict=True):
            free[member] -= -(-share // view.page_size)

    def fit(steps: int) -> bool:
        more = -(-(held + steps) // view.page_size) - pages
        return bool((np.bincount(moe, weights=more, minlength=len(free)) <= free).all())

    low, high = 1, max(1, limit)  # low fits: that is what deciding is for
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fit(middle) else (low, middle - 1)
    return low
