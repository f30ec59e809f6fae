"""What torch lacks on a CPU. `base.Kernels` is the contract, `reference` its torch twin, `native` the fast one.

Importing the package loads no torch: `build` is for processes that have none.
"""

import logging
from typing import TYPE_CHECKING

from narrows.errors import ConfigError, KernelError

if TYPE_CHECKING:
    from narrows.kernels.base import Kernels

log = logging.getLogger(__name__)


def load(name: str = "auto", num_threads: int | None = None) -> "Kernels":
    """The kernels called `name`: native, reference, or auto, which is native where it can be built.

    num_threads is for native; torch's own number if None.

    auto falls back to reference with one warning that says why. Raises ConfigError for another name, KernelError when
    native is asked for and can not be built.
    """
    from narrows.kernels.reference import ReferenceKernels

    if name == "reference":
        return ReferenceKernels()
    if name not in ("auto", "native"):
        raise ConfigError(f"kernels: {name!r} is unknown; use auto, native or reference")
    from narrows.kernels.native import NativeKernels  # the reference must work where native does not even import

    try:
        return NativeKernels(num_threads)
    except KernelError as error:
        if name == "native":
            raise
        log.warning("slow reference kernels are used, because the native ones can not be built: %s", error)
        return ReferenceKernels()
