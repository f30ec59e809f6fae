"""The KV tensors of one instance, as views of memory that a transport registered."""

import torch
from torch import Tensor

from narrows.kv.layout import KVLayout


class KVPool:
    """`layers[l]` is [num_slots, num_kv_heads, entry_dim]; all share `buffer`, which the caller keeps alive."""

    def __init__(self, layout: KVLayout, dtype: torch.dtype, buffer: memoryview) -> None:
        """`buffer` is flat, writable and holds at least layout.total_bytes; whatever is in it stays."""
        assert dtype.itemsize == layout.dtype_bytes, (dtype, layout.dtype_bytes)
        assert buffer.nbytes >= layout.total_bytes, (buffer.nbytes, layout.total_bytes)
        assert not buffer.readonly
        self.layout = layout
        shape = (layout.num_layers, layout.num_slots, layout.num_kv_heads, layout.entry_dim)
        flat = torch.frombuffer(buffer, dtype=dtype, count=layout.total_bytes // layout.dtype_bytes)
        self.layers: list[Tensor] = list(flat.view(shape).unbind(0))
