"""WaterFill against all splits there are, and the degree table."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.errors import ConfigError
from narrows.sched.degrees import MLA_BUCKET, Bucket
from narrows.sched.waterfill import waterfill


def all_splits(capacities: list[int], tokens: int) -> Iterator[tuple[int, ...]]:
    if not capacities:
        if tokens == 0:
            yield ()
        return
    for share in range(min(capacities[0], tokens) + 1):
        for rest in all_splits(capacities[1:], tokens - share):
            yield (share, *rest)


def heights(loads: list[int], split: tuple[int, ...]) -> list[int]:
    """The largest load first: what is compared, so that the second largest counts among equal peaks."""
    return sorted((load + share for load, share in zip(loads, split, strict=True)), reverse=True)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=4),
    st.integers(0, 14),
    st.none() | st.integers(0, 3),
)
def test_no_split_has_lower_loads(instances: list[tuple[int, int]], tokens: int, binding: int | None) -> None:
    loads, capacities = [load for load, _ in instances], [capacity for _, capacity in instances]
    if binding is not None:
        binding %= len(loads)
    possible = [split for split in all_splits(capacities, tokens) if binding is None or split[binding] > 0]
    split = waterfill(loads, capacities, tokens, binding)
    if split is None:
        assert not possible
    else:
        assert split in possible
        assert heights(loads, split) == min(heights(loads, other) for other in possible)
        assert max(heights(loads, split)) == min(max(heights(loads, other)) for other in possible)


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**9)), min_size=1, max_size=64), st.integers(0, 10**11)
)
def test_large_numbers_are_exact(instances: list[tuple[int, int]], tokens: int) -> None:
    """No floating point: sums are exact, and nobody below the peak but one has room left."""
    loads, capacities = [load for load, _ in instances], [capacity for _, capacity in instances]
    split = waterfill(loads, capacities, tokens)
    if tokens > sum(capacities):
        assert split is None
        return
    assert split is not None and sum(split) == tokens
    assert all(0 <= share <= capacity for share, capacity in zip(split, capacities, strict=True))
    peak = max((load + share for load, share in zip(loads, split, strict=True) if share), default=0)
    for load, capacity, share in zip(loads, capacities, split, strict=True):
        assert load + share >= peak - 1 or share == capacity, "the peak could go there"


@pytest.mark.parametrize(
    ("loads", "capacities", "tokens", "expected"),
    [
        ([0, 0], [9, 9], 7, (4, 3)),
        ([5, 0, 3], [9, 9, 9], 4, (0, 4, 0)),
        ([5, 0, 3], [9, 9, 9], 7, (0, 5, 2)),
        ([0, 0, 0], [1, 9, 9], 7, (1, 3, 3)),
        ([0, 0], [2, 2], 5, None),
        ([7], [0], 0, (0,)),
        ([], [], 0, ()),
        ([], [], 1, None),
    ],
)
def test_by_hand(loads: list[int], capacities: list[int], tokens: int, expected: tuple[int, ...] | None) -> None:
    assert waterfill(loads, capacities, tokens) == expected


def test_the_binding_keeps_a_slot_though_it_is_the_fullest() -> None:
    assert waterfill([50, 0], [10, 10], 6, binding=0) == (1, 5)
    assert waterfill([50, 0], [0, 10], 6, binding=0) is None


def test_bucket_by_hand() -> None:
    bucket = Bucket((100, 200), (1, 2, 8))
    assert [bucket(n) for n in (1, 100, 101, 200, 201, 10**9)] == [1, 1, 2, 2, 8, 8]
    assert Bucket()(10**9) == 1
    assert MLA_BUCKET(2048) == 1 and MLA_BUCKET(512 * 1024) == 8  # the short and long ones of NanoCP's section 6.2


@pytest.mark.parametrize(
    ("thresholds", "degrees", "field"),
    [
        ((100,), (1,), "bucket.degrees: 1 for 1 thresholds"),
        ((100, 100), (1, 2, 4), "bucket.thresholds"),
        ((0,), (1, 2), "bucket.thresholds"),
        ((200, 100), (1, 2, 4), "bucket.thresholds"),
        ((100,), (2, 1), "bucket.degrees"),
        ((100,), (0, 1), "bucket.degrees"),
    ],
)
def test_an_unusable_bucket_is_named(thresholds: tuple[int, ...], degrees: tuple[int, ...], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Bucket(thresholds, degrees)
