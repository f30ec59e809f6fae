"""Bounds of a run of keys in each coordinate (Quest; Tang et al., ICML 2024)."""

from pathlib import Path

import torch
from torch import Tensor

from narrows.kernels.base import Kernels
from narrows.kernels.scores import CodeLayout
from narrows.select.calibration import read
from narrows.select.codes import CodeSelector
from narrows.select.shape import SelectorShape

SPAN = 8  # tokens that share bounds; fewer where pages are smaller
WIDTH = 0.5  # of the bounds' distance from their middle that counts; 1, as published: q.k can not be above the score
LEVELS = 4  # of either bound


class QuestSelector(CodeSelector):
    """A nibble for each coordinate: its smallest value over the run in the low two bits, its largest in the high two,
    each as the nearest of LEVELS values from calibration.

    Rounding keeps order, so the bounds of rounded keys are the rounded bounds, however a prompt is cut into calls.
    """

    name = "quest"

    def __init__(self, shape: SelectorShape, ratio: float, kernels: Kernels, calibration: Path | None) -> None:
        arrays, content = read(calibration, self.name, shape, dict.fromkeys(("low", "high"), (shape.head_dim, LEVELS)))
        self._page_size, self._span = shape.page_size, min(SPAN, shape.page_size)
        low, high = arrays["low"], arrays["high"]  # [L, Hkv, D, LEVELS], ascending
        nibble = torch.arange(16)
        low_of, high_of = low[..., nibble & 3], high[..., nibble >> 2]
        # The largest q.k in the box: middle times q plus half the width times |q|, coordinate by coordinate.
        decode = torch.stack([(low_of + high_of) / 2, WIDTH * (high_of - low_of) / 2], dim=2)
        layout = CodeLayout(self._page_size, self._span)
        super().__init__(kernels, ratio, decode, (content, self._page_size, self._span, WIDTH), layout)
        edges = torch.stack([low[..., 1:] + low[..., :-1], high[..., 1:] + high[..., :-1]], dim=2) / 2
        self._edges = edges.transpose(3, 4).contiguous().unbind(0)  # [Hkv, 2, LEVELS - 1, D]

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        self._scores.bounds(entries, slots, self._edges[layer], metadata, page_size=self._page_size, span=self._span)
