"""Which bytes go where, against moving tokens one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from narrows.kv.layout import MASK_LOCAL, KVLayout
from narrows.transfer.plan import aligned, clip, plan_layer

Runs = list[tuple[int, int]]


@st.composite
def two_run_lists(draw: st.DrawFn) -> tuple[Runs, Runs]:
    """Two cuts of one number of tokens into runs of distinct slots below 128, in any order."""
    total = draw(st.integers(1, 60))

    def cut() -> Runs:
        edges = sorted(draw(st.sets(st.integers(1, total - 1), max_size=6))) if total > 1 else []
        lengths = np.diff([0, *edges, total]).tolist()
        order = draw(st.permutations(range(len(lengths))))
        starts, at = {}, 0
        for i in order:
            starts[i] = at
            at += lengths[i] + draw(st.integers(0, 5))
        return [(starts[i], lengths[i]) for i in range(len(lengths))]

    return cut(), cut()


def slots(runs: Runs) -> list[int]:
    return [slot for first, count in runs for slot in range(first, first + count)]


@given(two_run_lists())
def test_blocks_move_token_i_to_token_i(lists: tuple[Runs, Runs]) -> None:
    source, target = lists
    pairs = [(at + i, to + i) for at, to, count in aligned(source, target) for i in range(count)]
    assert pairs == list(zip(slots(source), slots(target), strict=True))


@given(two_run_lists(), st.data())
def test_clip_is_slicing(lists: tuple[Runs, Runs], data: st.DataObject) -> None:
    runs = lists[0]
    start = data.draw(st.integers(0, len(slots(runs))))
    stop = data.draw(st.integers(start, len(slots(runs))))
    assert slots(clip(runs, start, stop)) == slots(runs)[start:stop]


@given(two_run_lists(), st.integers(0, 2))
def test_bytes_and_mask_land_where_the_layouts_say(lists: tuple[Runs, Runs], layer: int) -> None:
    source = KVLayout(3, 2, 4, 2, 4, 32)
    target = KVLayout(3, 2, 4, 2, 4, 48)
    push = plan_layer(source, target, layer, *lists)
    have = np.random.default_rng(0).integers(1, 255, (3, 128, 16), dtype=np.uint8)
    got = np.zeros((3, 192, 16), dtype=np.uint8)
    for at, to, length in zip(push.source_offsets, push.target_offsets, push.lengths, strict=True):
        got.reshape(-1)[to : to + length] = have.reshape(-1)[at : at + length]
    want = np.zeros_like(got)
    want[layer, slots(lists[1])] = have[layer, slots(lists[0])]
    assert np.array_equal(got, want)
    mask = np.zeros((3, 192, 2), dtype=np.int8)
    for offset, data in push.mask_puts:
        mask.reshape(-1)[offset : offset + len(data)] = np.frombuffer(data, dtype=np.int8)
    wanted = np.zeros_like(mask)
    wanted[layer, slots(lists[1])] = MASK_LOCAL
    assert np.array_equal(mask, wanted)
