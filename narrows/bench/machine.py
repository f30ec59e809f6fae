"""What this machine can do at most, measured: figures stand beside it."""

import time
from collections.abc import Callable

import torch

from narrows.errors import KernelError
from narrows.kernels.build import build, load_library
from narrows.kernels.native import declare


def read_bytes_per_s(*, samples: int = 40) -> float:
    """Bytes per second that all threads together read from memory, the best of several passes over 256 MiB."""
    memory = torch.ones(256 << 20, dtype=torch.uint8)
    try:
        read = declare(load_library(build()), "narrows_probe_read", "pli")
    except KernelError:  # without a compiler: torch's own sum, which comes close
        words = memory.view(torch.int64)
        return memory.nbytes / min(_seconds(words.sum) for _ in range(samples))
    arguments = memory.data_ptr(), memory.nbytes, torch.get_num_threads()
    return memory.nbytes / min(_seconds(lambda: read(*arguments)) for _ in range(samples))


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
