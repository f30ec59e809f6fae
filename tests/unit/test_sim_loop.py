"""The event loop: order of times, ties, cancelling."""

import math

from hypothesis import given
from hypothesis import strategies as st

from narrows.sim.loop import Loop


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.integers(0, 2)), max_size=30))
def test_runs_by_time_then_rank_then_the_order_of_asking(asked: list[tuple[float, int]]) -> None:
    loop, seen = Loop(), []
    for i, (time_s, rank) in enumerate(asked):
        loop.at(time_s, lambda i=i: seen.append((loop.now_s, i)), rank)
    loop.run()
    expected = sorted(range(len(asked)), key=lambda i: (*asked[i], i))
    assert seen == [(asked[i][0], i) for i in expected]
    assert loop.num_run == len(asked)


def test_actions_may_ask_for_more() -> None:
    loop, seen = Loop(), []

    def tick() -> None:
        seen.append(loop.now_s)
        if loop.now_s < 3:
            loop.after(1.0, tick)

    loop.at(0.0, tick)
    loop.run(until_s=2.0)
    assert seen == [0.0, 1.0, 2.0]
    assert loop.now_s == 2.0
    assert loop.next_s() == 3.0
    loop.run()
    assert seen == [0.0, 1.0, 2.0, 3.0]
    assert loop.next_s() == math.inf
    assert not loop.step()


def test_cancelled_timers_do_nothing() -> None:
    loop, seen = Loop(), []
    loop.at(1.0, lambda: seen.append(1))
    loop.at(0.5, lambda: seen.append(0)).cancelled = True
    assert loop.next_s() == 1.0
    loop.run()
    assert seen == [1]
    assert loop.num_run == 1


def test_time_goes_on_to_where_it_is_asked_to_end() -> None:
    loop = Loop()
    loop.run(until_s=7.0)
    assert loop.now_s == 7.0
