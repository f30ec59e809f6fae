"""Compiles csrc/ with the system's C compiler on first use, into a cache that several processes may share."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from narrows.errors import KernelError

SOURCES = Path(__file__).parent / "csrc"
# No -ffast-math: -inf and NaN have to work. Contraction to fused multiply-add is on, traps and errno are not needed.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w")
NEEDED = "install a C compiler (Debian: apt install gcc), set CC to one, or choose kernels = reference"


def build(extra_flags: Sequence[str] = (), cache: Path | None = None) -> Path:
    """Returns the shared library for this machine, compiling it if the cache has none.

    extra_flags come last and so may override the target. Raises KernelError with the compiler's words if there is no
    compiler or it fails. Safe to call from several processes at once: each compiles apart, the last rename wins.
    """
    compiler = find_compiler()
    flags = [*FLAGS, native_flag(), *extra_flags]
    sources = sorted(SOURCES.iterdir())
    key = hashlib.sha256()
    for part in (compiler, *flags, cpu_features()):
        key.update(part.encode() + b"\0")
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = cache or cache_folder()
    library = folder / f"kernels-{key.hexdigest()[:20]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / library.name
        code = [str(source) for source in sources if source.suffix == ".c"]
        run([compiler, *flags, "-shared", "-pthread", "-o", str(made), *code, "-lm"])
        made.replace(library)
    return library


def load_library(path: Path) -> ctypes.CDLL:
    """Loads what build made. Raises KernelError if the dynamic linker refuses it."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"kernels: {path} does not load: {error}; delete it and start again") from error


def cache_folder() -> Path:
    """$NARROWS_CACHE, or narrows/ in the user's cache folder."""
    own = os.environ.get("NARROWS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "narrows"


def find_compiler() -> str:
    """The path of $CC, or of the first of cc, gcc, clang. Raises KernelError when there is none."""
    wanted = os.environ.get("CC")
    for name in [wanted] if wanted else ["cc", "gcc", "clang"]:
        path = shutil.which(name)
        if path:
            return path
    looked_for = f"CC={wanted}" if wanted else "cc, gcc or clang"
    raise KernelError(f"kernels: no C compiler: {looked_for} not found in PATH; {NEEDED}")


def native_flag() -> str:
    """How compilers are told to use all that this processor has."""
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def cpu_features() -> str:
    """Tells machines apart that share a cache folder but not an instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[-2000:]
        raise KernelError(f"kernels: `{' '.join(command)}` failed with {done.returncode}: {said}\n{NEEDED}")
