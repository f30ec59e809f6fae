"""The lock-step decode group: hand-calculated steps, and that steps made at once are those decided one by one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId
from narrows.metrics.definitions import check_lifetime
from narrows.sched.group import Decision, GroupView
from narrows.sched.registry import make_policy
from narrows.sim.cost import Null, StepLoad, overlapped_s
from narrows.sim.group import GroupOptions, GroupShape
from narrows.sim.hardware import H200
from narrows.sim.model_shapes import DEEPSEEK_V3, QWEN3_8B
from narrows.sim.roofline import Roofline
from narrows.sim.run import Listeners, Outcome, Setup, simulate
from narrows.sim.steps import load_of, time_steps
from narrows.sim.workload import Arrival

STEP_S = 7.0  # of the null cost: one layer of seven phases


def run(
    arrivals: Sequence[Arrival],
    shape: GroupShape,
    policy: str = "dual-balanced",
    cost: Any = None,
    options: GroupOptions | None = None,
    listeners: Listeners | None = None,
    **more: Any,
) -> Outcome:
    setup = Setup(
        tuple(arrivals), cost or Null(), make_policy(policy), shape, options=options or GroupOptions(), **more
    )
    return simulate(setup, listeners)


def times(outcome: Outcome, index: int) -> list[float]:
    return [e.time_s for e in outcome.lives[index].events() if e.kind in (EventKind.FIRST_TOKEN, EventKind.TOKEN)]


def test_a_token_a_step() -> None:
    outcome = run([Arrival(1.0, 10, 4)], GroupShape(1, 1, 8, 4, 4))
    assert times(outcome, 0) == [1.0, 8.0, 15.0, 22.0]
    kinds = [e.kind for e in outcome.lives[0].events()]
    assert kinds == [EventKind.ARRIVED, EventKind.FIRST_TOKEN, EventKind.DECODE_STARTED] + [EventKind.TOKEN] * 3 + [
        EventKind.FINISHED
    ]
    assert outcome.groups[0].series.num_steps == 3


def test_who_comes_in_the_midst_of_a_step_waits_for_its_end() -> None:
    # steps end at 7, 14, 21, ...; the second comes at 9
    outcome = run([Arrival(0.0, 10, 4), Arrival(9.0, 10, 3)], GroupShape(1, 1, 16, 4, 4))
    assert times(outcome, 0) == [0.0, 7.0, 14.0, 21.0]
    assert times(outcome, 1) == [9.0, 21.0, 28.0]


def test_who_comes_at_the_end_of_a_step_takes_part_in_the_next() -> None:
    outcome = run([Arrival(0.0, 10, 4), Arrival(7.0, 10, 2)], GroupShape(1, 1, 16, 4, 4))
    assert times(outcome, 1) == [7.0, 14.0]


def test_without_room_it_waits_for_an_end() -> None:
    # two pages of four tokens: each request takes both (5 tokens with the next one's)
    outcome = run([Arrival(0.0, 4, 3), Arrival(0.0, 4, 2)], GroupShape(1, 1, 2, 4, 4), "least-batch")
    assert times(outcome, 0) == [0.0, 7.0, 14.0]
    assert times(outcome, 1) == [0.0, 21.0]
    waited = run([Arrival(0.0, 4, 3), Arrival(0.0, 4, 2)], GroupShape(1, 1, 2, 4, 4), first_token_at_start=True)
    assert times(waited, 1) == [14.0, 21.0]


def test_an_answer_of_one_token_needs_no_decode() -> None:
    outcome = run([Arrival(2.0, 10, 1)], GroupShape(1, 1, 8, 4, 4))
    assert times(outcome, 0) == [2.0]
    assert outcome.groups[0].series.num_steps == 0


def test_who_outgrows_its_instance_gets_another_one() -> None:
    # 2 instances of 2 pages of 4 tokens; 7 tokens fill one, the answer's go on to the other
    seen: list[Decision] = []
    listeners = Listeners(decided=lambda view, decision, now_s: seen.append(decision))
    outcome = run([Arrival(0.0, 7, 6)], GroupShape(2, 2, 2, 4, 4), listeners=listeners)
    assert times(outcome, 0) == [STEP_S * i for i in range(6)]
    assert [d.grown for d in seen if d.grown] == [((0, 1),)]
    homes = [e.instance for e in outcome.lives[0].events() if e.kind is EventKind.TOKEN]
    # the first token's KV takes the eighth slot; behind it tokens are made at the other instance
    assert homes == ["decode-0"] + ["decode-1"] * 4


def test_who_finds_no_room_is_prefilled_again() -> None:
    # both fit at first (2 pages each of 4), then both want a third page
    outcome = run([Arrival(0.0, 6, 8), Arrival(0.0, 6, 8)], GroupShape(1, 1, 4, 4, 4), "least-batch")
    events = outcome.events()
    check_lifetime(events)
    preempted = [e for e in events if e.kind is EventKind.PREEMPTED]
    assert preempted
    for i in range(2):
        assert len(times(outcome, i)) == 8
    assert outcome.groups[0].caches[0].pages.num_used == 0


def test_figure_9_of_nanocp() -> None:
    """Five requests over four instances: C and E have instance 2 as MoE binding (M = 2), A, C and E its KV (N = 3)."""
    nodes = np.zeros(4, np.int64)
    moe = np.array([1, 0, 2, 3, 2])  # A..E
    rows = np.array([0, 0, 1, 2, 3, 4, 4])
    members = np.array([1, 2, 0, 2, 3, 2, 3])
    load = load_of(nodes, moe, rows, members, np.array([10, 20, 30, 40, 50, 60, 70]))
    assert load.moe_batch.tolist() == [1, 1, 2, 1]
    assert load.attention_batch.tolist() == [1, 1, 3, 2]
    assert load.kv_tokens.tolist() == [30, 10, 120, 120]
    assert load.sent.tolist() == [0, 1, 1, 0]
    assert load.received.tolist() == [0, 0, 1, 1]
    assert load.sent_across is None
    apart = load_of(np.array([0, 0, 1, 1]), moe, rows, members, np.ones(7, np.int64))
    assert apart.sent.tolist() == [0, 0, 1, 0]
    assert apart.sent_across is not None and apart.sent_across.tolist() == [0, 1, 0, 0]
    assert apart.received_across is not None and apart.received_across.tolist() == [0, 0, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 10**6)), min_size=8, max_size=8), st.integers(1, 20))
def test_steps_at_once_take_what_the_cost_says_of_each(loads: list[tuple[int, int]], steps: int) -> None:
    batch = np.array([b for b, _ in loads], np.int64)
    kv = np.array([k if b else 0 for b, k in loads], np.int64)
    none = np.zeros(8, np.int64)
    load = StepLoad(batch, batch, kv, none, none)
    tokens = kv + np.arange(steps)[:, None] * batch
    for model in (DEEPSEEK_V3, QWEN3_8B):
        cost = Roofline(H200, model)
        each = [cost.decode(replace(load, kv_tokens=tokens[i])).total_s for i in range(steps)]
        assert time_steps(cost, [(load, tokens)]).total_s == pytest.approx(each, rel=1e-12)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 10**6)), min_size=16, max_size=16))
def test_overlapped_steps_take_what_the_cost_says_of_two_halves(loads: list[tuple[int, int]]) -> None:
    none = np.zeros(8, np.int64)
    halves = []
    for part in (loads[:8], loads[8:]):
        batch = np.array([b for b, _ in part], np.int64)
        halves.append(StepLoad(batch, batch, np.array([k if b else 0 for b, k in part], np.int64), none, none))
    for model in (DEEPSEEK_V3, QWEN3_8B):
        cost = Roofline(H200, model)
        took = time_steps(cost, [(half, half.kv_tokens[None]) for half in halves]).total_s
        assert took == pytest.approx([overlapped_s(*map(cost.decode, halves))], rel=1e-12)


# ---- steps at once against steps one by one

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 60), st.integers(1, 30)).map(
        lambda t: Arrival(t[0] / 1000, t[1], t[2])
    ),
    min_size=1,
    max_size=14,
).map(lambda arrivals: sorted(arrivals, key=lambda a: a.time_s))


@settings(deadline=None, max_examples=60)
@given(
    ARRIVALS,
    st.sampled_from(
        ["dual-balanced", "least-batch", "least-cache", "vllm", "uniform-cp:2", "segment:16", "round-robin"]
    ),
    st.booleans(),
    st.sampled_from([8, 24, 200]),
)
def test_reused_decisions_are_those_made_anew(
    arrivals: list[Arrival], policy: str, overlap: bool, num_pages: int
) -> None:
    shape = GroupShape(4, 2, max(num_pages, 24 if policy != "dual-balanced" else 12), 4, 6)
    cost = Roofline(H200, DEEPSEEK_V3)
    outcomes: list[Outcome] = []
    for fast in (True, False):
        options = GroupOptions(fast=fast, two_batch_overlap=overlap)
        outcomes.append(run(arrivals, shape, policy, cost, options))
    reused, plain = outcomes
    assert _told(reused) == _told(plain)
    series = [outcome.groups[0].series for outcome in outcomes]
    assert series[0].num_steps == series[1].num_steps
    for name in ("batch_cv", "kv_cv", "attention_s", "moe_s", "cp_s", "other_s"):
        assert series[0].mean(name) == pytest.approx(series[1].mean(name)), name
        assert series[0].peak(name) == pytest.approx(series[1].peak(name)), name
    assert reused.groups[0].num_decisions <= plain.groups[0].num_decisions
    check_lifetime(reused.events())


def _told(outcome: Outcome) -> list[Event]:
    return [event for life in outcome.lives for event in life.events()]


def test_one_decision_is_enough_for_a_request_alone() -> None:
    outcome = run([Arrival(0.0, 100, 1000)], GroupShape(4, 2, 500, 16, 6), cost=Roofline(H200, DEEPSEEK_V3))
    assert outcome.groups[0].series.num_steps == 999
    assert outcome.groups[0].num_decisions <= 3


@settings(deadline=None, max_examples=40)
@given(ARRIVALS, st.sampled_from(["dual-balanced", "least-batch", "uniform-cp:2"]))
def test_pages_and_tokens_are_conserved(arrivals: list[Arrival], policy: str) -> None:
    """At each decision an instance has just the pages of the shards that are there."""
    shape = GroupShape(4, 2, 24, 4, 6)

    def check(view: GroupView, decision: Decision, now_s: float) -> None:
        pages = np.bincount(view.active.members, -(-view.active.shards // view.page_size), 4)
        assert pages.tolist() == view.used_pages.tolist()
        assert np.bincount(view.active.members, view.active.shards, 4).tolist() == view.kv_tokens.tolist()
        assert (view.batches <= view.max_num_seqs).all()

    outcome = run(arrivals, shape, policy, Roofline(H200, DEEPSEEK_V3), listeners=Listeners(decided=check))
    assert all(cache.pages.num_used == 0 for cache in outcome.groups[0].caches)
    for life in outcome.lives:
        tokens = [e for e in life.events() if e.kind in (EventKind.FIRST_TOKEN, EventKind.TOKEN)]
        assert len(tokens) == life.arrival.num_output


def test_multi_step_execution_decides_every_so_many_steps() -> None:
    """While somebody waits, a decision is used for `reuse` steps; an arrival is looked at behind them."""
    arrivals = [Arrival(0.0, 4, 20), Arrival(0.0, 4, 20), Arrival(0.0, 4, 20)]
    shape = GroupShape(1, 1, 6 * 3, 4, 2)  # places for two
    every = run(arrivals, shape, "least-batch").groups[0]
    fourth = run(arrivals, shape, "least-batch", options=GroupOptions(reuse=4)).groups[0]
    assert every.series.num_steps == fourth.series.num_steps == 38
    assert every.num_decisions >= 20
    assert fourth.num_decisions <= 8


def test_names_are_told() -> None:
    assert run([Arrival(0.0, 4, 2)], GroupShape(2, 2, 8, 4, 2)).groups[0].names == (
        InstanceId("decode-0"),
        InstanceId("decode-1"),
    )
