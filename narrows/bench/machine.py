"""What this machine can do at most, measured: figures stand beside it."""

import time
from collections.abc import Callable

import torch

from narrows.errors import KernelError
from narrows.kernels.native import NativeKernels, declare

_SAMPLES = 40
_ROUNDS = 1000  # of products in one sample: about a millisecond


class Probe:
    """All threads of the machine at what they do best. Without native kernels torch's own operations come close."""

    def __init__(self) -> None:
        self._memory = torch.ones(256 << 20, dtype=torch.uint8)
        self._read: Callable[[], object]
        self._multiply: Callable[[], object]
        try:
            kernels = NativeKernels()
        except KernelError:
            self._read = self._memory.view(torch.int64).sum
            square = torch.ones(2048, 2048, dtype=torch.bfloat16)
            self._multiply = lambda: square @ square
            self._flop = 2.0 * 2048**3
        else:
            read = declare(kernels.library, "narrows_probe_read", "plp")
            multiply = declare(kernels.library, "narrows_probe_multiply", "lp")
            self._read = lambda: read(self._memory.data_ptr(), self._memory.nbytes, kernels.crew)
            self._multiply = lambda: multiply(_ROUNDS, kernels.crew)
            self._flop = 2.0 * kernels.num_threads * kernels.library.narrows_probe_products(_ROUNDS)

    def bytes_per_s(self) -> float:
        """Reading 256 MiB from memory: the best of several passes."""
        return self._memory.nbytes / _best_s(self._read)

    def flop_per_s(self) -> float:
        """Multiplying and adding bfloat16 from the first-level cache: the best of several samples."""
        return self._flop / _best_s(self._multiply)


def _best_s(call: Callable[[], object]) -> float:
    best_s = float("inf")
    for _ in range(_SAMPLES):
        began = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - began)
    return best_s
