"""The KV mask of one instance: which KV entries are here, as a view of memory that peers write to."""

from collections.abc import Sequence

import torch

from narrows.kv.layout import MASK_ABSENT, MASK_LOCAL, KVLayout

Runs = Sequence[tuple[int, int]]  # (first slot, number of slots)


class KVMask:
    """`states` is [num_layers, num_slots, num_kv_heads] int8 over `buffer`, which the caller keeps alive."""

    def __init__(self, layout: KVLayout, buffer: memoryview) -> None:
        """`buffer` is flat, writable and holds at least layout.mask_bytes; whatever is in it stays."""
        assert buffer.nbytes >= layout.mask_bytes, (buffer.nbytes, layout.mask_bytes)
        assert not buffer.readonly
        self.layout = layout
        shape = (layout.num_layers, layout.num_slots, layout.num_kv_heads)
        self.states = torch.frombuffer(buffer, dtype=torch.int8, count=layout.mask_bytes).view(shape)

    def set(self, runs: Runs, state: int, *, layer: int | None = None) -> None:
        """Put all heads of these slots into one state, in one layer or (None) in all."""
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        for first, count in runs:
            self.states[layers, first : first + count] = state

    def clear(self, runs: Runs) -> None:
        """Nothing is here any more; to be done before the slots serve a new request."""
        self.set(runs, MASK_ABSENT)

    def is_complete(self, runs: Runs, num_layers: int | None = None) -> bool:
        """Whether every KV entry of these slots is local in the first `num_layers` layers (None: in all)."""
        return all(bool((self.states[:num_layers, first : first + count] == MASK_LOCAL).all()) for first, count in runs)
