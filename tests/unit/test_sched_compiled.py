"""The compiled loops against the plain ones, on any view."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sched_groups import Group, groups, pages

from narrows.sched import compiled
from narrows.sched.decide import AGING_S, COMPILED_FROM, admit, decide, decide_plainly
from narrows.sched.degrees import Bucket
from narrows.sched.dual_balanced import DualBalanced
from narrows.sched.group import Decision, GroupView, Waiting
from narrows.sched.routing_tables import RoutingTables, lower, lower_plainly
from narrows.sched.state import GroupState

POLICY = DualBalanced(Bucket((8, 16), (1, 2, 4)))


class Fixed(DualBalanced):
    rebalances = False


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    told: list[str] = []
    compiled.prepare(told.append)
    assert len(told) == 1 and "compile" in told[0]
    yield
    kernels = [value for value in vars(compiled).values() if hasattr(value, "signatures")]
    assert len(kernels) >= 5
    # One each, or none where a kernel is only called by others and these came out of the cache.
    assert all(len(kernel.signatures) <= 1 for kernel in kernels), "what was prepared served all of these tests"


def assert_same_tables(one: RoutingTables, other: RoutingTables) -> None:
    for name in RoutingTables.__slots__:
        a, b = getattr(one, name), getattr(other, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name


def assert_same(view: GroupView, policy: DualBalanced, now_s: float) -> Decision:
    plain = decide_plainly(view, policy, now_s, aging_s=3.0)
    fast = compiled.decide(view, policy, now_s, aging_s=3.0)
    assert fast == plain
    assert fast.moe.dtype == plain.moe.dtype
    assert all(type(number) is int for row in (*fast.grown, fast.stuck) for number in row)
    assert_same_tables(compiled.lower(view, fast), lower_plainly(view, plain))
    return fast


@settings(max_examples=500, deadline=None)
@given(groups(max_waiting=12), st.integers(0, 20), st.booleans(), st.booleans())
def test_the_same_decisions_and_tables(group: Group, now: int, moves: bool, arrive: bool) -> None:
    if arrive:
        group.arriving = [min(i % 2, group.max_num_seqs - n) for i, n in enumerate(group.batches())]
    assert_same(group.view(), POLICY if moves else Fixed(POLICY.bucket), float(now))


@settings(max_examples=200, deadline=None)
@given(groups(max_waiting=12))
def test_the_same_state_afterwards(group: Group) -> None:
    view = group.view()
    plain, fast = GroupState(view), GroupState(view)
    assert admit(plain, view.waiting, POLICY, 20.0, 3.0) == POLICY.admit(fast, view.waiting, 20.0, 3.0)
    for name, value in vars(plain).items():
        assert np.array_equal(getattr(fast, name), value), name


def test_a_view_is_not_written_to() -> None:
    view = crowd(2, 20, seed=0).view()
    kept = [view.used_pages.copy(), view.kv_tokens.copy(), view.active.moe.copy()]
    lower(view, decide(view, POLICY, 20.0))
    assert all(map(np.array_equal, kept, [view.used_pages, view.kv_tokens, view.active.moe]))


def crowd(num_nodes: int, batch: int, seed: int, pages_each: int = 400) -> Group:
    """Nodes of eight, filled so that pools are scarce, with a long line."""
    rng = np.random.default_rng(seed)
    nodes = [node for node in range(num_nodes) for _ in range(8)]
    group = Group(nodes, [pages_each] * len(nodes), 16, batch + 4)
    free = [pages_each] * len(nodes)
    for home in [i for i in range(len(nodes)) for _ in range(batch)]:
        count = int(rng.choice([1, 1, 1, 1, 2, 3, 8]))
        others = [i for i in range(home // 8 * 8, home // 8 * 8 + 8) if i != home]
        members = sorted([home, *rng.permutation(others)[: count - 1].tolist()])
        shards = {i: int(rng.integers(1, 250)) for i in members}
        shards = {i: min(tokens, free[i] * 16) for i, tokens in shards.items() if free[i]}
        if home in shards:
            group.active.append((home, shards))
            for i, tokens in shards.items():
                free[i] -= pages(tokens, 16)
    group.waiting = [Waiting(int(n), float(i)) for i, n in enumerate(rng.integers(1, 4000, 60))]
    return group


@pytest.mark.parametrize(("num_nodes", "batch"), [(1, 40), (4, 20), (3, 60)])
def test_large_groups_and_several_steps(num_nodes: int, batch: int) -> None:
    group = crowd(num_nodes, batch, seed=batch, pages_each=300)
    for step in range(3):
        view = group.view()
        assert view.active.num_requests + len(view.waiting) >= COMPILED_FROM or num_nodes == 1
        decision = assert_same(view, POLICY, 100.0 + step)
        assert decide(view, POLICY, 100.0, aging_s=AGING_S) == compiled.decide(view, POLICY, 100.0, aging_s=AGING_S)
        group.execute(decision)


def test_a_line_longer_than_a_chunk() -> None:
    group = Group([0, 0], [1500, 1500], 1, 4000, waiting=[Waiting(1 + i % 2, 0.0) for i in range(2500)])
    decision = assert_same(group.view(), DualBalanced(), 0.0)
    assert 1 < len(decision.admitted) < 2500


def test_a_line_stops_at_an_aged_request_in_an_earlier_chunk() -> None:
    waiting = [Waiting(10**6, 0.0), *[Waiting(1, 9.0)] * 1500]
    group = Group([0], [3000], 1, 4000, waiting=waiting)
    assert assert_same(group.view(), DualBalanced(), 10.0).admitted == ()
    assert len(assert_same(group.view(), DualBalanced(), 1.0).admitted) == 1500
