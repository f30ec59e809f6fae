"""Which bytes of a hand-over go where, as integers. Pure: no transport, no tensors, no clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.kv.layout import MASK_LOCAL, KVLayout

Runs = Sequence[tuple[int, int]]  # (first slot, number of slots), in token order
MASK_PUT_BYTES = 16 * 1024  # longer mask updates are split


@dataclass(frozen=True, slots=True)
class LayerPush:
    """Tokens of one layer on their way from pool to pool, then the mask updates that announce them.

    The three arrays are int64, one item a contiguous block of bytes; `mask_puts` are (offset in the mask, bytes).
    """

    source_offsets: npt.NDArray[np.int64]
    target_offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    mask_puts: tuple[tuple[int, bytes], ...]


def plan_layer(source: KVLayout, target: KVLayout, layer: int, source_runs: Runs, target_runs: Runs) -> LayerPush:
    """Move the tokens in `source_runs` to `target_runs`, which hold equally many, in one layer.

    The layouts differ in num_pages only. Each block is a run that is contiguous on both sides.
    """
    assert source.token_bytes == target.token_bytes and source.num_layers == target.num_layers
    blocks = list(aligned(source_runs, target_runs))
    return LayerPush(
        np.array([source.offset(layer, at) for at, _, _ in blocks], dtype=np.int64),
        np.array([target.offset(layer, to) for _, to, _ in blocks], dtype=np.int64),
        np.array([count * source.token_bytes for _, _, count in blocks], dtype=np.int64),
        tuple(_mask_puts(target, layer, target_runs)),
    )


def aligned(source_runs: Runs, target_runs: Runs) -> Iterator[tuple[int, int, int]]:
    """Cut two run lists of equal length at each other's edges: (source slot, target slot, number of slots)."""
    assert sum(n for _, n in source_runs) == sum(n for _, n in target_runs)
    targets = iter(target_runs)
    to, room = 0, 0
    for at, count in source_runs:
        while count:
            if not room:
                to, room = next(targets)
            step = min(count, room)
            if step:
                yield at, to, step
            at, to, count, room = at + step, to + step, count - step, room - step


def clip(runs: Runs, start: int, stop: int) -> list[tuple[int, int]]:
    """The part of a run list that holds its tokens start..stop-1."""
    clipped, before = [], 0
    for first, count in runs:
        low, high = max(start - before, 0), min(stop - before, count)
        if low < high:
            clipped.append((first + low, high - low))
        before += count
    return clipped


def _mask_puts(layout: KVLayout, layer: int, runs: Runs) -> Iterator[tuple[int, bytes]]:
    heads = layout.num_kv_heads
    most = max(1, MASK_PUT_BYTES // heads)
    for first, count in runs:
        for at in range(first, first + count, most):
            yield layout.mask_offset(layer, at), bytes([MASK_LOCAL]) * (min(most, first + count - at) * heads)
