"""Partial keys in a skewed basis, scored a layer ahead (InfiniGen; Lee et al., OSDI 2024)."""

from pathlib import Path

from torch import Tensor

from narrows.kernels.base import Kernels
from narrows.select.calibration import read
from narrows.select.codes import CodeSelector
from narrows.select.shape import SelectorShape


class InfinigenSelector(CodeSelector):
    """A key is skewed and cut into parts, and each part rounded to the nearest of 16 values, all from calibration."""

    name = "infinigen"
    looks_ahead = True
    alpha = 5.0

    def __init__(self, shape: SelectorShape, ratio: float, kernels: Kernels, calibration: Path | None) -> None:
        size = (shape.head_dim, None)
        arrays, content = read(calibration, self.name, shape, {"encode": size, "bias": (1, None), "decode": size})
        super().__init__(kernels, ratio, arrays["decode"], content)
        self._encode, self._bias = arrays["encode"].unbind(0), arrays["bias"].unbind(0)  # [Hkv, D or 1, J * 16]

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        # The nearest value c of a part y: least |y - c|^2, so most y.c - |c|^2 / 2, which is linear in the key.
        self._scores.encode(entries, slots, self._encode[layer], self._bias[layer], metadata, signs=False)
