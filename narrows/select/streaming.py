"""Attention sinks and recent tokens, whatever is asked (StreamingLLM; Xiao et al., ICLR 2024)."""

import torch
from torch import Tensor

from narrows.kernels.base import PagedBatch
from narrows.kernels.scores import ROUNDING
from narrows.select.base import KVIndex, MetadataLayout
from narrows.select.fingerprint import check_ratio, fingerprint
from narrows.select.shape import SelectorShape

SINKS = 4  # first tokens that are always read, as published


class StreamingSelector:
    """Static: the first SINKS positions (of the window, if there is one) and as many of the last as the ratio leaves.

    Departs from the publication in that the window grows with the request, so that all algorithms read equally much,
    and in that positions are not renumbered.
    """

    name = "streaming"
    looks_ahead = False
    metadata = MetadataLayout(0)

    def __init__(self, shape: SelectorShape, ratio: float) -> None:
        self.ratio = check_ratio(ratio)
        self.fingerprint = fingerprint(self.name, SINKS, ratio)
        self._num_kv_heads = shape.num_kv_heads

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        pass

    def select(
        self, layer: int, query: Tensor, metadata: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> KVIndex:
        length = batch.context_len[:, None]
        most = length if window is None else length.clamp(max=window)
        first, num = length - most, (length.double() * self.ratio - ROUNDING).ceil().int().clamp(min=1).minimum(most)
        sinks = num.sub(1).clamp(max=SINKS)  # of a budget of one nothing is left for them
        at = torch.arange(int(num.max()), dtype=torch.int32)
        positions = torch.where(at < sinks, first + at, length - num + at)
        positions = positions.masked_fill(at >= num, -1)
        rows = num[:, 0].repeat_interleave(self._num_kv_heads)
        return KVIndex(positions.repeat_interleave(self._num_kv_heads, dim=0), rows)
