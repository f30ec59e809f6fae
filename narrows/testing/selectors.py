"""A selector that is obviously right and needs no calibration: for tests of what happens around selection."""

import math

import torch
from torch import Tensor

from narrows.kernels.base import PagedBatch
from narrows.select.base import KVIndex, MetadataLayout


class PlainSelector:
    """Exact top-k by the group's summed scores, one row after the other. Metadata: the keys themselves, float32."""

    name = "plain"
    fingerprint = "plain"

    def __init__(self, head_dim: int, *, ratio: float = 0.2, looks_ahead: bool = False) -> None:
        self.ratio = ratio
        self.looks_ahead = looks_ahead
        self.metadata = MetadataLayout(4 * head_dim)

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        keys = entries[slots.long()].chunk(2, dim=-1)[0].float().contiguous()
        metadata[slots.long()] = keys.view(torch.uint8)

    def select(
        self, layer: int, query: Tensor, metadata: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> KVIndex:
        rows: list[list[int]] = []
        heads = metadata.shape[1]
        keys = metadata.view(torch.float32)
        for r, length in enumerate(batch.context_len.tolist()):
            at = torch.arange(length - 1)
            slots = batch.page_table[r].long()[at // batch.page_size] * batch.page_size + at % batch.page_size
            first = max(0, length - window) if window else 0
            for h, group in enumerate(query[r].float().view(heads, -1, query.shape[-1])):
                scores = (keys[slots, h] * group.sum(0)).sum(1)[first:]  # no product of torch's, whose threads spin
                count = min(len(scores), max(0, math.ceil(self.ratio * length) - 1))
                rows.append([*sorted((scores.topk(count).indices + first).tolist()), length - 1])
        most = max(map(len, rows))
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        return KVIndex(torch.tensor([row + [-1] * (most - len(row)) for row in rows], dtype=torch.int32), counts)
