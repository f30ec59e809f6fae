"""Learned hashes of keys (HATA; Gong et al., ACL 2025)."""

from pathlib import Path

import torch
from torch import Tensor

from narrows.kernels.base import Kernels
from narrows.select.calibration import read
from narrows.select.codes import CodeSelector
from narrows.select.shape import SelectorShape

# [4, 16]: the four bits of a nibble, the lowest first, as -1 and 1.
SIGNS = torch.tensor([[(c >> b & 1) * 2.0 - 1.0 for c in range(16)] for b in range(4)])


class HataSelector(CodeSelector):
    """A key's bits are the signs of learned projections; a query weighs each bit."""

    name = "hata"

    def __init__(self, shape: SelectorShape, ratio: float, kernels: Kernels, calibration: Path | None) -> None:
        size = (shape.head_dim, None)
        arrays, content = read(calibration, self.name, shape, {"encode": size, "bias": (1, None), "decode": size})
        decode = (torch.unflatten(arrays["decode"], 3, (-1, 4)) @ SIGNS).flatten(3)  # [L, Hkv, D, J * 16]
        super().__init__(kernels, ratio, decode, content)
        self._encode, self._bias = arrays["encode"].unbind(0), arrays["bias"].unbind(0)  # [Hkv, D or 1, bits]

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        self._scores.encode(entries, slots, self._encode[layer], self._bias[layer], metadata, signs=True)
