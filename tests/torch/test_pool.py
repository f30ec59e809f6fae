"""Pool and mask as views of flat memory: what a peer writes at the layout's offsets is what the tensors show."""

import struct

import pytest
import torch

from narrows.kv.layout import MASK_ABSENT, MASK_LOCAL, MASK_REMOTE, KVLayout
from narrows.kv.mask import KVMask
from narrows.kv.pool import KVPool

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, entry_dim=4, dtype_bytes=4, page_size=4, num_pages=5)


def test_bytes_at_an_offset_are_that_entry() -> None:
    buffer = bytearray(LAYOUT.total_bytes)
    pool = KVPool(LAYOUT, torch.float32, memoryview(buffer))
    assert [layer.shape for layer in pool.layers] == [(20, 2, 4)] * 3
    for layer, slot, head, element in [(0, 0, 0, 0), (1, 7, 1, 2), (2, 19, 1, 3)]:
        at = LAYOUT.offset(layer, slot) + head * LAYOUT.entry_bytes + element * 4
        struct.pack_into("<f", buffer, at, 1.5 + at)
        assert pool.layers[layer][slot, head, element].item() == 1.5 + at
    pool.layers[2][3] = 8.0
    at = LAYOUT.offset(2, 3)
    assert struct.unpack_from("<8f", buffer, at) == (8.0,) * 8


def test_a_larger_buffer_and_bfloat16() -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, entry_dim=2, dtype_bytes=2, page_size=1, num_pages=3)
    buffer = bytearray(layout.total_bytes + 100)
    pool = KVPool(layout, torch.bfloat16, memoryview(buffer))
    pool.layers[0][2, 0, 1] = 1.0
    assert struct.unpack_from("<H", buffer, layout.offset(0, 2) + 2) == (0x3F80,)


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(AssertionError):
        KVPool(LAYOUT, torch.float32, memoryview(bytearray(LAYOUT.total_bytes - 1)))
    with pytest.raises(AssertionError):
        KVPool(LAYOUT, torch.float32, memoryview(bytes(LAYOUT.total_bytes)))
    with pytest.raises(AssertionError):
        KVPool(LAYOUT, torch.bfloat16, memoryview(bytearray(LAYOUT.total_bytes)))
    with pytest.raises(AssertionError):
        KVMask(LAYOUT, memoryview(bytes(LAYOUT.mask_bytes)))


def test_the_mask_is_complete_when_every_entry_of_every_layer_has_come() -> None:
    buffer = bytearray(LAYOUT.mask_bytes)
    mask = KVMask(LAYOUT, memoryview(buffer))
    runs = [(4, 3), (12, 2)]
    for layer in range(3):
        assert not mask.is_complete(runs)
        for first, count in runs:
            at = LAYOUT.mask_offset(layer, first)
            buffer[at : at + 2 * count] = bytes([MASK_LOCAL]) * (2 * count)
        assert mask.is_complete(runs, num_layers=layer + 1)
    assert mask.is_complete(runs)
    assert mask.is_complete([])
    assert not mask.is_complete([(4, 4)]), "slot 7 was never written"

    buffer[LAYOUT.mask_offset(1, 12, 1)] = MASK_REMOTE
    assert not mask.is_complete(runs)
    assert mask.states[1, 12].tolist() == [MASK_LOCAL, MASK_REMOTE]


def test_set_and_clear_touch_their_slots_only() -> None:
    mask = KVMask(LAYOUT, memoryview(bytearray(LAYOUT.mask_bytes)))
    mask.set([(2, 3)], MASK_LOCAL)
    assert mask.states.sum().item() == 3 * 3 * 2
    mask.set([(2, 1)], MASK_REMOTE, layer=1)
    assert mask.states[:, 2, 0].tolist() == [MASK_LOCAL, MASK_REMOTE, MASK_LOCAL]
    mask.clear([(2, 2)])
    assert mask.states[:, 2:4].eq(MASK_ABSENT).all()
    assert mask.states.sum().item() == 3 * 2
