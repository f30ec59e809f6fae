"""What is pushed when, and which bytes of it go where, as integers. Pure: no transport, no tensors, no clock.

A *KV block* is the unit of importance and push: one of M equal runs of a prompt's tokens in one layer (SmartGen section
4.1), numbered layer * M + m. M is as configured, or the number of tokens where a prompt has fewer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.kv.layout import DENSE_LAYERS, MASK_LOCAL

Ints = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

MASK_PUT_BYTES = 1024  # longer mask updates are split, so that each fits a frame


def num_pushed(num_layers: int, num_blocks: int, prefill_s: float, transfer_s: float) -> int:
    """Kr of equation 2: how many of the num_layers * num_blocks KV blocks can cross while prefill still computes.

    `prefill_s` is Tp, `transfer_s` is Tt, the time of everything, metadata included. The first layer's KV exists only
    after a layer's time, hence L - 1; at least the first two layers are pushed and at most all.
    """
    most = num_layers * num_blocks
    least = min(DENSE_LAYERS, num_layers) * num_blocks
    if transfer_s <= 0.0:
        return most
    return int(min(max(num_blocks * (num_layers - 1) * prefill_s / transfer_s, least), most))


@dataclass(frozen=True, slots=True)
class Copies:
    """Contiguous pieces of bytes, adjacent ones joined: three int64 arrays of one length."""

    source_offsets: Ints
    target_offsets: Ints
    lengths: Ints


def plan_copies(
    row_bytes: int, source_stride: int, target_stride: int, layers: Ints, source_rows: Ints, target_rows: Ints
) -> Copies:
    """Rows of `row_bytes` from one layered region to another, whose layers begin every `*_stride` bytes.

    Row i of the three arrays goes from (layers[i], source_rows[i]) to (layers[i], target_rows[i]); where followers are
    adjacent on both sides they become one piece.
    """
    sources = layers * source_stride + source_rows * row_bytes
    targets = layers * target_stride + target_rows * row_bytes
    if not len(sources):
        return Copies(sources, targets, sources)
    apart = (np.diff(sources) != row_bytes) | (np.diff(targets) != row_bytes)
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    counts = np.diff(np.append(first, len(sources)))
    return Copies(sources[first], targets[first], counts * row_bytes)


def plan_mask(layer_entries: int, layers: Ints, ids: Ints, each: int = 1) -> Iterator[tuple[int, bytes]]:
    """Mask updates (offset, bytes) that say of KV entries that they are there: of `each` entries from every id on.

    An id is slot * heads + head; `layer_entries` is how many the target has in a layer."""
    places = layers * layer_entries + ids
    if not len(places):
        return
    first = np.concatenate(([0], np.flatnonzero(np.diff(places) != each) + 1))
    counts = np.diff(np.append(first, len(places))) * each
    local = bytes([MASK_LOCAL]) * MASK_PUT_BYTES
    for place, count in zip(places[first].tolist(), counts.tolist(), strict=True):
        for at in range(place, place + count, MASK_PUT_BYTES):
            yield at, local[: min(MASK_PUT_BYTES, place + count - at)]


def spread(first: Ints, stop: Ints) -> Ints:
    """All integers of the ranges first[i]..stop[i]-1, one range after the other."""
    counts = stop - first
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    values: Ints = np.arange(total, dtype=np.int64) + np.repeat(first - (ends - counts), counts)
    return values
