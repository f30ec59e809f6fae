"""Decisions executed token by token: conservation, capacity, fairness; rebalancing and growth by hand."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_groups import Group, bind, groups, ints, pages

from narrows.sched.decide import decide, fits_when_empty, rebalance
from narrows.sched.degrees import Bucket
from narrows.sched.dual_balanced import DualBalanced
from narrows.sched.group import Decision, GroupView, Placement, Waiting
from narrows.sched.routing_tables import steps_valid
from narrows.sched.state import GroupState

POLICY = DualBalanced(Bucket((8, 16), (1, 2, 4)))


class Fixed(DualBalanced):
    """Places alike, and leaves bindings alone."""

    name = "fixed"
    rebalances = False


@settings(max_examples=300, deadline=None)
@given(groups(), st.integers(0, 20), st.booleans())
def test_what_is_decided_can_be_executed(group: Group, now: int, moves: bool) -> None:
    """`execute` asserts bindings, nodes, tokens, pages and batches."""
    view, before = group.view(), copy.deepcopy(group)
    decision = decide(view, POLICY if moves else Fixed(POLICY.bucket), float(now), aging_s=3.0)
    assert decision == decide(before.view(), POLICY if moves else Fixed(POLICY.bucket), float(now), aging_s=3.0)
    group.execute(decision)
    assert not (decision.stuck and decision.admitted)
    if not moves:
        assert not decision.grown


@settings(max_examples=200, deadline=None)
@given(groups())
def test_the_state_is_that_of_the_group_after_the_step(group: Group) -> None:
    """Rule 5 of DESIGN: the scheduler's batches and KV loads are the engine's."""
    view = group.view()
    state = GroupState(view)
    moe, grown, stuck = rebalance(view, state, True)
    stays = [shards for row, (_, shards) in enumerate(group.active) if row not in stuck]
    gone = [shards for row, (_, shards) in enumerate(group.active) if row in stuck]
    group.execute(Decision(moe, (), grown, stuck))
    assert state.batches.tolist() == group.batches()
    held = [tokens + sum(shards.get(i, 0) for shards in gone) for i, tokens in enumerate(group.kv_tokens())]
    assert state.kv_tokens.tolist() == held
    used = [n + sum(pages(shards.get(i, 0), group.page_size) for shards in gone) for i, n in enumerate(group.used())]
    assert (view.num_pages - state.free_pages).tolist() == used
    assert len(stays) + len(gone) == len(moe)


@settings(max_examples=200, deadline=None)
@given(groups(max_waiting=0), st.integers(1, 40))
def test_a_decision_is_valid_for_so_many_steps_and_not_for_one_more(group: Group, limit: int) -> None:
    decision = decide(group.view(), POLICY, 0.0)
    group.waiting = []
    steps = steps_valid(group.view(), decision, limit)
    assert 1 <= steps <= limit
    group.execute(decision)
    for _ in range(steps - 1):
        again = Decision(ints(*(moe for moe, _ in group.active)))
        group.execute(again)
    if steps < limit and not decision.stuck:  # those leave pages behind
        with pytest.raises(AssertionError, match="out of pages"):
            group.execute(Decision(ints(*(moe for moe, _ in group.active))))


@settings(max_examples=100, deadline=None)
@given(groups(max_active=0), st.integers(1, 20))
def test_admitted_ones_count_in_how_long_a_decision_is_valid(group: Group, limit: int) -> None:
    decision = decide(group.view(), POLICY, 20.0)
    steps = steps_valid(group.view(), decision, limit)
    group.execute(decision)
    for _ in range(steps - 1):
        group.execute(Decision(ints(*(moe for moe, _ in group.active))))
    if steps < limit:
        with pytest.raises(AssertionError, match="out of pages"):
            group.execute(Decision(ints(*(moe for moe, _ in group.active))))


def make(active: list[tuple[int, dict[int, int]]], num_pages: list[int], **settings: int) -> GroupView:
    """One node of instances with pages of four tokens."""
    return Group([0] * len(num_pages), num_pages, 4, settings.get("max_num_seqs", 8), active=active).view()


def test_few_choices_come_first_and_the_smallest_batch_wins() -> None:
    """By hand: rows 1 and 3 can only be on 0; row 2 goes to 1, then row 0, with three choices, to 2."""
    view = make([(0, {0: 5, 1: 5, 2: 5}), (0, {0: 5}), (0, {0: 5, 1: 5}), (0, {0: 5})], [9, 9, 9])
    assert decide(view, POLICY, 0.0).moe.tolist() == [2, 0, 1, 0]
    assert decide(view, Fixed(), 0.0).moe.tolist() == [0, 0, 0, 0]


def test_equal_batches_go_to_the_lowest_and_order_of_admission_counts() -> None:
    view = make([(1, {0: 5, 1: 5}), (1, {0: 5, 1: 5}), (1, {0: 5, 1: 5})], [9, 9])
    assert decide(view, POLICY, 0.0).moe.tolist() == [0, 1, 0]


def test_only_members_with_room_for_the_next_token() -> None:
    """Instance 0 has no free page and the shard there ends with a page: the binding goes to 1. Where the shard there
    has room in its last page it may stay."""
    assert decide(make([(0, {0: 4, 1: 5})], [1, 9]), POLICY, 0.0).moe.tolist() == [1]
    assert decide(make([(0, {0: 4, 1: 5})], [1, 9]), Fixed(), 0.0).moe.tolist() == [1]
    assert decide(make([(1, {0: 3, 1: 5})], [1, 9]), POLICY, 0.0).moe.tolist() == [0]


def test_a_page_is_free_for_one() -> None:
    """Both need a page at 0, where one is free: the older gets it, the younger grows to 1."""
    decision = decide(make([(0, {0: 4}), (0, {0: 8})], [4, 2]), POLICY, 0.0)
    assert decision.moe.tolist() == [0, 1]
    assert decision.grown == ((1, 1),)


def test_growth_takes_the_least_loaded_with_a_page_on_the_same_node() -> None:
    """Instance 1 is full, 2 holds 5 tokens, 3 holds 2; instance 4 is empty but on another node."""
    active = [(0, {0: 4}), (1, {1: 4}), (2, {2: 5}), (3, {3: 2})]
    view = Group([0, 0, 0, 0, 1], [1, 2, 9, 9, 9], 4, 8, active=active).view()
    assert decide(view, POLICY, 0.0).grown == ((0, 3),)
    over = Group([0, 0, 0, 0, 1], [1, 2, 9, 9, 9], 4, 8, cross_nodes=True, active=active).view()
    assert decide(over, POLICY, 0.0).grown == ((0, 4),)


def test_without_room_on_its_node_a_request_is_stuck_and_nobody_comes_in() -> None:
    group = Group([0, 1], [1, 9], 4, 8, active=[(0, {0: 4})], waiting=[Waiting(3, 0.0)])
    decision = decide(group.view(), POLICY, 0.0)
    assert (decision.stuck, decision.grown, decision.admitted) == ((0,), (), ())
    assert decide(make([(0, {0: 4})], [1, 9]), Fixed(), 0.0).stuck == (0,), "only who rebalances grows"


def test_a_greedy_order_that_overfills_a_batch_leaves_bindings_alone() -> None:
    """Batches of one: greedily row 0 would take 0 and row 1 take 2, and row 2 would find both of its members full."""
    active = [(1, {0: 5, 1: 5}), (2, {1: 5, 2: 5}), (0, {0: 5, 2: 5})]
    assert decide(make(active, [9, 9, 9]), POLICY, 0.0).moe.tolist() == [0, 1, 2]
    assert decide(make(active, [9, 9, 9], max_num_seqs=1), POLICY, 0.0).moe.tolist() == [0, 1, 2]
    tight = [(1, {0: 5, 1: 5}), (2, {0: 5, 2: 5}), (0, {0: 5, 2: 5, 3: 5}), (3, {3: 5}), (4, {2: 5, 4: 5})]
    view = make(tight, [9, 9, 9, 9, 9], max_num_seqs=1)
    assert decide(view, POLICY, 0.0).moe.tolist() == [1, 2, 0, 3, 4]
    assert decide(make(tight, [9, 9, 9, 9, 9]), POLICY, 0.0).moe.tolist() == [0, 2, 0, 3, 4]


def test_those_on_their_way_count_in_batches() -> None:
    group = Group([0, 0], [9, 9], 4, 2, active=[(0, {0: 5, 1: 5})], waiting=[Waiting(3, 0.0)] * 3, arriving=[1, 0])
    decision = decide(group.view(), POLICY, 0.0)
    assert decision.moe.tolist() == [1]
    assert [placement.moe for _, placement in decision.admitted] == [0, 1]
    assert group.view().batches.tolist() == [2, 0]


def test_a_request_that_does_not_fit_is_overtaken_until_it_has_aged() -> None:
    waiting = [Waiting(3, 0.0), Waiting(100, 1.0), Waiting(3, 2.0)]
    group = Group([0], [9], 4, 8, waiting=waiting)
    assert [index for index, _ in decide(group.view(), POLICY, 5.9, aging_s=5.0).admitted] == [0, 2]
    assert [index for index, _ in decide(group.view(), POLICY, 6.0, aging_s=5.0).admitted] == [0]


def starve(aging_s: float) -> int | None:
    """The step in which a request that needs the whole node is admitted, while short ones of 6 steps come for ever."""
    group = Group([0, 0], [8, 8], 4, 64, waiting=[Waiting(2, 0.0)] * 4 + [Waiting(60, 0.0)])
    ends: list[int] = []
    for step in range(200):
        decision = decide(group.view(), POLICY, float(step), aging_s=aging_s)
        lengths = [group.waiting[index].num_tokens for index, _ in decision.admitted]
        if 60 in lengths:
            return step
        stayed = group.execute(decision)
        ends = [ends[i] for i in stayed if i < len(ends)] + [step + 6] * len(lengths)
        group.active = [request for request, end in zip(group.active, ends, strict=True) if end > step]
        ends = [end for end in ends if end > step]
        group.waiting += [Waiting(2, float(step))]
    return None


def test_aging_is_what_keeps_a_long_request_from_starving() -> None:
    assert starve(float("inf")) is None
    admitted = starve(20.0)
    assert admitted is not None and 20 <= admitted <= 20 + 6 + 1, "aged, then as long as the active ones need to end"


@settings(max_examples=100, deadline=None)
@given(groups(max_waiting=8), st.data())
def test_nobody_waits_for_ever(group: Group, data: st.DataObject) -> None:
    """Whatever fits the empty group is admitted, when it has aged and those then active have ended. A stream of short
    requests tries to hold it up, and preempted ones come back as they went: with their tokens and their place."""
    view = group.view()
    group.waiting = [request for request in group.waiting if fits_when_empty(view, POLICY, request)]
    patient = len(group.waiting)
    watched = {id(request) for request in group.waiting}
    short = Waiting(1, 10.0)
    comes = fits_when_empty(view, POLICY, short)
    lives = data.draw(st.integers(1, 4))
    ends = [lives] * len(group.active)
    step = 0
    while watched:
        now = 10.0 + step
        assert step <= 5 + (lives + 1) * (patient + 1), f"{group.waiting} still wait"
        decision = decide(group.view(), POLICY, now, aging_s=5.0)
        watched -= {id(group.waiting[index]) for index, _ in decision.admitted}
        stayed = group.execute(decision)
        ends = [ends[i] if i < len(ends) else step + lives for i in stayed]
        alive = [end > step for end in ends]
        group.active = [request for request, there in zip(group.active, alive, strict=True) if there]
        ends = [end for end in ends if end > step]
        if comes:
            group.waiting += [Waiting(1, now), Waiting(1, now)]
        step += 1


def test_the_node_with_the_fewest_requests_then_the_smallest_batch_then_the_lowest_load() -> None:
    active = [(0, {0: 5}), (0, {0: 5}), (2, {2: 9}), (3, {3: 5})]
    group = Group([0, 0, 1, 1], [9] * 4, 4, 8, active=active, waiting=[Waiting(3, 0.0)])
    group.active.append((1, {1: 5}))  # node 0 owns three, node 1 two
    (admitted,) = decide(group.view(), POLICY, 0.0).admitted
    assert admitted == (0, Placement(3, (3,), (3,)))


def test_degree_by_length_and_split_by_load() -> None:
    """By hand: 12 tokens are of degree 2. Instance 0 has the smallest batch, 2 the smallest load of the others: after
    this step's token 1 holds 12, 2 holds 3, 0 none. Level 8 less one: 7 and 5, or 8 and 4: the lower index first."""
    active = [(1, {1: 11}), (2, {2: 2})]
    view = Group([0, 0, 0], [9] * 3, 4, 8, active=active, waiting=[Waiting(12, 0.0)]).view()
    ((_, placement),) = decide(view, POLICY, 0.0).admitted
    assert placement == Placement(0, (0, 2), (8, 4))


def test_the_degree_grows_when_one_instance_can_not_hold_a_request() -> None:
    """8 tokens are of degree 1; instance 0 has room for 4, then instance 1 joins."""
    view = Group([0, 0], [1, 9], 4, 8, waiting=[Waiting(8, 0.0)]).view()
    ((_, placement),) = decide(view, POLICY, 0.0).admitted
    assert placement == Placement(0, (0, 1), (4, 4))


def test_the_next_node_is_tried_and_bindings_cross_nodes_only_where_they_may() -> None:
    group = Group([0, 0, 1, 1], [1, 1, 2, 2], 4, 8, waiting=[Waiting(12, 0.0)])
    assert decide(group.view(), POLICY, 0.0).admitted == ((0, Placement(2, (2, 3), (6, 6))),)
    group.waiting = [Waiting(20, 0.0)]
    assert decide(group.view(), POLICY, 0.0).admitted == ()
    group.cross_nodes = True
    ((_, placement),) = decide(group.view(), POLICY, 0.0).admitted
    assert placement == Placement(0, (0, 1, 2, 3), (4, 4, 6, 6))


@settings(max_examples=200, deadline=None)
@given(groups(max_active=0, max_waiting=1))
def test_into_an_empty_group_goes_what_fits_a_node(group: Group) -> None:
    for request in group.waiting:
        rooms = [n * group.page_size for n in group.num_pages]
        inside = [sum(room for room, n in zip(rooms, group.nodes, strict=True) if n == node) for node in group.nodes]
        fits = request.num_tokens <= (sum(rooms) if group.cross_nodes else max(inside))
        assert fits_when_empty(group.view(), POLICY, request) == fits
        assert bool(decide(group.view(), POLICY, 10.0).admitted) == fits


@settings(max_examples=200, deadline=None)
@given(groups())
def test_place_changes_nothing_and_fits(group: Group) -> None:
    state, fresh = GroupState(group.view()), GroupState(group.view())
    for request in group.waiting:
        placement = POLICY.place(state, request, 0.0)
        assert np.array_equal(state.free_pages, fresh.free_pages) and np.array_equal(state.batches, fresh.batches)
        if placement is not None:
            assert state.can_allocate(placement)
            assert len(placement.members) <= max(POLICY.bucket(request.num_tokens), 1) or request.num_tokens > min(
                state.capacities[list(placement.members)].tolist()
            )


def test_nothing_active_nothing_waiting() -> None:
    decision = decide(Group([0], [1], 4, 1).view(), POLICY, 0.0)
    assert decision.moe.tolist() == [] and decision.admitted == ()
    assert bind().num_requests == 0
