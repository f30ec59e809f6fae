"""Prefill time: the fit against known coefficients and the conditions of optimality, the correction by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.errors import ConfigError
from narrows.profile.importance import Group, ImportanceProfile
from narrows.profile.timing import VERSION, Timing, Work, non_negative_least_squares, transfer_s

PLAIN = Timing("m", "s", VERSION, 0.5, 0.01, 0.0001)


@given(st.integers(1, 300), st.integers(0, 300))
def test_a_token_attends_to_all_up_to_itself(uncached: int, cached: int) -> None:
    context = cached + uncached
    assert Work(uncached, context).attended == sum(p + 1 for p in range(cached, context))


def test_tp_by_hand() -> None:
    # 2 tokens after 3 cached ones attend to 4 and 5 positions; 1 alone to itself.
    batch = [Work(2, 5), Work(1, 1)]
    assert PLAIN.prefill_s(batch) == pytest.approx(0.5 + 3 * 0.01 + 10 * 0.0001)
    assert transfer_s(10**9, 125e6) == 8.0
    assert transfer_s(0, 125e6) == 0.0 and transfer_s(1, 0.0) == math.inf


def test_the_fit_finds_the_coefficients_behind_exact_times() -> None:
    batches = [[Work(n, n)] for n in (16, 64, 300, 2000)] + [[Work(16, 2000)], [Work(50, 700)] * 3]
    got = Timing.fit([(b, PLAIN.prefill_s(b)) for b in batches], model="m", setup="s")
    assert (got.step_s, got.token_s, got.attended_s) == pytest.approx((0.5, 0.01, 0.0001), rel=1e-6)
    assert got.prefill_s([Work(100, 8000)]) == pytest.approx(PLAIN.prefill_s([Work(100, 8000)]))


@given(st.integers(0, 10**6))
def test_least_squares_meets_the_conditions_of_a_minimum(seed: int) -> None:
    # Karush-Kuhn-Tucker: no negative unknown, no gradient that a step to x >= 0 could follow down.
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((7, 3)) * [1, 100, 1e4], rng.standard_normal(7)
    x = non_negative_least_squares(a, b)
    gradient = (a.T @ (a @ x - b)) / np.linalg.norm(a, axis=0)
    assert (x >= 0).all()
    assert (gradient >= -1e-9).all()
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-9


def test_observing_moves_towards_what_is_seen_and_changes_no_value_in_place() -> None:
    batch = [Work(100, 100)]
    base, seen = PLAIN.prefill_s(batch), PLAIN
    once = PLAIN.observe(batch, 2 * base)
    assert once.factor == pytest.approx(2**0.2)
    assert PLAIN.factor == 1.0
    for _ in range(40):
        seen = seen.observe(batch, 2 * base)
    assert seen.prefill_s([Work(7, 9)]) == pytest.approx(2 * PLAIN.prefill_s([Work(7, 9)]), rel=1e-3)
    # A stall counts as four times too slow, and no time at all is no observation.
    assert PLAIN.observe(batch, 1000 * base).factor == pytest.approx(4**0.2)
    assert PLAIN.observe(batch, 0.0) == PLAIN


def test_a_file_gives_back_what_was_saved_and_refuses_others(tmp_path: Path) -> None:
    path = tmp_path / "t"
    PLAIN.observe([Work(9, 9)], 1.0).save(path)
    assert Timing.load(path, model="m", setup="s") == PLAIN.observe([Work(9, 9)], 1.0)
    for wrong in ({"model": "x"}, {"setup": "x"}):
        with pytest.raises(ConfigError, match=r"another (model|setup).*narrows profile timing"):
            Timing.load(path, **({"model": "m", "setup": "s"} | wrong))
    ImportanceProfile("m", "s", 1, (Group.from_counts(np.ones((3, 4), int), 1),)).save(path)
    with pytest.raises(ConfigError, match="is a profile of importance, not of timing"):
        Timing.load(path, model="m", setup="s")
    PLAIN.save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ConfigError, match="damaged"):
        Timing.load(path, model="m", setup="s")
