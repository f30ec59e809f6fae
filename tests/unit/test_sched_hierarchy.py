"""Deciding in groups of nodes: what it decides can be executed as if one scheduler had, and is about as good."""

import copy
import random
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_groups import Group, bind, groups, ints

from narrows.sched.decide import decide
from narrows.sched.group import Decision, GroupView, Ints, Placement, Waiting
from narrows.sched.hierarchy import Hierarchy, decide_by_groups, fits_when_empty_by_groups
from narrows.sched.registry import make_policy

EACH = Hierarchy(above=0, nodes_per_group=1)
PAIRS = Hierarchy(above=0, nodes_per_group=2)
NAMES = ["dual-balanced", "round-robin", "least-batch", "vllm", "uniform-cp:2", "segment:10", "elastic-cp"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(group=groups(), now=st.integers(0, 20), hierarchy=st.sampled_from([EACH, PAIRS]))
def test_what_groups_decide_can_be_executed(name: str, group: Group, now: int, hierarchy: Hierarchy) -> None:
    """`execute` asserts bindings, nodes, tokens, pages and batches of the whole. Twice the same is decided."""
    before = copy.deepcopy(group)
    decision = decide_by_groups(group.view(), make_policy(name), float(now), aging_s=3.0, hierarchy=hierarchy)
    again = decide_by_groups(before.view(), make_policy(name), float(now), aging_s=3.0, hierarchy=hierarchy)
    assert decision == again
    waiting = len(group.waiting)
    indices = [index for index, _ in decision.admitted]
    assert indices == sorted(set(indices)) and all(0 <= index < waiting for index in indices)
    group.execute(decision)
    assert len(group.waiting) == waiting - len(indices), "each is admitted once or waits"


@settings(max_examples=100, deadline=None)
@given(groups(), st.integers(0, 20))
def test_a_part_decides_of_its_active_requests_what_it_would_alone(group: Group, now: int) -> None:
    """With a node for a group: rebalancing and growth are those of one scheduler, for they stay in the node."""
    group.cross_nodes = False
    group.active = [one for one in group.active if len({group.nodes[i] for i in one[1]}) == 1]
    central = decide(group.view(), make_policy("dual-balanced"), float(now))
    parted = decide_by_groups(group.view(), make_policy("dual-balanced"), float(now), hierarchy=EACH)
    if (central.grown, central.stuck) == ((), ()):
        assert np.array_equal(central.moe, parted.moe)
    assert (central.grown, central.stuck) == (parted.grown, parted.stuck)


@settings(max_examples=100, deadline=None)
@given(groups(max_waiting=1, max_active=6))
def test_a_request_waits_only_where_every_group_refuses_it(group: Group) -> None:
    """Of degree 1: both ways admit it or none does, though the group it is sent to first may have it in halves."""
    central = decide(group.view(), make_policy("least-batch"), 0.0)
    parted = decide_by_groups(group.view(), make_policy("least-batch"), 0.0, hierarchy=EACH)
    if not (central.stuck or parted.stuck):
        assert [index for index, _ in central.admitted] == [index for index, _ in parted.admitted]


@pytest.mark.parametrize("name", ["dual-balanced", "vllm"])
@settings(max_examples=60, deadline=None)
@given(group=groups(), now=st.integers(0, 20), hierarchy=st.sampled_from([EACH, PAIRS]))
def test_compiled_loops_decide_the_same(name: str, group: Group, now: int, hierarchy: Hierarchy) -> None:
    decisions = []
    for least in (0, 10**9):
        with patch("narrows.sched.hierarchy.COMPILED_FROM", least):
            policy = make_policy(name)
            decisions.append(decide_by_groups(group.view(), policy, float(now), aging_s=3.0, hierarchy=hierarchy))
    assert decisions[0] == decisions[1]


def test_small_groups_are_decided_at_once() -> None:
    group = Group([0, 0, 1, 1], [9] * 4, 4, 8, waiting=[Waiting(3, 0.0)] * 3)
    policy = make_policy("dual-balanced")
    for hierarchy in (None, Hierarchy(above=4, nodes_per_group=1), Hierarchy(above=0, nodes_per_group=2)):
        assert decide_by_groups(group.view(), policy, 0.0, hierarchy=hierarchy) == decide(group.view(), policy, 0.0)


def test_a_binding_that_crosses_groups_is_decided_about_at_once() -> None:
    group = Group([0, 1], [9, 9], 4, 8, True, active=[(0, {0: 5, 1: 5})], waiting=[Waiting(50, 0.0)])
    policy = make_policy("dual-balanced")
    decision = decide_by_groups(group.view(), policy, 0.0, hierarchy=EACH)
    assert decision == decide(group.view(), policy, 0.0)
    assert len(decision.admitted[0][1].members) == 2


def test_numbers_of_parts_become_those_of_the_whole() -> None:
    """Node 0: rows 0 and 2; node 1: row 1, which grows, for its only member is full, whither
    also who waits goes. Row 2 moves to instance 1."""
    active = [(0, {0: 5}), (2, {2: 8}), (0, {0: 5, 1: 5})]
    group = Group([0, 0, 1, 1], [9, 9, 2, 9], 4, 8, active=active, waiting=[Waiting(3, 0.0)])
    decision = decide_by_groups(group.view(), make_policy("dual-balanced"), 0.0, hierarchy=EACH)
    assert decision == Decision(ints(0, 3, 1), ((0, Placement(3, (3,), (3,))),), ((1, 3),))


def test_cached_prefixes_are_handed_to_the_group_they_are_in() -> None:
    group = Group([0, 0, 1, 1], [0, 0, 90, 90], 4, 8, waiting=[Waiting(40, 0.0, (0, 0, 0, 40))])
    decision = decide_by_groups(group.view(), make_policy("dynamo-cost"), 0.0, hierarchy=EACH)
    assert decision.admitted == ((0, Placement(3, (3,), (40,))),)


def test_a_short_request_goes_by_requests_and_a_long_one_by_kv() -> None:
    """Node 0 holds one request of 400 tokens, node 1 three of 4. Means when one more is placed: 5 / 2 requests and,
    with 400 more tokens, 406; with 2 more, 207. The long one: 1 / 2.5**2 + 400 * 400 / 406**2 = 1.13 and
    3 / 2.5**2 + 400 * 12 / 406**2 = 0.51. The short one: 0.16 + 2 * 400 / 207**2 = 0.18 and 0.48."""
    active = [(0, {0: 400}), *[(1, {1: 4})] * 3]
    for tokens, instance in ((400, 1), (2, 0)):
        group = Group([0, 1], [300, 300], 4, 8, active=active, waiting=[Waiting(tokens, 0.0)])
        ((_, placement),) = decide_by_groups(group.view(), make_policy("least-batch"), 0.0, hierarchy=EACH).admitted
        assert placement.moe == instance


def test_refused_by_the_group_with_more_room_in_all_it_goes_to_the_other() -> None:
    """20 tokens are 5 pages: node 0 has 8 free in two halves, node 1 has 6 in one, and two requests."""
    group = Group([0, 0, 1], [4, 4, 8], 4, 8, active=[(2, {2: 3}), (2, {2: 3})], waiting=[Waiting(20, 0.0)])
    decision = decide_by_groups(group.view(), make_policy("least-batch"), 0.0, hierarchy=EACH)
    assert decision.admitted == ((0, Placement(2, (2,), (20,))),)


def test_an_aged_head_of_the_line_closes_the_group_that_it_waits_for() -> None:
    """It needs ten pages, all of node 1. Node 0 has room for three of those behind it, the fourth would go to 1."""
    waiting = [Waiting(40, 0.0), *[Waiting(3, 5.0)] * 4]
    active = [(1, {1: 3}), (2, {2: 3})] * 2
    group = Group([0, 1, 1], [3, 5, 5], 4, 8, active=active, waiting=waiting)
    for aging_s, nodes in ((10.0, [0, 0, 0, 1]), (6.0, [0, 0, 0])):
        decision = decide_by_groups(group.view(), make_policy("dual-balanced"), 6.0, aging_s=aging_s, hierarchy=EACH)
        assert sorted(group.nodes[placement.moe] for _, placement in decision.admitted) == nodes


def test_an_aged_head_waits_where_it_can_ever_fit() -> None:
    """It needs ten pages. Node 0 has eight free ones and never more; node 1 has six of ten, and is what is kept: who is
    behind it and fits node 0 goes there."""
    active = [(1, {1: 3}), (1, {1: 3}), (2, {2: 3}), (2, {2: 3})]
    for second, aging_s, admitted in ((4, 9.0, [1]), (4, 0.5, [1]), (36, 0.5, [])):
        waiting = [Waiting(40, 0.0), Waiting(second, 0.2)]
        group = Group([0, 1, 1], [8, 5, 5], 4, 8, active=active, waiting=waiting)
        decision = decide_by_groups(group.view(), make_policy("dual-balanced"), 0.5, aging_s=aging_s, hierarchy=EACH)
        assert [index for index, _ in decision.admitted] == admitted
    group = Group([0, 1, 1], [2, 5, 5], 4, 8, active=active[:2], waiting=[Waiting(40, 0.0), Waiting(12, 0.2)])
    for aging_s, admitted in ((9.0, [1]), (0.5, [])):
        decision = decide_by_groups(group.view(), make_policy("dual-balanced"), 0.5, aging_s=aging_s, hierarchy=EACH)
        assert [index for index, _ in decision.admitted] == admitted, "three pages are in node 1 only, which is kept"


def test_turns_go_round_inside_each_group() -> None:
    """One request a step onto two groups of two: without a share of the count each group would always have the same
    turn."""
    active: list[tuple[int, dict[int, int]]] = []
    for step in range(8):
        group = Group([0, 0, 1, 1], [99] * 4, 4, 8, active=active, waiting=[Waiting(4, 0.0)])
        view = group.view()
        view = GroupView(
            view.nodes, view.num_pages, view.used_pages, view.kv_tokens, 4, 8, view.active, view.waiting, step
        )
        ((_, placement),) = decide_by_groups(view, make_policy("round-robin"), 0.0, hierarchy=EACH).admitted
        active.append((placement.moe, {placement.moe: 4}))
    assert Group([0, 0, 1, 1], [99] * 4, 4, 8, active=active).batches() == [2, 2, 2, 2]


def test_what_fits_no_group_is_known_beforehand() -> None:
    group = Group([0, 1], [2, 3], 4, 8, True)
    policy = make_policy("dual-balanced")
    fits = [fits_when_empty_by_groups(group.view(), policy, Waiting(n, 0.0), EACH) for n in (12, 13, 20, 21)]
    assert fits == [True, False, False, False]
    at_once = [fits_when_empty_by_groups(group.view(), policy, Waiting(n, 0.0)) for n in (12, 13, 20, 21)]
    assert at_once == [True, True, True, False]


def starve(aging_s: float) -> int | None:
    """The step in which a request that needs a whole node is admitted, while short ones of six steps come for ever."""
    group = Group([0, 0, 1, 1], [8] * 4, 4, 64, waiting=[Waiting(2, 0.0)] * 8 + [Waiting(60, 0.0)])
    ends: list[int] = []
    for step in range(150):
        decision = decide_by_groups(
            group.view(), make_policy("dual-balanced"), float(step), aging_s=aging_s, hierarchy=EACH
        )
        lengths = [group.waiting[index].num_tokens for index, _ in decision.admitted]
        if 60 in lengths:
            return step
        stayed = group.execute(decision)
        ends = [ends[i] for i in stayed if i < len(ends)] + [step + 6] * len(lengths)
        group.active = [request for request, end in zip(group.active, ends, strict=True) if end > step]
        ends = [end for end in ends if end > step]
        group.waiting += [Waiting(2, float(step))] * 3
    return None


def test_a_long_request_is_admitted_when_it_has_aged_and_its_group_has_emptied() -> None:
    assert starve(float("inf")) is None
    admitted = starve(20.0)
    assert admitted is not None and 20 <= admitted <= 20 + 6 + 1


@pytest.mark.parametrize("name", ["dual-balanced", "least-batch", "segment:10"])
@settings(max_examples=60, deadline=None)
@given(group=groups(max_waiting=6), data=st.data())
def test_nobody_waits_for_ever(name: str, group: Group, data: st.DataObject) -> None:
    """Whatever fits some group when empty is admitted once it heads the line, has aged and those then active in its
    group have ended, though short requests come for ever."""
    policy = make_policy(name)
    group.cross_nodes = False
    group.active = [one for one in group.active if len({group.nodes[i] for i in one[1]}) == 1]
    view = group.view()
    group.waiting = [r for r in group.waiting if fits_when_empty_by_groups(view, policy, r, EACH)]
    patient = len(group.waiting)
    watched = {id(request) for request in group.waiting}
    lives = data.draw(st.integers(1, 4))
    ends = [lives] * len(group.active)
    step = 0
    while watched:
        now = 10.0 + step
        assert step <= 5 + (lives + 1) * (patient + 1), f"{group.waiting} still wait"
        decision = decide_by_groups(group.view(), policy, now, aging_s=5.0, hierarchy=EACH)
        watched -= {id(group.waiting[index]) for index, _ in decision.admitted}
        stayed = group.execute(decision)
        ends = [ends[i] if i < len(ends) else step + lives for i in stayed]
        alive = [end > step for end in ends]
        group.active = [request for request, there in zip(group.active, alive, strict=True) if there]
        ends = [end for end in ends if end > step]
        if fits_when_empty_by_groups(view, policy, Waiting(1, now), EACH):
            group.waiting += [Waiting(1, now), Waiting(1, now)]
        step += 1


def cohort(seed: int, num_long: int) -> GroupView:
    """400 requests at once for 16 empty nodes of 4: short ones of some 650 tokens, long ones of 200 to 500 thousand."""
    chance = random.Random(seed)
    lengths = [min(32_768, int(chance.lognormvariate(6.5, 1.2)) + 1) for _ in range(400 - num_long)]
    lengths += [chance.randint(200_000, 500_000) for _ in range(num_long)]
    chance.shuffle(lengths)
    nothing: Ints = np.zeros(64, np.int64)
    waiting = tuple(Waiting(n, 0.0) for n in lengths)
    return GroupView(np.repeat(np.arange(16), 4), nothing + 20_000, nothing, nothing, 64, 512, bind(), waiting)


def peaks(view: GroupView, decision: Decision) -> tuple[int, int]:
    """The largest batch and the largest KV load."""
    batches, loads = [0] * len(view.nodes), [0] * len(view.nodes)
    for _, placement in decision.admitted:
        batches[placement.moe] += 1
        for member, tokens in zip(placement.members, placement.split, strict=True):
            loads[member] += tokens
    return max(batches), max(loads)


@pytest.mark.parametrize("name", ["dual-balanced", "least-batch", "segment"])
@pytest.mark.parametrize("num_long", [4, 20])
def test_peaks_are_near_those_of_one_scheduler(name: str, num_long: int) -> None:
    """All are admitted both ways. Over eight random cohorts the largest batch is at most two requests above that of
    one scheduler, the largest KV load at most 1.5 times it, 1.1 times on average (least-batch, blind to KV: 1.9 and
    1.3)."""
    policy, factors = make_policy(name), []
    for seed in range(8):
        view = cohort(seed, num_long)
        central, parted = decide(view, policy, 0.0), decide_by_groups(view, policy, 0.0, hierarchy=PAIRS)
        assert len(central.admitted) == len(parted.admitted) == 400
        (batch, load), (parted_batch, parted_load) = peaks(view, central), peaks(view, parted)
        assert parted_batch <= batch + 2
        factors.append(parted_load / load)
    most, mean = (1.9, 1.3) if name == "least-batch" else (1.5, 1.1)
    assert max(factors) <= most and np.mean(factors) <= mean
