"""Write a safetensors file tensor by tensor, so that only one of them is in memory at a time. No torch.

The format: the header's length as 8 little-endian bytes, the header (JSON: name -> dtype, shape, byte range), the data.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.models.gguf.cache import Progress

_CODES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
_ALIGNMENT = 64  # of the data's start, so that a mapped tensor is aligned as kernels like it


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: `read()` gives its float32 values when their turn comes."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], npt.NDArray[np.float32]]


def write_safetensors(path: Path, entries: Sequence[Entry], dtype: str, progress: Progress | None) -> None:
    """Write all entries as `dtype` (float32, float16 or bfloat16), and flush them to the disk."""
    code, item_bytes = _CODES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + prod(entry.shape) * item_bytes
        header[entry.name] = {"dtype": code, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for done, entry in enumerate(entries):
            if progress is not None:
                progress(done, len(entries))
            values = entry.read()
            assert values.size == prod(entry.shape)
            file.write(encode(values, dtype).data)
        file.flush()
        os.fsync(file.fileno())
    if progress is not None:
        progress(len(entries), len(entries))


def encode(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    """float32 values in another dtype; bfloat16 as the uint16 of its bits, rounded to nearest, ties to even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype != "bfloat16":
        return values.astype(dtype, copy=False)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
