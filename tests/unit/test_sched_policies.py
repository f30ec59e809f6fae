"""Policies by hand: each one's formula, ties and capacity; none ever returns what can not be allocated."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_groups import Group, groups, ints

from narrows.config import EngineConfig
from narrows.errors import ConfigError
from narrows.sched.base import GroupPolicy
from narrows.sched.decide import decide
from narrows.sched.dynamo_cost import DynamoCost
from narrows.sched.elastic_cp import ElasticCP
from narrows.sched.group import Placement, Waiting
from narrows.sched.least_batch import LeastBatch
from narrows.sched.least_cache import LeastCache
from narrows.sched.registry import POLICIES, form, make_policy
from narrows.sched.round_robin import RoundRobin
from narrows.sched.segment import Segment
from narrows.sched.sglang_tokens import SGLangTokens
from narrows.sched.state import GroupState
from narrows.sched.uniform_cp import UniformCP
from narrows.sched.vllm_score import VllmScore, scores

NAMES = [*POLICIES, "uniform-cp:2", "uniform-cp:4", "segment:10", "elastic-cp:0.5", "elastic-cp:0", "dynamo-cost:0"]


def state(
    *active: tuple[int, dict[int, int]],
    num_pages: list[int],
    nodes: list[int] | None = None,
    num_placed: int = 0,
    max_num_seqs: int = 8,
    arriving: list[int] | None = None,
) -> GroupState:
    """Pages of four tokens; requests as (MoE binding, tokens by member)."""
    group = Group(nodes or [0] * len(num_pages), num_pages, 4, max_num_seqs, active=list(active), arriving=arriving)
    made = GroupState(group.view())
    made.num_placed = num_placed
    return made


def chosen(policy: GroupPolicy, at: GroupState, tokens: int = 3, cached: tuple[int, ...] | None = None) -> int | None:
    """The instance that a policy of degree 1 puts a request on."""
    placement = policy.place(at, Waiting(tokens, 0.0, cached), 0.0)
    if placement is None:
        return None
    assert placement == Placement(placement.moe, (placement.moe,), (tokens,))
    return placement.moe


def burst(policy: GroupPolicy, at: GroupState, *lengths: int) -> list[Placement]:
    placements = []
    for tokens in lengths:
        placement = policy.place(at, Waiting(tokens, 0.0), 0.0)
        assert placement is not None
        at.commit(placement)
        placements.append(placement)
    return placements


# Degree 1


def test_round_robin_goes_round_and_passes_over_who_is_full() -> None:
    assert [p.moe for p in burst(RoundRobin(), state(num_pages=[9, 9, 9]), *[3] * 7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [p.moe for p in burst(RoundRobin(), state(num_pages=[9, 0, 9]), *[3] * 6)] == [0, 2, 2, 0, 2, 2]
    assert chosen(RoundRobin(), state(num_pages=[9, 9, 0], num_placed=5)) == 0, "behind the last comes the first"
    assert chosen(RoundRobin(), state(num_pages=[0, 0])) is None


def test_round_robin_does_not_lose_its_turn_when_requests_end() -> None:
    """One comes and one ends in each step: the group always holds the same number, and still all get their turn."""
    seen = []
    for step in range(8):
        group = Group([0] * 4, [9] * 4, 4, 8, active=[(0, {0: 3})], waiting=[Waiting(3, 0.0)])
        ((_, placement),) = decide(replace(group.view(), num_placed=step), RoundRobin(), 0.0).admitted
        seen.append(placement.moe)
    assert seen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_least_batch_counts_requests_then_free_pages_then_takes_the_lowest() -> None:
    assert chosen(LeastBatch(), state((0, {0: 3}), (0, {0: 3}), (1, {1: 30}), num_pages=[9, 9])) == 1
    assert chosen(LeastBatch(), state((0, {0: 9}), (1, {1: 5}), num_pages=[9, 9])) == 1, "7 pages free, not 6"
    assert chosen(LeastBatch(), state((0, {0: 5}), (1, {1: 5}), num_pages=[9, 9])) == 0
    assert chosen(LeastBatch(), state((0, {0: 3}), (0, {0: 3}), (1, {1: 30}), num_pages=[9, 9]), 8) == 0, (
        "one page left"
    )


def test_least_cache_counts_tokens_and_not_requests() -> None:
    many = [(0, {0: 2})] * 4
    assert chosen(LeastCache(), state(*many, (1, {1: 9}), num_pages=[9, 9])) == 0
    assert chosen(LeastCache(), state((0, {0: 5}), (0, {0: 3}), (1, {1: 8}), num_pages=[9, 9])) == 0, (
        "a tie: the lowest"
    )
    assert chosen(LeastCache(), state(*many, (1, {1: 9}), num_pages=[4, 9])) == 1, "no page is free on 0"
    assert chosen(LeastCache(), state(*many, (1, {1: 9}), num_pages=[9, 9], max_num_seqs=4)) == 1, "nor is a place"


def test_sglang_breaks_ties_of_tokens_by_requests() -> None:
    assert chosen(SGLangTokens(), state((0, {0: 5}), (0, {0: 3}), (1, {1: 8}), num_pages=[9, 9])) == 1
    assert chosen(SGLangTokens(), state((0, {0: 5}), (0, {0: 2}), (1, {1: 8}), num_pages=[9, 9])) == 0


def test_vllms_score_by_hand() -> None:
    """In-flight share, snapshot and penalty: max(8, 2 + 3); 2 + 3; 5 + 6 * 2 * 0.25; at full usage 3 a waiting one."""
    got = scores(ints(8, 0, 0, 0, 0), ints(2, 2, 2, 2, 0), ints(3, 3, 3, 3, 3), np.array([0.5, 0.4, 0.75, 1.0, 1.0]))
    assert got.tolist() == [8.0, 5.0, 8.0, 11.0, 3.0]


def test_vllm_prefers_a_larger_batch_to_waiting_on_a_full_pool() -> None:
    """Instance 0: two on their way, 8 of 10 pages used: 2 + 6 * 2 * 0.3 = 5.6. Instance 1: five running: 5."""
    full = state((0, {0: 32}), num_pages=[10, 20], arriving=[2, 0])
    full.batches = ints(2, 5)
    assert chosen(VllmScore(), full) == 1
    full.arriving = ints(0, 0)
    assert chosen(VllmScore(), full) == 0, "nothing waits there: 2"


def test_vllms_ties_rotate() -> None:
    assert [chosen(VllmScore(), state(num_pages=[9, 9, 9], num_placed=n)) for n in range(4)] == [0, 1, 2, 0]
    assert chosen(VllmScore(), state((1, {1: 3}), num_pages=[9, 9, 9], num_placed=1)) == 2, "1 is no tie any more"
    assert [p.moe for p in burst(VllmScore(), state(num_pages=[9, 9, 9], num_placed=2), *[3] * 3)] == [2, 0, 1]


def test_dynamos_cost_weighs_cached_prefixes_against_active_blocks() -> None:
    """40 tokens are 10 blocks. Instance 0: 10 to prefill + 10 active. 1: 5 + 14. 2: 2 + 18, as 8, 4 and 8 are used."""
    active = [(1, {1: 16}), (2, {2: 32})]
    at = state(*active, num_pages=[30, 30, 30])
    assert chosen(DynamoCost(), at, 40, (0, 20, 32)) == 1
    assert chosen(DynamoCost(2.0), at, 40, (0, 20, 32)) == 2, "30, 24 and 22"
    assert chosen(DynamoCost(0.0), at, 40, (0, 20, 32)) == 0, "10, 14 and 18"
    assert chosen(DynamoCost(), at, 40) == 0, "nobody has anything cached"
    assert chosen(DynamoCost(), state(num_pages=[30, 30]), 40, (4, 4)) == 0
    assert chosen(DynamoCost(), state(num_pages=[30, 9]), 40, (0, 40)) == 0, "a credit reserves no pages"


# Degrees above 1


def test_uniform_cp_splits_evenly_over_the_group_with_the_fewest_requests() -> None:
    """Groups 0-1 and 2-3. 0-1 has two requests, 2-3 one: there 2 has the smaller batch and takes the odd token."""
    at = state((0, {0: 3}), (1, {1: 3}), (3, {2: 9, 3: 9}), num_pages=[9] * 4)
    assert UniformCP(2).place(at, Waiting(7, 0.0), 0.0) == Placement(2, (2, 3), (4, 3))
    assert UniformCP(4).place(at, Waiting(7, 0.0), 0.0) == Placement(2, (0, 1, 2, 3), (2, 2, 2, 1))
    even = state((0, {0: 3}), (3, {2: 1, 3: 1}), num_pages=[9] * 4)
    assert UniformCP(2).place(even, Waiting(7, 0.0), 0.0) == Placement(2, (2, 3), (4, 3)), "less KV: 2 tokens, not 3"
    assert UniformCP(2).place(state(num_pages=[9] * 4), Waiting(2, 0.0), 0.0) == Placement(0, (0, 1), (1, 1))
    assert UniformCP(4).place(state((0, {0: 1}), num_pages=[9] * 4), Waiting(2, 0.0), 0.0) == Placement(
        1, (0, 1), (1, 1)
    )


def test_uniform_cp_stays_in_a_node_and_takes_the_next_group_where_one_is_full() -> None:
    nodes = [0, 0, 0, 1, 1]
    at = state(num_pages=[9, 9, 1, 9, 9], nodes=nodes)
    placements = burst(UniformCP(2), at, 4, 8, 8)
    assert placements == [Placement(0, (0, 1), (2, 2)), Placement(3, (3, 4), (4, 4)), Placement(1, (0, 1), (4, 4))], (
        "instance 2, a group of its own, holds 4 only"
    )
    assert UniformCP(2).place(state(num_pages=[1, 9]), Waiting(10, 0.0), 0.0) is None, "the half does not fit on 0"


def test_a_segment_more_is_a_member_more() -> None:
    """Segments of 8 tokens: 8 are of degree 1, 9 of degree 2, 17 of degree 3; a node has four."""
    for tokens, degree in [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (32, 4), (80, 4)]:
        placement = Segment(8).place(state(num_pages=[9] * 4), Waiting(tokens, 0.0), 0.0)
        assert placement is not None and len(placement.members) == degree


def test_segments_are_water_filled_by_pages() -> None:
    """Used pages 0, 3 and 1. Degree 2 takes instance 0 (no requests) and 2 (less KV than 1): 5 pages make 3 and 3, so 3
    on 0 and 2 on 2. 18 tokens lack 2 of 5 pages, at the MoE binding."""
    at = state((1, {1: 12}), (2, {2: 4}), num_pages=[9] * 3)
    assert Segment(9).place(at, Waiting(18, 0.0), 0.0) == Placement(0, (0, 2), (10, 8))


def test_a_segment_grows_beyond_its_degree_where_pools_are_small_and_else_goes_to_the_next_node() -> None:
    assert Segment(100).place(state(num_pages=[2, 2]), Waiting(16, 0.0), 0.0) == Placement(0, (0, 1), (8, 8))
    at = state(num_pages=[2, 2, 9], nodes=[0, 0, 1])
    assert Segment(100).place(at, Waiting(20, 0.0), 0.0) == Placement(2, (2,), (20,))
    assert Segment(100).place(at, Waiting(40, 0.0), 0.0) is None


def test_an_elastic_group_grows_with_its_load_and_not_with_the_length() -> None:
    """Pools of 4 pages, mark 0.5: two requests of a page fit each instance, then pairs are no better (4 of 8 used), nor
    is the node below the mark, which may be filled: its least loaded, then 1."""
    at = state(num_pages=[4] * 4)
    placements = burst(ElasticCP(0.5), at, *[4] * 8, 16)
    assert [p.members for p in placements[:8]] == [(0,), (1,), (2,), (3,)] * 2
    assert placements[8] == Placement(0, (0, 1, 2, 3), (4, 4, 4, 4))
    long = ElasticCP(0.5).place(state(num_pages=[4] * 4), Waiting(16, 0.0), 0.0)
    assert long == Placement(0, (0, 1), (8, 8)), "4 of 4 pages are too many, 4 of 8 are not"


def test_the_least_used_elastic_group_of_its_size_is_taken() -> None:
    """Two pages more: each instance alone is beyond the half, 0-1 has 5 of 8 then, 2-3 has 3 of 6."""
    at = state((0, {0: 4}), (1, {1: 8}), (3, {3: 4}), num_pages=[4, 4, 2, 4])
    assert ElasticCP(0.5).place(at, Waiting(8, 0.0), 0.0) == Placement(2, (2, 3), (6, 2))
    assert ElasticCP(0.5).place(state(num_pages=[1, 1]), Waiting(9, 0.0), 0.0) is None


# All


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(group=groups(), turn=st.integers(0, 9), now=st.integers(0, 20))
def test_what_a_policy_returns_can_be_allocated(name: str, group: Group, turn: int, now: int) -> None:
    """`execute` asserts tokens, pages, batches and nodes. Placing changes nothing and is repeatable."""
    policy = make_policy(name)
    at = GroupState(group.view())
    at.num_placed = turn
    for request in group.waiting:
        before = (at.free_pages.tolist(), at.kv_tokens.tolist(), at.batches.tolist())
        placement = policy.place(at, request, 0.0)
        assert placement == make_policy(name).place(at, request, 0.0)
        assert (at.free_pages.tolist(), at.kv_tokens.tolist(), at.batches.tolist()) == before
        if placement is not None:
            assert at.can_allocate(placement)
            assert len(placement.members) == 1 or not POLICIES[name.partition(":")[0]].local
            at.commit(placement)
    decision = decide(group.view(), policy, float(now))
    group.execute(decision)


@pytest.mark.parametrize("name", [name for name in POLICIES if POLICIES[name].local])
@settings(max_examples=40, deadline=None)
@given(group=groups(max_waiting=1))
def test_degree_one_waits_only_when_no_instance_has_room(name: str, group: Group) -> None:
    view = group.view()
    for request in group.waiting:
        room = [
            free * group.page_size >= request.num_tokens and batch < group.max_num_seqs
            for free, batch in zip((view.num_pages - view.used_pages).tolist(), group.batches(), strict=True)
        ]
        assert (make_policy(name).place(GroupState(view), request, 0.0) is not None) == any(room)


# Names


@pytest.mark.parametrize("name", POLICIES)
def test_a_name_makes_a_policy_that_says_how_it_may_be_made_again(name: str) -> None:
    policy = make_policy(name)
    assert policy.name.partition(":")[0] == name
    assert make_policy(policy.name).name == policy.name


def test_parameters_arrive() -> None:
    assert vars(make_policy("uniform-cp:4")) == {"name": "uniform-cp:4", "degree": 4}
    assert vars(make_policy("segment:1000")) == {"name": "segment:1000", "segment": 1000}
    assert vars(make_policy("elastic-cp:0.9")) == {"name": "elastic-cp:0.9", "mark": 0.9}
    assert vars(make_policy("dynamo-cost:2.5")) == {"name": "dynamo-cost:2.5", "weight": 2.5}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("least-bath", "policy: 'least-bath' is not known; the nearest is 'least-batch'"),
        ("unifrm-cp:4", "policy: 'unifrm-cp:4' is not known; the nearest is 'uniform-cp'"),
        ("", "policy: '' is not known"),
        ("uniform-cp:1", "policy: 'uniform-cp:1': '1' is no DEGREE, which is a whole number of at least 2"),
        ("uniform-cp:4.5", "policy: 'uniform-cp:4.5': '4.5' is no DEGREE"),
        ("uniform-cp:", "policy: 'uniform-cp:': '' is no DEGREE"),
        ("segment:0", "policy: 'segment:0': '0' is no TOKENS, which is a whole number of at least 1"),
        ("elastic-cp:1.5", "policy: 'elastic-cp:1.5': '1.5' is no MARK, which is a number of at least 0, at most 1"),
        ("dynamo-cost:nan", "policy: 'dynamo-cost:nan': 'nan' is no WEIGHT"),
        ("dynamo-cost:inf", "policy: 'dynamo-cost:inf': 'inf' is no WEIGHT"),
        ("round-robin:3", "policy: 'round-robin:3': 'round-robin' takes no parameter, leave out ':3'"),
    ],
)
def test_a_policy_that_can_not_be_made_names_what_can(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_policy(text)
    assert str(error.value).startswith(wrong)
    assert all(form(name) in str(error.value) for name in POLICIES)


def test_the_engine_takes_those_of_degree_one_and_says_which() -> None:
    local = [name for name, known in POLICIES.items() if known.local]
    assert local == ["round-robin", "least-batch", "least-cache", "vllm", "sglang-tokens", "dynamo-cost"]
    for name in local:
        assert EngineConfig(policy=name).policy == name
    for name in set(POLICIES) - set(local):
        with pytest.raises(
            ConfigError, match=f"policy: '{name}' spreads .* can not attend over yet; use one of"
        ) as error:
            EngineConfig(policy=name)
        assert all(form(usable) in str(error.value) for usable in local)
    with pytest.raises(ConfigError, match="policy: 'least' is not known"):
        EngineConfig(policy="least")
    help_text = next(spec for spec in EngineConfig.__dataclass_fields__.values() if spec.name == "policy").metadata[
        "help"
    ]
    assert all(name in help_text for name in local)
