"""What this machine can do at most, measured: figures stand beside it."""

import time
from collections.abc import Callable

import torch

from narrows.errors import KernelError
from narrows.kernels.native import NativeKernels, declare

_SAMPLES = 40


class ReadProbe:
    """Reads memory with all threads, as fast as it goes."""

    def __init__(self) -> None:
        self._memory = torch.ones(256 << 20, dtype=torch.uint8)
        self._read: Callable[[], object]
        try:
            kernels = NativeKernels()
        except KernelError:  # without a compiler: torch's own sum, which comes close
            self._read = self._memory.view(torch.int64).sum
        else:
            read = declare(kernels.library, "narrows_probe_read", "plp")
            self._read = lambda: read(self._memory.data_ptr(), self._memory.nbytes, kernels.crew)

    def bytes_per_s(self) -> float:
        """The best of several passes over 256 MiB."""
        best_s = float("inf")
        for _ in range(_SAMPLES):
            began = time.perf_counter()
            self._read()
            best_s = min(best_s, time.perf_counter() - began)
        return self._memory.nbytes / best_s
