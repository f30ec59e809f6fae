"""The true top-k of q.k: what the other algorithms approximate. Its metadata is half of the KV, so it is a measure and
not a means."""

import torch
from torch import Tensor

from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.scores import Budget, open_scores
from narrows.select.base import KVIndex, MetadataLayout
from narrows.select.fingerprint import check_ratio, fingerprint
from narrows.select.shape import SelectorShape


class ExactSelector:
    """Scores by the keys themselves."""

    name = "exact"
    looks_ahead = False

    def __init__(self, shape: SelectorShape, ratio: float, kernels: Kernels) -> None:
        self.ratio = check_ratio(ratio)
        self.metadata = MetadataLayout(shape.head_dim * shape.dtype.itemsize)
        self.fingerprint = fingerprint(self.name, shape, ratio)
        self._kernels = kernels
        self._scores = open_scores(kernels)

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        at = slots.long()
        key = entries[at, :, : entries.shape[2] // 2].contiguous()
        metadata[at] = key.view(torch.uint8)

    def select(
        self, layer: int, query: Tensor, metadata: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> KVIndex:
        scores, num = self._scores.keys(query, metadata, batch, Budget(self.ratio, window), scale=scale)
        return KVIndex(self._kernels.top_k(scores, num), num)
