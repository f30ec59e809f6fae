"""How many entries a request may read, and how scores become a KV index. The same for every algorithm.

Legend: R requests, Hkv KV heads, n positions of the longest request.
"""

import hashlib

import torch
from torch import Tensor

from narrows.errors import ConfigError
from narrows.kernels.base import Kernels, PagedBatch
from narrows.select.base import KVIndex

EXACT = 1e-9  # 0.7 * 10 is a little more than 7 in binary, and must not become 8


def check_ratio(ratio: float) -> float:
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(f"select_ratio: {ratio} is not a part of a request's entries; use one in (0, 1], such as 0.2")
    return ratio


def budget(batch: PagedBatch, ratio: float, window: int | None) -> Tensor:
    """[R] int32: ceil(ratio * length), at least 1, and no more than can be seen."""
    length = batch.context_len
    most = length if window is None else length.clamp(max=window)
    part = (length.double() * ratio - EXACT).ceil().to(torch.int32)
    return torch.minimum(part.clamp(min=1), most)


def begin(batch: PagedBatch, window: int | None) -> Tensor:
    """[R] int32: the first position that may be selected."""
    return torch.zeros_like(batch.context_len) if window is None else (batch.context_len - window).clamp(min=0)


def choose(kernels: Kernels, scores: Tensor, num: Tensor) -> KVIndex:
    """The best `num` [R] of scores [R * Hkv, n], in which hidden positions are -inf and the newest token is +inf."""
    rows = num.repeat_interleave(len(scores) // max(1, len(num)))
    return KVIndex(kernels.top_k(scores, rows), rows)


def fingerprint(*parts: object) -> str:
    """Short, and another one whenever any part differs."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
