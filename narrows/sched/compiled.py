"""The loops of deciding and lowering compiled by numba: the same results as their plain versions, for large groups.

The first use on a machine compiles, which takes some ten seconds; numba keeps the code beside the source (or in
NUMBA_CACHE_DIR) and later processes load it. `prepare` does that at a time of one's choosing.

Kernels know arrays and numbers only and are typed for int64; the functions above them take and give what the plain
versions do. Legend as in group.py: W instances, R active requests, T members, Q waiting requests.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np

from narrows.sched.base import AdmitsMany, GroupPolicy
from narrows.sched.decide import AGING_S, COMPILED_FROM, admit
from narrows.sched.degrees import Bucket
from narrows.sched.dual_balanced import DualBalanced
from narrows.sched.group import Bindings, Decision, GroupView, Ints, Placement, Waiting
from narrows.sched.routing_tables import Flags, RoutingTables, domains
from narrows.sched.state import GroupState

LOG = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
CHUNK = 1024  # waiting requests looked at in one go: a long line is not read to its end when its head is stopped


def compile_loop(function: F) -> F:
    try:
        compiled = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder to keep the code in can be written: each process compiles
        compiled = numba.njit(function)
    return cast(F, compiled)


def prepare(say: Callable[[str], None] | None = None) -> None:
    """Compile or load everything now, so that no step waits for it. Tells `say` before, for it can take long."""
    from narrows.sched.hierarchy import Hierarchy, decide_by_groups  # which compiles its router by what is here

    if say is not None:
        say("preparing the scheduler (the first time on a machine it is compiled, which takes some ten seconds)")
    # Two nodes of two instances; one is full, so that its request grows; the line is long enough for the router.
    active = Bindings(np.array([0]), np.array([0, 1]), np.array([0]), np.array([16]))
    pools, used, held = np.array([1, 9, 9, 9]), np.array([1, 0, 0, 0]), np.array([16, 0, 0, 0])
    waiting = (Waiting(1, 0.0),) * COMPILED_FROM
    view = GroupView(np.array([0, 0, 1, 1]), pools, used, held, 16, 4, active, waiting)
    lower(view, decide_by_groups(view, DualBalanced(), 0.0, hierarchy=Hierarchy(above=0, nodes_per_group=1)))


def decide(view: GroupView, policy: GroupPolicy, now_s: float, *, aging_s: float = AGING_S) -> Decision:
    """decide.decide_plainly, compiled as far as the policy allows."""
    if not getattr(_assign, "signatures", True):
        LOG.info("the scheduler is loaded or compiled while a step waits; compiled.prepare() does it beforehand")
    state = GroupState(view)
    moe, grown, stuck = rebalance(view, state, policy.rebalances)
    if stuck:
        return Decision(moe, (), grown, stuck)
    if isinstance(policy, AdmitsMany):
        return Decision(moe, policy.admit(state, view.waiting, now_s, aging_s), grown)
    return Decision(moe, admit(state, view.waiting, policy, now_s, aging_s), grown)


def rebalance(
    view: GroupView, state: GroupState, moves: bool
) -> tuple[Ints, tuple[tuple[int, int], ...], tuple[int, ...]]:
    """decide.rebalance, compiled."""
    active = view.active
    state.batches, state.free_pages = _ints(state.batches), _ints(state.free_pages)
    arriving = np.zeros_like(state.batches) if view.arriving is None else _ints(view.arriving)
    page_size = view.page_size
    full = active.shards % page_size == 0 if page_size & (page_size - 1) else active.shards & (page_size - 1) == 0
    bindings = _ints(active.moe), _ints(active.starts), _ints(active.members)
    rest = state.free_pages, view.max_num_seqs
    fits, moe, batches, free, homeless = _assign(
        *bindings, full, arriving if moves else state.batches, *rest, not moves
    )
    if not fits:
        fits, moe, batches, free, homeless = _assign(*bindings, full, state.batches, *rest, True)
        assert fits
    homeless.sort()
    further = np.full(len(homeless), -1)
    if moves and len(homeless):
        nodes = np.zeros_like(view.nodes) if view.cross_nodes else _ints(view.nodes)
        _grow(homeless, further, *bindings[1:], nodes, _ints(view.kv_tokens), moe, batches, free, view.max_num_seqs)
    state.kv_tokens += batches - arriving
    state.batches, state.free_pages = batches, free
    rows = list(zip(homeless.tolist(), further.tolist(), strict=True))
    return moe, tuple(pair for pair in rows if pair[1] >= 0), tuple(row for row, instance in rows if instance < 0)


def admit_dual_balanced(
    state: GroupState, waiting: Sequence[Waiting], bucket: Bucket, now_s: float, aging_s: float
) -> tuple[tuple[int, Placement], ...]:
    """decide.admit by DualBalanced(bucket), compiled."""
    node_starts = np.searchsorted(state.nodes, np.arange(int(state.nodes[-1]) + 2)).astype(np.int64)
    thresholds, degrees = np.array(bucket.thresholds, np.int64), np.array(bucket.degrees, np.int64)
    state.batches, state.free_pages = _ints(state.batches), _ints(state.free_pages)
    state.kv_tokens = _ints(state.kv_tokens)
    admitted: list[tuple[int, Placement]] = []
    for begin in range(0, len(waiting), CHUNK):
        chunk = waiting[begin : begin + CHUNK]
        tokens = np.array([request.num_tokens for request in chunk], np.int64)
        blocks = np.array([now_s - request.since_s >= aging_s for request in chunk], np.bool_)
        stopped, indices, moe, starts, members, split = _admit(
            tokens,
            blocks,
            thresholds,
            degrees,
            node_starts,
            state.batches,
            state.kv_tokens,
            state.free_pages,
            state.page_size,
            state.max_num_seqs,
            state.cross_nodes,
        )
        bounds, all_members, all_split = starts.tolist(), members.tolist(), split.tolist()
        for j, (index, binding) in enumerate(zip(indices.tolist(), moe.tolist(), strict=True)):
            first, last = bounds[j], bounds[j + 1]
            placement = Placement(binding, tuple(all_members[first:last]), tuple(all_split[first:last]))
            admitted.append((begin + index, placement))
        np.add.at(state.arriving, moe, 1)
        if stopped:
            break
    state.num_admitted += len(admitted)
    state.num_placed += len(admitted)
    return tuple(admitted)


def lower(view: GroupView, decision: Decision) -> RoutingTables:
    """routing_tables.lower_plainly, compiled."""
    active, placements = view.active, [placement for _, placement in decision.admitted]
    extra = np.full(active.num_requests + len(placements), -1)
    for row, instance in decision.grown:
        extra[row] = instance
    takes_part = np.ones(len(extra), np.bool_)
    takes_part[list(decision.stuck)] = False
    moe, starts, members = _ints(decision.moe), _ints(active.starts), _ints(active.members)
    if placements:
        moe = np.concatenate([moe, np.array([placement.moe for placement in placements], np.int64)])
        sizes = np.array([len(placement.members) for placement in placements], np.int64)
        starts = np.concatenate([starts, starts[-1] + np.cumsum(sizes)])
        further = [member for placement in placements for member in placement.members]
        members = np.concatenate([members, np.array(further, np.int64)])
    first, sizes = domains(view)
    return RoutingTables(first, sizes, *_lower(moe, starts, members, extra, takes_part, first, sizes))


def _ints(values: Ints) -> Ints:
    return np.ascontiguousarray(values, np.int64)


@compile_loop
def _assign(
    old: Ints,  # [R]
    starts: Ints,  # [R + 1]
    members: Ints,  # [T]
    full: Flags,  # [T] the last page of the shard is: its next token needs another
    batches_before: Ints,  # [W]
    free_before: Ints,  # [W] pages
    max_num_seqs: int,
    keep: bool,
) -> tuple[bool, Ints, Ints, Ints, Ints]:
    """decide._assign; whether it fits comes first."""
    moe, batches, free, num_requests = old.copy(), batches_before.copy(), free_before.copy(), len(old)
    # Rows by degree, then number: counted, not compared.
    places, order = np.zeros(len(batches) + 2, np.int64), np.empty(num_requests, np.int64)
    for r in range(num_requests):
        places[starts[r + 1] - starts[r] + 1] += 1
    for degree in range(len(batches) + 1):
        places[degree + 1] += places[degree]
    for r in range(num_requests):
        degree = starts[r + 1] - starts[r]
        order[places[degree]] = r
        places[degree] += 1
    homeless = np.empty(num_requests, np.int64)
    num_homeless = 0
    for row in order:
        chosen, able = -1, False
        for i in range(starts[row], starts[row + 1]):
            member = members[i]
            if full[i] and free[member] <= 0:
                continue
            able = True
            if keep and member == old[row]:
                chosen = i
                break
            if batches[member] < max_num_seqs and (chosen < 0 or batches[member] < batches[members[chosen]]):
                chosen = i
        stays = keep and chosen >= 0 and members[chosen] == old[row]
        if keep and not stays:
            batches[old[row]] -= 1
        if chosen < 0:
            if able and not keep:
                return False, moe, batches, free, homeless
            homeless[num_homeless] = row
            num_homeless += 1
            continue
        if not stays:
            moe[row] = members[chosen]
            batches[moe[row]] += 1
        free[moe[row]] -= full[chosen]
    return True, moe, batches, free, homeless[:num_homeless]


@compile_loop
def _grow(
    rows: Ints,
    further: Ints,  # the new member of each of `rows`, written; -1: none
    starts: Ints,
    members: Ints,
    nodes: Ints,  # [W] all the same where bindings may cross nodes
    kv_tokens: Ints,  # [W]
    moe: Ints,  # this and what follows is written
    batches: Ints,
    free: Ints,
    max_num_seqs: int,
) -> None:
    """decide._further_member for one row after the other."""
    for number, row in enumerate(rows):
        own = members[starts[row] : starts[row + 1]]
        best = -1
        for i in range(len(nodes)):
            if nodes[i] != nodes[own[0]] or free[i] <= 0 or batches[i] >= max_num_seqs:
                continue
            if (best < 0 or kv_tokens[i] < kv_tokens[best]) and not (own == i).any():
                best = i
        if best >= 0:
            further[number] = moe[row] = best
            batches[best] += 1
            free[best] -= 1


@compile_loop
def _sort(numbers: Ints, keys: Ints) -> None:
    """Sort by keys[number], stably. By insertion: there are few, and numba's own sorts take seconds to compile."""
    for at in range(1, len(numbers)):
        number, back = numbers[at], at
        while back > 0 and keys[numbers[back - 1]] > keys[number]:
            numbers[back] = numbers[back - 1]
            back -= 1
        numbers[back] = number


@compile_loop
def _waterfill(loads: Ints, capacities: Ints, tokens: int) -> Ints:
    """waterfill.waterfill for what fits."""
    count = len(loads)
    shares = np.zeros(count, np.int64)
    if tokens == 0:
        return shares
    turns, order = np.empty(2 * count, np.int64), np.arange(2 * count)
    for i in range(count):
        turns[i], turns[count + i] = loads[i], loads[i] + capacities[i]
    _sort(order, turns)
    taking = taken = level = 0
    for at in range(2 * count - 1):
        taking += 1 if order[at] < count else -1
        below, above = turns[order[at]], turns[order[at + 1]]
        if taken + taking * (above - below) >= tokens:
            level = below - (taken - tokens) // taking
            break
        taken += taking * (above - below)
    left = tokens
    for i in range(count):
        shares[i] = min(capacities[i], max(0, level - 1 - loads[i]))
        left -= shares[i]
    for i in range(count):
        if left > 0 and loads[i] < level and shares[i] < capacities[i]:
            shares[i] += 1
            left -= 1
    assert left == 0
    return shares


@compile_loop
def _binding(begin: int, end: int, batches: Ints, kv_tokens: Ints, free: Ints, max_num_seqs: int) -> int:
    """The MoE binding among the instances of a node that has one."""
    best = -1
    for i in range(begin, end):
        if batches[i] < max_num_seqs and free[i] > 0:
            fewer = best < 0 or batches[i] < batches[best]
            if fewer or (batches[i] == batches[best] and kv_tokens[i] < kv_tokens[best]):
                best = i
    return best


@compile_loop
def _take(
    binding: int, begin: int, end: int, kv_tokens: Ints, room: Ints, crosses: bool, degree: int, tokens: int
) -> Ints:
    """The members, ascending: the MoE binding, its node's [begin, end) and then all others by KV load, until there are
    `degree` and they have `room` [W] for the tokens."""
    order = np.empty(len(room) if crosses else end - begin, np.int64)
    order[0], at = binding, 1
    for i in range(begin, end):
        if i != binding:
            order[at] = i
            at += 1
    if crosses:
        for i in range(len(room)):
            if i < begin or i >= end:
                order[at] = i
                at += 1
    count, held = 1, room[binding]
    if held < tokens or degree > 1:
        _sort(order[1 : end - begin], kv_tokens)
        _sort(order[end - begin :], kv_tokens)
    while count < len(order) and (count < degree or held < tokens):
        held += room[order[count]]
        count += 1
    members = order[:count].copy()
    _sort(members, np.arange(len(room)))
    return members


@compile_loop
def _admit(
    tokens: Ints,  # [Q]
    blocks: Flags,  # [Q] nobody behind it may be admitted before it
    thresholds: Ints,
    degrees: Ints,
    node_starts: Ints,  # [nodes + 1]
    batches: Ints,  # [W] this and the next two are written
    kv_tokens: Ints,  # [W]
    free: Ints,  # [W] pages
    page_size: int,
    max_num_seqs: int,
    cross_nodes: bool,
) -> tuple[bool, Ints, Ints, Ints, Ints, Ints]:
    """Whether it stopped; the admitted: index, MoE binding, and as in Bindings starts, members and split.

    A node can hold a request if one of its instances can be the MoE binding and all its free pages together suffice,
    because WaterFill leaves no page unused that is needed: sums per node tell, without trying.
    """
    num_nodes, size = len(node_starts) - 1, len(batches)
    node_of, room = np.empty(size, np.int64), free * page_size
    owned, pages, able = np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64), np.zeros(num_nodes, np.int64)
    for node in range(num_nodes):
        for i in range(node_starts[node], node_starts[node + 1]):
            node_of[i] = node
            owned[node] += batches[i]
            pages[node] += free[i]
            able[node] += batches[i] < max_num_seqs and free[i] > 0
    all_pages, all_able = pages.sum(), able.sum()
    indices, moe, starts = np.empty_like(tokens), np.empty_like(tokens), np.zeros(len(tokens) + 1, np.int64)
    members, split = np.empty(2 * len(tokens) + size, np.int64), np.empty(2 * len(tokens) + size, np.int64)
    num_admitted, last, stopped = 0, 0, False
    for index in range(len(tokens)):
        if all_able == 0:
            stopped = True
            break
        needed = -(-tokens[index] // page_size)
        home, first = -1, -1  # the node that holds it, one that could have its MoE binding: with the fewest requests
        for node in range(num_nodes):
            if able[node] > 0:
                if first < 0 or owned[node] < owned[first]:
                    first = node
                if pages[node] >= needed and (home < 0 or owned[node] < owned[home]):
                    home = node
        crosses = home < 0 and cross_nodes and all_pages >= needed
        if crosses:
            home = first
        if home < 0:
            if blocks[index]:
                stopped = True
                break
            continue
        begin, end = node_starts[home], node_starts[home + 1]
        binding = _binding(begin, end, batches, kv_tokens, free, max_num_seqs)
        bucket = 0
        while bucket < len(thresholds) and thresholds[bucket] < tokens[index]:
            bucket += 1
        own = _take(binding, begin, end, kv_tokens, room, crosses, degrees[bucket], tokens[index])
        loads, capacities = np.empty_like(own), np.empty_like(own)
        for i in range(len(own)):
            slot = own[i] == binding  # the next token's, which is not for WaterFill to give away
            loads[i], capacities[i] = kv_tokens[own[i]] + slot, room[own[i]] - slot
        shares = _waterfill(loads, capacities, tokens[index] - 1)
        if last + len(own) > len(members):
            members, split = _doubled(members, last + len(own)), _doubled(split, last + len(own))
        for i in range(len(own)):
            member, share = own[i], shares[i] + (own[i] == binding)
            if share == 0:
                continue
            members[last], split[last] = member, share
            last += 1
            node, taken = node_of[member], -(-share // page_size)
            was_able = batches[member] < max_num_seqs and free[member] > 0
            kv_tokens[member] += share
            free[member] -= taken
            room[member] -= taken * page_size
            pages[node] -= taken
            all_pages -= taken
            if member == binding:
                batches[member] += 1
                owned[node] += 1
            if was_able and not (batches[member] < max_num_seqs and free[member] > 0):
                able[node] -= 1
                all_able -= 1
        indices[num_admitted], moe[num_admitted] = index, binding
        num_admitted += 1
        starts[num_admitted] = last
    return stopped, indices[:num_admitted], moe[:num_admitted], starts[: num_admitted + 1], members[:last], split[:last]


@compile_loop
def _doubled(values: Ints, least: int) -> Ints:
    """The same at the front of an array twice as long, at least `least`."""
    longer = np.empty(max(2 * len(values), least), np.int64)
    for i in range(len(values)):
        longer[i] = values[i]
    return longer


@compile_loop
def _lower(
    moe: Ints,  # [requests], active and admitted
    starts: Ints,
    members: Ints,
    extra: Ints,  # [requests] a further member, -1: none
    takes_part: Flags,  # [requests]
    first: Ints,  # [W]
    sizes: Ints,  # [W]
) -> tuple[Ints, Ints, Ints, Ints, Ints, Flags, Ints, Flags]:
    """RoutingTables from local_starts on."""
    size, num_requests = len(first), len(moe)
    widths, heights = np.zeros(size, np.int64), np.zeros(size, np.int64)  # M and N
    for request in range(num_requests):
        if takes_part[request]:
            widths[moe[request]] += 1
            for i in range(starts[request], starts[request + 1]):
                heights[members[i]] += 1
            if extra[request] >= 0:
                heights[extra[request]] += 1
    local_starts, attended_starts = np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
    q_starts, res_starts = np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
    for s in range(size):
        local_starts[s + 1] = local_starts[s] + widths[s]
        attended_starts[s + 1] = attended_starts[s] + heights[s]
        q_starts[s + 1] = q_starts[s] + widths[s] * sizes[s]
        res_starts[s + 1] = res_starts[s] + heights[s] * sizes[s]
    local, attended = np.empty(local_starts[size], np.int64), np.empty(attended_starts[size], np.int64)
    q_route, res_route = np.zeros(q_starts[size], np.bool_), np.zeros(res_starts[size], np.bool_)
    # The next column of each instance's tables; in the tables, that of the row which instance 0 would have.
    next_local, next_attended = local_starts.copy(), attended_starts.copy()
    next_q, next_res = q_starts[:size] - first * widths, res_starts[:size] - first * heights
    for request in range(num_requests):
        if not takes_part[request]:
            continue
        s = moe[request]
        local[next_local[s]] = request
        next_local[s] += 1
        end = starts[request + 1]
        for i in range(starts[request], end + (extra[request] >= 0)):
            member = members[i] if i < end else extra[request]
            assert first[member] == first[s], "a binding reaches out of the routing domain"
            q_route[next_q[s] + member * widths[s]] = True
            attended[next_attended[member]] = request
            next_attended[member] += 1
            res_route[next_res[member] + s * heights[member]] = True
            next_res[member] += 1
        next_q[s] += 1
    return local_starts, local, attended_starts, attended, q_starts, q_route, res_starts, res_route
