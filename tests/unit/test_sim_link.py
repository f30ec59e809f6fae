"""The fluid link against closed forms: who crosses when, and that no byte is lost or sent twice."""

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.sim.link import Link, Priority, Transfer
from narrows.sim.loop import Loop

RATE = 1000.0  # bytes per second
BLOCK = 100
ASKED = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 2500), st.sampled_from(list(Priority))), min_size=1, max_size=12
)


def play(
    asked: list[tuple[float, float, Priority]], rate: float = RATE, latency_s: float = 0.0
) -> tuple[list[float], Link]:
    """When each of the (time, bytes, class) has arrived; and the link."""
    loop = Loop()
    link = Link(loop, rate, block_bytes=BLOCK, latency_s=latency_s)
    arrived = [math.nan] * len(asked)
    for i, (time_s, num_bytes, priority) in enumerate(asked):

        def done(i: int = i) -> None:
            assert math.isnan(arrived[i]), "arrived twice"
            arrived[i] = loop.now_s

        def send(num_bytes: float = num_bytes, priority: Priority = priority, done=done) -> None:
            link.send(num_bytes, priority, "kv", done)

        loop.at(time_s, send)
    loop.run()
    return arrived, link


@given(ASKED)
def test_one_class_is_a_queue(asked: list[tuple[int, int, Priority]]) -> None:
    """Lindley's recursion: each begins when it is there and the one before it is through."""
    asked = sorted((t / 10, n, Priority.PROACTIVE) for t, n, _ in asked)  # type: ignore[assignment]
    arrived, link = play(asked)
    free_s = 0.0
    for got, (time_s, num_bytes, _) in zip(arrived, asked, strict=True):
        free_s = max(free_s, time_s) + num_bytes / RATE
        assert got == pytest.approx(free_s)
    assert link.busy_s == pytest.approx(sum(n for _, n, _ in asked) / RATE)


@given(ASKED)
def test_the_link_is_never_idle_while_something_waits(asked: list[tuple[int, int, Priority]]) -> None:
    """Whatever the order of classes, the last arrival is that of one queue, and busy time is that of all bytes."""
    plays = sorted((t / 10, n, p) for t, n, p in asked)
    arrived, link = play(plays)
    ends = accumulate(plays, lambda free_s, ask: max(free_s, ask[0]) + ask[1] / RATE, initial=0.0)
    assert not any(map(math.isnan, arrived))
    assert max(arrived) == pytest.approx(max([*ends][1:]), abs=1e-6)
    assert link.busy_s == pytest.approx(sum(n for _, n, _ in plays) / RATE, abs=1e-6)


@given(ASKED)
def test_what_is_urgent_waits_for_a_block_at_most(asked: list[tuple[int, int, Priority]]) -> None:
    """The most urgent class as if it were alone, a block later for each time it finds the link taken."""
    plays = sorted((t / 10, n, p) for t, n, p in asked)
    arrived, _ = play(plays)
    urgent = [i for i, (_, _, p) in enumerate(plays) if p is Priority.ON_DEMAND]
    alone, _ = play([plays[i] for i in urgent])
    for i, alone_s in zip(urgent, alone, strict=True):
        assert alone_s - 1e-9 <= arrived[i] <= alone_s + len(urgent) * BLOCK / RATE + 1e-9


def test_preempted_at_the_edge_of_a_block() -> None:
    # 1,000 bytes from 0 s; at 0.25 s its third block is crossing, which ends at 0.3 s; then 200 urgent bytes.
    arrived, _ = play([(0.0, 1000, Priority.SPECULATIVE), (0.25, 200, Priority.ON_DEMAND)])
    assert arrived == pytest.approx([1.2, 0.5])


def test_the_last_block_is_not_split() -> None:
    # at 0.12 s the second, last block (50 bytes) of the first is crossing
    arrived, _ = play([(0.0, 150, Priority.PROACTIVE), (0.12, 100, Priority.ON_DEMAND)])
    assert arrived == pytest.approx([0.15, 0.25])


def test_a_preempted_transfer_keeps_its_place() -> None:
    arrived, _ = play(
        [
            (0.0, 300, Priority.PROACTIVE),
            (0.1, 300, Priority.PROACTIVE),
            (0.15, 100, Priority.ON_DEMAND),
        ]
    )
    assert arrived == pytest.approx([0.4, 0.7, 0.3])


def test_latency_delays_the_news_and_not_the_link() -> None:
    arrived, _ = play([(0.0, 100, Priority.PROACTIVE), (0.0, 100, Priority.PROACTIVE)], latency_s=1.0)
    assert arrived == pytest.approx([1.1, 1.2])


def test_an_unlimited_link_takes_no_time() -> None:
    arrived, link = play([(0.5, 1000, Priority.PROACTIVE), (0.5, 0, Priority.ON_DEMAND)], rate=math.inf)
    assert arrived == [0.5, 0.5]
    assert link.busy_s == 0.0


def test_cancelled_stops_at_the_edge_and_makes_room() -> None:
    loop, ended = Loop(), []
    crossed: list[tuple[str, float, float]] = []

    def observe(transfer: Transfer, now_s: float) -> None:
        crossed.append((transfer.path, transfer.sent, now_s))

    link = Link(loop, RATE, block_bytes=BLOCK, observe=observe)
    first = link.send(1000, Priority.PROACTIVE, "first", lambda: ended.append("first"))
    link.send(100, Priority.PROACTIVE, "second", lambda: ended.append("second"))
    third = link.send(100, Priority.PROACTIVE, "third", lambda: ended.append("third"))
    loop.at(0.25, lambda: ended.append(link.cancel(first)))
    loop.at(0.25, lambda: ended.append(link.cancel(third)))
    assert link.waiting_bytes == 1200
    loop.run()
    assert ended == [300.0, 0.0, "second"]
    assert crossed == [("first", 300.0, pytest.approx(0.3)), ("second", 100, pytest.approx(0.4))]
    assert link.waiting_bytes == 0


def test_what_has_crossed_is_known_in_between() -> None:
    loop = Loop()
    link = Link(loop, RATE, block_bytes=BLOCK)
    transfer = link.send(1000, Priority.PROACTIVE, "kv", lambda: None)
    seen: list[float] = []
    for time_s in (0.0, 0.333, 0.999):
        loop.at(time_s, lambda: seen.append(link.sent(transfer)))
    loop.run()
    assert seen == pytest.approx([0.0, 333.0, 999.0])
    assert link.sent(transfer) == 1000
