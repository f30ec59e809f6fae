"""Sharing a prefill step's budget: closed-form properties and cases by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.sched.chunks import plan_chunks


@pytest.mark.parametrize(
    ("remaining", "budget", "expected"),
    [
        ([], 8, []),
        ([3], 8, [3]),
        ([100], 8, [8]),
        ([100, 100], 8, [4, 4]),
        ([100, 3, 1], 8, [4, 3, 1]),
        ([100, 50, 2], 8, [4, 2, 2]),
        ([1, 100], 8, [1, 7]),
        ([100, 1], 1, [1, 0]),
    ],
)
def test_by_hand(remaining: list[int], budget: int, expected: list[int]) -> None:
    assert plan_chunks(remaining, budget) == expected


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=20), st.integers(1, 4096))
def test_budget_is_used_up_and_the_oldest_gets_half(remaining: list[int], budget: int) -> None:
    chunks = plan_chunks(remaining, budget)
    assert sum(chunks) == min(budget, sum(remaining))
    assert all(0 <= chunk <= left for chunk, left in zip(chunks, remaining, strict=True))
    assert chunks[0] >= min(remaining[0], (budget + 1) // 2)
