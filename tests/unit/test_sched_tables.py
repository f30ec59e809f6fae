"""Routing tables against the bindings they are lowered from."""

import numpy as np
from hypothesis import given, settings
from sched_groups import Group, groups, ints

from narrows.sched.decide import decide
from narrows.sched.degrees import Bucket
from narrows.sched.dual_balanced import DualBalanced
from narrows.sched.group import Decision
from narrows.sched.routing_tables import lower

POLICY = DualBalanced(Bucket((8, 16), (1, 2, 4)))
A, B, C, D, E = range(5)


def test_the_example_of_the_paper() -> None:
    """NanoCP, section 5.1: five requests on four instances; C and E have instance 2 as MoE binding (M = 2), and A, C
    and E include it in their KV bindings (N = 3)."""
    group = Group([0] * 4, [99] * 4, 16, 8)
    group.active = [(0, {0: 30, 2: 30}), (1, {1: 9}), (2, {1: 40, 2: 40, 3: 40}), (3, {3: 5}), (2, {2: 7})]
    tables = lower(group.view(), Decision(ints(0, 1, 2, 3, 2)))
    two = tables.of(2)
    assert two.domain.tolist() == [0, 1, 2, 3]
    assert two.local.tolist() == [C, E]
    assert two.attended.tolist() == [A, C, E]
    assert two.q_route.astype(int).tolist() == [[0, 0], [1, 0], [1, 1], [1, 0]]
    assert two.res_route.astype(int).tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]]
    one = tables.of(1)
    assert one.local.tolist() == [B] and one.attended.tolist() == [B, C]
    assert one.res_route.astype(int).tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]
    three = tables.of(3)
    assert three.local.tolist() == [D] and three.attended.tolist() == [C, D]


@settings(max_examples=200, deadline=None)
@given(groups())
def test_tables_say_what_the_bindings_say(group: Group) -> None:
    """After the step the group has the bindings; every query that leaves arrives, every result finds its way back."""
    view = group.view()
    decision = decide(view, POLICY, 20.0)
    numbers = group.execute(decision)
    tables = lower(view, decision)
    sent, attended, returned = set(), set(), set()
    for instance in range(len(group.nodes)):
        own = tables.of(instance)
        assert own.domain.tolist() == [
            i for i, node in enumerate(group.nodes) if group.cross_nodes or node == group.nodes[instance]
        ]
        assert own.q_route.shape == (len(own.domain), len(own.local))
        assert own.res_route.shape == (len(own.domain), len(own.attended))
        assert sorted(own.local.tolist()) == own.local.tolist()
        assert sorted(own.attended.tolist()) == own.attended.tolist()
        assert own.q_route.dtype == own.res_route.dtype == np.bool_
        assert (own.res_route.sum(axis=0) == 1).all(), "one MoE binding"
        rows, columns = np.nonzero(own.q_route)
        sent |= {(int(own.local[m]), instance, int(own.domain[d])) for d, m in zip(rows, columns, strict=True)}
        rows, columns = np.nonzero(own.res_route)
        returned |= {(int(own.attended[n]), int(own.domain[d]), instance) for d, n in zip(rows, columns, strict=True)}
        attended |= {(int(request), instance) for request in own.attended}
    expected = {
        (number, moe, member) for number, (moe, shards) in zip(numbers, group.active, strict=True) for member in shards
    }
    assert sent == returned == expected
    assert attended == {(request, member) for request, _, member in expected}
