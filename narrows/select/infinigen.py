"""Partial keys in a skewed basis, scored a layer ahead (InfiniGen; Lee et al., OSDI 2024)."""

from pathlib import Path

import torch
from torch import Tensor

from narrows.kernels.base import Kernels
from narrows.select.calibration import read
from narrows.select.codes import CodeSelector, pack_nibbles
from narrows.select.shape import SelectorShape


class InfinigenSelector(CodeSelector):
    """A key is skewed and cut into parts, and each part rounded to the nearest of 16 values, all from calibration."""

    name = "infinigen"
    looks_ahead = True
    alpha = 5.0

    def __init__(self, shape: SelectorShape, ratio: float, kernels: Kernels, calibration: Path | None) -> None:
        size = (shape.head_dim, None)
        arrays, content = read(calibration, self.name, shape, {"encode": size, "bias": (1, None), "decode": size})
        self._encode, self._bias, self._decode = arrays.values()  # [L, Hkv, D or 1, J * 16]
        super().__init__(kernels, ratio, self._decode.shape[3] // 16, content)

    def tables(self, layer: int, query: Tensor) -> Tensor:
        return query @ self._decode[layer]

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        at = slots.long()
        key = entries[at, :, : entries.shape[2] // 2].float().transpose(0, 1)  # [Hkv, T, D]
        # The nearest value c of a part y: least |y - c|^2, so most y.c - |c|^2 / 2, which is linear in the key.
        near = key @ self._encode[layer] + self._bias[layer]
        nibbles = torch.unflatten(near, 2, (-1, 16)).argmax(3)
        metadata[at] = pack_nibbles(nibbles).transpose(0, 1)
