"""From scattered blocks to the pieces that cross a link, as integers.

    blocks (caller's order) --merge--> runs --cut--> pieces, grouped into frames

A run is contiguous on both sides. A piece is the part of a run inside one frame.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.transfer.base import Copy

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Runs:
    """Non-empty copies in order; all arrays have one length. `buffers[i]` says which source the run reads."""

    buffers: Ints
    sources: Ints
    targets: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces in order; frame f is pieces `frames[f]` to `frames[f + 1]`, exclusive."""

    buffers: Ints
    sources: Ints
    targets: Ints
    lengths: Ints
    frames: Ints

    @property
    def num_frames(self) -> int:
        return len(self.frames) - 1


def check_copy(copy: Copy) -> None:
    """Raise ValueError unless the copy's arrays fit together and every source range lies in its region."""
    size = len(copy.source.buffer)
    offsets, targets, lengths = copy.source_offsets, copy.target_offsets, copy.lengths
    for name, array in (("source_offsets", offsets), ("target_offsets", targets), ("lengths", lengths)):
        if array.dtype != np.int64 or array.ndim != 1:
            raise ValueError(f"copy.{name}: expected a flat int64 array, got {array.dtype} with {array.ndim} dims")
    if not len(offsets) == len(targets) == len(lengths):
        raise ValueError(
            f"copy: {len(offsets)} source_offsets, {len(targets)} target_offsets and {len(lengths)} lengths differ"
        )
    if not len(lengths):
        return
    if int(lengths.min()) < 0 or int(offsets.min()) < 0:
        raise ValueError("copy: a source offset or a length is negative")
    # lengths are non-negative, so size - lengths can not overflow where offsets + lengths could
    outside = np.flatnonzero(offsets > size - lengths)
    if len(outside):
        first = int(outside[0])
        raise ValueError(
            f"copy: block {first} reads bytes {int(offsets[first])} to +{int(lengths[first])} "
            f"of a source region of {size} bytes"
        )


def merge(copies: Sequence[Copy]) -> Runs:
    """Join blocks that follow each other on both sides, dropping empty ones. O(blocks), no Python loop over blocks."""
    if not copies:
        empty = np.empty(0, np.int64)
        return Runs(empty, empty, empty, empty)
    buffers = np.repeat(np.arange(len(copies), dtype=np.int64), [len(copy.lengths) for copy in copies])
    sources = np.concatenate([copy.source_offsets for copy in copies])
    targets = np.concatenate([copy.target_offsets for copy in copies])
    lengths = np.concatenate([copy.lengths for copy in copies])
    kept = np.flatnonzero(lengths)
    if len(kept) < len(lengths):
        buffers, sources, targets, lengths = buffers[kept], sources[kept], targets[kept], lengths[kept]
    if len(lengths) < 2:
        return Runs(buffers, sources, targets, lengths)
    follows = (
        (sources[1:] - sources[:-1] == lengths[:-1])
        & (targets[1:] - targets[:-1] == lengths[:-1])
        & (buffers[1:] == buffers[:-1])
    )
    firsts = np.flatnonzero(np.concatenate(([True], ~follows)))
    return Runs(buffers[firsts], sources[firsts], targets[firsts], np.add.reduceat(lengths, firsts))


def cut(runs: Runs, frame_bytes: int, max_pieces: int) -> Pieces:
    """Cut runs so that no frame holds more than `frame_bytes` or more than `max_pieces` pieces.

    Every frame but those that the second limit ends early, and the last, is exactly `frame_bytes` long.
    """
    if not len(runs.lengths):
        empty = np.empty(0, np.int64)
        return Pieces(empty, empty, empty, empty, np.zeros(1, np.int64))
    # positions in the byte stream that the runs form, one after the other
    run_ends = np.cumsum(runs.lengths)
    ends = np.sort(np.concatenate((run_ends, np.arange(frame_bytes, run_ends[-1], frame_bytes))))
    piece_ends = ends[np.concatenate((ends[1:] != ends[:-1], [True]))]
    piece_begins = np.concatenate(([0], piece_ends[:-1]))
    run = np.searchsorted(run_ends, piece_begins, side="right")
    into_run = piece_begins - (run_ends[run] - runs.lengths[run])
    # each multiple of frame_bytes begins a piece, so its index is found exactly
    frame_first = np.searchsorted(piece_begins, piece_begins // frame_bytes * frame_bytes)
    rank = np.arange(len(piece_begins)) - frame_first
    frames = np.flatnonzero(rank % max_pieces == 0)
    return Pieces(
        buffers=runs.buffers[run],
        sources=runs.sources[run] + into_run,
        targets=runs.targets[run] + into_run,
        lengths=piece_ends - piece_begins,
        frames=np.append(frames, len(piece_begins)),
    )
