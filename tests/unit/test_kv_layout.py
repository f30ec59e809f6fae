"""Layout against numpy's own strides; block tables against position arithmetic."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.core.ids import PageId
from narrows.errors import ConfigError
from narrows.kv.layout import KVLayout, pages_for
from narrows.kv.table import BlockTable

SMOLLM2 = {"num_layers": 30, "num_kv_heads": 3, "entry_dim": 128, "dtype_bytes": 2, "page_size": 16, "num_pages": 10}


def test_offsets_are_those_of_the_array() -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=2, entry_dim=4, dtype_bytes=2, page_size=4, num_pages=5)
    pool = np.zeros((3, 20, 2, 4), dtype=np.float16)
    mask = np.zeros((3, 20, 2), dtype=np.int8)
    assert layout.total_bytes == pool.nbytes
    assert layout.layer_bytes == pool.strides[0]
    assert layout.token_bytes == pool.strides[1]
    assert layout.entry_bytes == pool.strides[2]
    assert layout.offset(2, 7) == 2 * pool.strides[0] + 7 * pool.strides[1]
    assert layout.mask_bytes == mask.nbytes
    assert layout.mask_layer_bytes == mask.strides[0]
    assert layout.mask_offset(1, 3, 1) == mask.strides[0] + 3 * mask.strides[1] + 1


def test_sizes_of_the_bundled_model() -> None:
    layout = KVLayout(**SMOLLM2)
    assert layout.page_bytes == 16 * 30 * 3 * 128 * 2 == 368_640
    assert layout.num_slots == 160
    assert layout.total_bytes == 10 * layout.page_bytes


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("page_size", 48, "32 or 64"),
        ("page_size", 0, "at least 1"),
        ("num_pages", 0, "at least 1"),
        ("entry_dim", -2, ""),
    ],
)
def test_an_unusable_field_is_named(name: str, value: int, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: {value} .*{says}"):
        KVLayout(**SMOLLM2 | {name: value})


def test_pages_for() -> None:
    assert [pages_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@given(pages=st.lists(st.integers(0, 9), unique=True), shift=st.integers(0, 4), data=st.data())
def test_slots_and_runs_follow_the_pages(pages: list[int], shift: int, data: st.DataObject) -> None:
    size = 1 << shift
    table = BlockTable(size, map(PageId, pages), num_tokens=len(pages) * size)
    start = data.draw(st.integers(0, table.capacity))
    stop = data.draw(st.integers(start, table.capacity))
    expected = [pages[p // size] * size + p % size for p in range(start, stop)]
    slots = table.slots(start, stop)
    assert slots.dtype == np.int32
    assert slots.tolist() == expected
    runs = table.runs(start, stop)
    assert [slot for first, count in runs for slot in range(first, first + count)] == expected
    breaks = sum(b != a + 1 for a, b in pairwise(expected))
    assert len(runs) == (breaks + 1 if expected else 0), "adjacent runs are merged"


def test_a_table_only_grows_and_stays_within_its_pages() -> None:
    table = BlockTable(4, [PageId(3)], num_tokens=2)
    table.grow(4)
    with pytest.raises(AssertionError):
        table.grow(3)
    with pytest.raises(AssertionError):
        table.grow(5)
    table.grow(5, [PageId(1)])
    assert table.slots(2, 5).tolist() == [14, 15, 4]
