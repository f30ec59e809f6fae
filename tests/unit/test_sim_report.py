"""Figures over steps and values over time, by hand."""

import math

import numpy as np
import pytest

from narrows.sched.registry import make_policy
from narrows.sim.cost import Null
from narrows.sim.group import GroupOptions, GroupShape
from narrows.sim.report import grid_of, row_of, waiting
from narrows.sim.run import Outcome, Setup, simulate
from narrows.sim.workload import Arrival

STEP_S = 7.0  # of the null cost


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """Two instances with a place each; the third request waits for the first's end.

    time      0        7        14       21       28
    first     | token  | token  |
    second    | token  |        |
    third     waits    | token  | token  | token  |        its place is the second's
    """
    arrivals = (Arrival(0.0, 8, 3), Arrival(0.0, 20, 2), Arrival(0.0, 10, 4))
    shape = GroupShape(2, 2, 10, 4, 1)
    # Deciding before each step: KV of a sample is that of its step.
    return simulate(Setup(arrivals, Null(), make_policy("least-batch"), shape, options=GroupOptions(fast=False)))


def test_samples(outcome: Outcome) -> None:
    samples = outcome.groups[0].series.samples()
    assert samples.start_s.tolist() == [0.0, 7.0, 14.0, 21.0]
    assert samples.end_s.tolist() == [7.0, 14.0, 21.0, 28.0]
    assert samples.steps.tolist() == [1, 1, 1, 1]
    assert samples.queue.tolist() == [1, 0, 0, 0]
    assert samples.batch.tolist() == [[1, 1], [1, 1], [0, 1], [0, 1]]
    assert samples.kv_tokens.tolist() == [[9, 21], [10, 11], [0, 12], [0, 13]]


def test_figures(outcome: Outcome) -> None:
    row = row_of(outcome, "least-batch", slo_tpot_ms=7e3)
    # two steps with two requests, two with one on one of two instances, whose deviation is its mean
    assert row["batch_cv"] == pytest.approx((4 * 0.0 + 2 * 1.0) / 6)
    kv = 2 * 6 / 15 + 2 * 0.5 / 10.5 + 2 * 1.0
    assert row["kv_cv"] == pytest.approx(kv / 6)
    assert row["attention_us"] == row["attention_max_us"] == pytest.approx(1e6)
    assert row["moe_us"] == pytest.approx(2e6)
    assert row["cp_us"] == pytest.approx(2e6)  # of the null cost: each phase takes a second, used or not
    assert row["steps"] == 4
    assert row["step_ms"] == pytest.approx(7e3)
    assert row["max_batch"] == 1
    assert row["max_kv_tokens"] == 21
    assert row["max_queue"] == 1
    # TPOT 7 s, 7 s, and (28 - 0) / 3 s for who waited
    assert row["tpot_mean_ms"] == pytest.approx(1e3 * (7 + 7 + 28 / 3) / 3)
    assert row["slo_attainment"] == pytest.approx(2 / 3)


def test_over_time(outcome: Outcome) -> None:
    grid = grid_of(outcome, columns=8)
    assert grid.names == ("decode-0", "decode-1")
    assert grid.batch.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1] * 8]
    assert grid.kv_tokens[1].tolist() == [21, 21, 11, 11, 12, 12, 13, 13]
    assert [queue for _, queue in waiting(outcome)] == [1, 0, 0, 0]


def test_idle_times_are_empty() -> None:
    arrivals = (Arrival(0.0, 8, 2), Arrival(21.0, 8, 2))
    outcome = simulate(Setup(arrivals, Null(), make_policy("least-batch"), GroupShape(1, 1, 10, 4, 1)))
    assert grid_of(outcome, columns=4).batch.tolist() == [[1, 0, 0, 1]]


def test_nobody_decodes() -> None:
    outcome = simulate(Setup((Arrival(0.0, 8, 1),), Null(), make_policy("least-batch"), GroupShape(1, 1, 10, 4, 1)))
    row = row_of(outcome, "least-batch", 50.0)
    assert row["batch_cv"] is None
    assert row["slo_attainment"] is None
    assert row["ttft_mean_s"] == 0.0
    assert not math.isnan(row["simulated_s"])
    assert np.array_equal(grid_of(outcome, 3).batch, np.zeros((1, 3)))
