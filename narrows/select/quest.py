"""Bounds of a run of keys in each coordinate (Quest; Tang et al., ICML 2024)."""

from pathlib import Path

import torch
from torch import Tensor

from narrows.kernels.base import Kernels
from narrows.kernels.scores import CodeLayout
from narrows.select.calibration import read
from narrows.select.codes import CodeSelector, pack_nibbles, unpack_nibbles
from narrows.select.shape import SelectorShape

SPAN = 8  # tokens that share bounds; fewer where pages are smaller
WIDTH = 0.5  # of the bounds' distance from their middle that counts; 1, as published: q.k can not be above the score
LEVELS = 4  # of either bound


class QuestSelector(CodeSelector):
    """A nibble for each coordinate: its smallest value over the span in the low two bits, its largest in the high two,
    each as the nearest of LEVELS values from calibration.

    Rounding keeps order, so the bounds of rounded keys are the rounded bounds, however a prompt is cut into calls.
    """

    name = "quest"

    def __init__(self, shape: SelectorShape, ratio: float, kernels: Kernels, calibration: Path | None) -> None:
        arrays, content = read(calibration, self.name, shape, dict.fromkeys(("low", "high"), (shape.head_dim, LEVELS)))
        self._span = min(SPAN, shape.page_size)
        self._spans_per_page = shape.page_size // self._span
        super().__init__(
            kernels,
            ratio,
            shape.head_dim,
            (content, shape.page_size, self._span, WIDTH),
            CodeLayout(shape.page_size, self._span),
        )
        self._low, self._high = arrays["low"], arrays["high"]  # [L, Hkv, D, LEVELS], ascending
        self._edges = [(levels[..., 1:] + levels[..., :-1]) / 2 for levels in (self._low, self._high)]

    def tables(self, layer: int, query: Tensor) -> Tensor:
        apart = query.abs() * WIDTH  # [R, Hkv, G, D]
        low = ((query - apart) / 2)[..., None] * self._low[layer][:, None]  # [R, Hkv, G, D, LEVELS]
        high = ((query + apart) / 2)[..., None] * self._high[layer][:, None]
        return low[..., None, :] + high[..., None]

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        if not len(slots):
            return
        at = slots.long()
        key = entries[at, :, : entries.shape[2] // 2, None].float()  # [T, Hkv, D, 1]
        spans, which = torch.unique(at // self._span, return_inverse=True)
        page, within = spans // self._spans_per_page, spans % self._spans_per_page
        codes = torch.unflatten(metadata, 2, (self._spans_per_page, -1)).transpose(1, 2)  # [pages, spans, Hkv, B]
        old = unpack_nibbles(codes[page, within]).long()  # [spans, Hkv, D]
        fresh = torch.zeros(len(spans), dtype=torch.bool).index_fill_(0, which[at % self._span == 0], True)
        old = torch.where(fresh[:, None, None], LEVELS - 1, old)  # the empty span: lowest of all, and highest of none
        where = which[:, None, None].expand(-1, *old.shape[1:])
        low, high = ((key > edges[layer]).sum(3) for edges in self._edges)
        low = (old & 3).scatter_reduce(0, where, low, "amin")
        high = (old >> 2).scatter_reduce(0, where, high, "amax")
        codes[page, within] = pack_nibbles(low | high << 2)
