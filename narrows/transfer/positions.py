"""Sets of token positions, one per KV head, as few bytes: what decode asks for on a narrow link.

Three codes, the shortest is taken:  bitmap, a bit per position and head | 2 or 4 bytes a position | everything.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.errors import TransportError

Positions = npt.NDArray[np.int64]
_HEAD = struct.Struct("<BI")  # code, positions of the request
_BITMAP, _SHORT, _LONG, _ALL = range(4)
_WIDTHS: dict[int, "np.dtype[np.unsignedinteger[Any]]"] = {_SHORT: np.dtype("<u2"), _LONG: np.dtype("<u4")}


def encode_positions(rows: Sequence[Positions], num_tokens: int) -> bytes:
    """`rows` are ascending positions below num_tokens, one array per KV head."""
    counts = np.array([len(row) for row in rows], dtype="<u4")
    if counts.min() == num_tokens:
        return _HEAD.pack(_ALL, num_tokens)
    code = _SHORT if num_tokens <= 1 << 16 else _LONG
    listed = counts.nbytes + int(counts.sum()) * _WIDTHS[code].itemsize
    if listed > len(rows) * (-(-num_tokens // 8)):
        bits = np.zeros((len(rows), num_tokens), dtype=bool)
        for line, row in zip(bits, rows, strict=True):
            line[row] = True
        return _HEAD.pack(_BITMAP, num_tokens) + np.packbits(bits, axis=1).tobytes()
    return _HEAD.pack(code, num_tokens) + counts.tobytes() + np.concatenate(rows).astype(_WIDTHS[code]).tobytes()


def decode_positions(data: bytes, num_heads: int, num_tokens: int) -> list[Positions]:
    """The reverse. Raises TransportError on what encode_positions can not have made for this many heads and tokens."""
    try:
        code, length = _HEAD.unpack_from(data)
        body = memoryview(data)[_HEAD.size :]
        if length != num_tokens:
            raise ValueError(f"positions of {length} tokens, of a request of {num_tokens}")
        if code == _ALL:
            return [np.arange(num_tokens, dtype=np.int64)] * num_heads
        if code == _BITMAP:
            bits = np.frombuffer(body, np.uint8).reshape(num_heads, -(-num_tokens // 8))
            return [np.flatnonzero(np.unpackbits(line, count=num_tokens)).astype(np.int64) for line in bits]
        width = _WIDTHS[code]
        counts = np.frombuffer(body, "<u4", num_heads).astype(np.int64)
        flat = np.frombuffer(body[4 * num_heads :], width).astype(np.int64)
        if len(flat) != counts.sum() or (len(flat) and flat.max() >= num_tokens):
            raise ValueError("positions do not fit the request")
        return np.split(flat, np.cumsum(counts)[:-1])
    except (struct.error, ValueError, KeyError) as error:
        raise TransportError(f"not a list of positions: {error}") from error
