"""The push plan as integers: every byte of it checked against a plain loop over tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.kv.layout import MASK_LOCAL, KVLayout
from narrows.transfer.plan import num_pushed, plan_copies, plan_mask, spread

LAYERS, HEADS, DIM, DTYPE_BYTES, PAGE = 4, 3, 8, 2, 4


def layout(num_pages: int) -> KVLayout:
    return KVLayout(LAYERS, HEADS, DIM, DTYPE_BYTES, PAGE, num_pages)


places = st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 39), st.integers(0, 59)), unique=True)


@given(places)
def test_every_row_goes_where_it_should_and_nothing_else_moves(rows: list[tuple[int, int, int]]) -> None:
    source, target = layout(10), layout(15)
    layers, here, there = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(3))
    copies = plan_copies(source.token_bytes, source.layer_bytes, target.layer_bytes, layers, here, there)
    moved = []
    for at, to, n in zip(copies.source_offsets, copies.target_offsets, copies.lengths, strict=True):
        moved += [(at + i, to + i) for i in range(n)]
    size = HEADS * DIM * DTYPE_BYTES
    want = [
        (layer * 40 * size + at * size + i, layer * 60 * size + to * size + i)
        for layer, at, to in rows
        for i in range(size)
    ]
    assert moved == want


def test_neighbours_on_both_sides_cross_as_one_piece() -> None:
    """Slots 4, 5, 6 to 8, 9, 10 are one piece; 7 goes elsewhere; the next layer begins another."""
    layers = np.array([0, 0, 0, 0, 1])
    copies = plan_copies(10, 1000, 2000, layers, np.array([4, 5, 6, 7, 8]), np.array([8, 9, 10, 3, 12]))
    assert copies.source_offsets.tolist() == [40, 70, 1080]
    assert copies.target_offsets.tolist() == [80, 30, 2120]
    assert copies.lengths.tolist() == [30, 10, 10]


@given(st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, 179)), unique=True).map(sorted))
def test_the_mask_says_local_of_exactly_the_entries_that_moved(rows: list[tuple[int, int]]) -> None:
    target = layout(15)  # 60 slots of three heads
    mask = np.zeros(target.mask_bytes, dtype=np.int8)
    layers, ids = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(2))
    for offset, data in plan_mask(180, layers, ids):
        assert not mask[offset : offset + len(data)].any(), "twice"
        mask[offset : offset + len(data)] = np.frombuffer(data, np.int8)
    states = mask.reshape(LAYERS, 180)
    assert {(layer, id) for layer, id in np.argwhere(states == MASK_LOCAL).tolist()} == set(rows)
    assert (states != 0).sum() == len(rows)


def test_long_mask_updates_are_split_so_that_each_fits_a_frame() -> None:
    puts = list(plan_mask(12_000, np.zeros(9000, dtype=np.int64), np.arange(1500, 10_500)))
    assert max(len(data) for _, data in puts) <= 1024
    assert b"".join(data for _, data in puts) == bytes([MASK_LOCAL]) * 9000
    assert [offset for offset, _ in puts] == list(range(1500, 1500 + 9000, len(puts[0][1])))


@pytest.mark.parametrize(
    ("prefill_s", "transfer_s", "blocks"),
    [
        (1.0, 6.5, 4568),  # 1024 * 29 / 6.5 = 4568.6
        (1.0, 100.0, 2048),  # the first two layers at least
        (1.0, 0.9, 30720),  # everything at most
        (0.0, 5.0, 2048),
        (2.0, 0.0, 30720),
    ],
)
def test_how_much_crosses_while_prefill_computes(prefill_s: float, transfer_s: float, blocks: int) -> None:
    """Equation 2 with L = 30 and M = 1024: Kr = M (L - 1) Tp / Tt between 2M and LM."""
    assert num_pushed(30, 1024, prefill_s, transfer_s) == blocks


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5))))
def test_ranges_are_spread_one_after_the_other(ranges: list[tuple[int, int]]) -> None:
    first = np.array([a for a, _ in ranges], dtype=np.int64)
    stop = np.array([a + n for a, n in ranges], dtype=np.int64)
    assert spread(first, stop).tolist() == [x for a, n in ranges for x in range(a, a + n)]


def test_whole_tokens_are_marked_head_by_head() -> None:
    """By hand: 10 slots of 3 heads a layer; slots 4, 5 and 8 of layer 1 are entries 30 + 12 to 17 and 24 to 26."""
    layers, slots = np.array([1, 1, 1]), np.array([4, 5, 8])
    assert list(plan_mask(30, layers, slots * 3, 3)) == [(42, bytes([MASK_LOCAL]) * 6), (54, bytes([MASK_LOCAL]) * 3)]
