"""Compiles csrc/ with the system's C compiler on first use, into a cache that several processes share. No torch."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from narrows.cache import cache_root, make_once
from narrows.errors import ConfigError, KernelError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
# No -ffast-math: -inf and NaN have to work. Contraction to fused multiply-add is on, traps and errno are not needed.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w")
NEEDED = "install a C compiler (Debian: apt install gcc), set CC to one, or choose kernels = reference"

# Runs "$@" in a group of its own, which ends when standard input does: when the process that holds its other end is
# done or dead. A child of the compiler, which does the work, would survive a signal sent to the compiler alone.
GUARDED = 'exec 3<&0; { read -r _ <&3; kill -KILL 0; } >/dev/null 2>&1 & exec 3<&-; "$@" </dev/null; exit $?'


def build(extra_flags: Sequence[str] = (), cache: Path | None = None) -> Path:
    """Returns the shared library for this machine, compiling it if the cache has none.

    extra_flags come last and so may override the target. Of several processes one compiles and the others wait. Where
    the cache can not be written, one library is compiled for this process alone, with a warning. Raises KernelError
    with the compiler's words if there is no compiler or it fails.
    """
    command = compile_command(extra_flags)
    name = library_name(command)
    try:
        return make_once((cache or kernel_cache()) / name, functools.partial(compile_library, command))
    except (OSError, ConfigError) as error:
        log.warning(
            "the kernels are compiled for this process alone, because the cache can not be written: %s; "
            "set NARROWS_CACHE to a folder that can",
            error,
        )
    return private_library(tuple(command))


def prepare(progress: Callable[[str], None] | None = None) -> None:
    """Compiles the library that `build` returns, so that processes started afterwards find it; blocks until it is done.

    `progress` hears of it first. Does nothing when the library is there or the cache can not be written. What else
    prevents it is not reported here: every process that needs the library meets it too, and warns.
    """
    try:
        command = compile_command()
        library = kernel_cache() / library_name(command)
        library.parent.mkdir(parents=True, exist_ok=True)
        if library.exists() or not os.access(library.parent, os.W_OK):
            return
        if progress:
            progress("building the CPU kernels, once")
        make_once(library, functools.partial(compile_library, command))
    except (KernelError, ConfigError, OSError) as error:
        log.debug("kernels are not built ahead: %s", error)


def load_library(path: Path) -> ctypes.CDLL:
    """Loads what build made. Raises KernelError if the dynamic linker refuses it."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"kernels: {path} does not load: {error}; delete it and start again") from error


def kernel_cache() -> Path:
    """Where libraries are kept. Raises ConfigError if there is no such place."""
    return cache_root() / "kernels"


def compile_command(extra_flags: Sequence[str] = ()) -> list[str]:
    """The compiler with its flags, without files. Raises KernelError when there is none."""
    return [*find_compiler(), *FLAGS, native_flag(), *extra_flags]


def find_compiler() -> list[str]:
    """$CC, which may be several words, or the first of cc, gcc, clang. Raises KernelError when there is none."""
    wanted = os.environ.get("CC", "")
    try:
        words = shlex.split(wanted)
    except ValueError as error:
        raise KernelError(f"kernels: CC={wanted} is no command: {error}; {NEEDED}") from error
    for name in words[:1] or ["cc", "gcc", "clang"]:
        path = shutil.which(name)
        if path:
            return [path, *words[1:]]
    looked_for = f"CC={wanted}" if words else "cc, gcc or clang"
    raise KernelError(f"kernels: no C compiler: {looked_for} not found in PATH; {NEEDED}")


def native_flag() -> str:
    """How compilers are told to use all that this processor has."""
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def cpu_features() -> str:
    """Tells machines apart that share a cache folder but not an instruction set."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def library_name(command: Sequence[str]) -> str:
    """Another compiler, flag, processor or source is another library."""
    key = hashlib.sha256()
    for part in (*command, cpu_features()):
        key.update(os.fsencode(part) + b"\0")
    try:
        for source in sorted(SOURCES.iterdir()):
            key.update(source.name.encode() + b"\0" + source.read_bytes())
    except OSError as error:
        raise KernelError(f"kernels: the C sources can not be read: {error}; install narrows again") from error
    return f"kernels-{key.hexdigest()[:20]}.so"


def compile_library(command: Sequence[str], library: Path) -> None:
    """Compiles into `library`; temporary files go beside it. Raises KernelError."""
    code = [str(source) for source in sorted(SOURCES.glob("*.c"))]
    full = [*command, "-shared", "-pthread", "-o", str(library), *code, "-lm"]
    status, said = run(full, temporary=library.parent)
    if status != 0:
        raise KernelError(f"kernels: `{shlex.join(full)}` failed with {status}: {said.strip()[-2000:]}\n{NEEDED}")
    if not library.is_file():
        raise KernelError(f"kernels: `{shlex.join(full)}` succeeded but wrote no library; {NEEDED}")


@functools.cache
def private_library(command: tuple[str, ...]) -> Path:
    """A library that lasts as long as this process, however that ends: a file without a name. Raises KernelError."""
    try:
        with tempfile.TemporaryDirectory(prefix="narrows-kernels-") as folder:
            library = Path(folder) / "kernels.so"
            compile_library(command, library)
            file = os.memfd_create("narrows-kernels")
            Path(f"/proc/self/fd/{file}").write_bytes(library.read_bytes())
    except OSError as error:
        raise KernelError(
            f"kernels: no library without a cache either: {error}; set NARROWS_CACHE or TMPDIR"
        ) from error
    return Path(f"/proc/self/fd/{file}")


def run(command: Sequence[str], temporary: Path) -> tuple[int, str]:
    """Exit status and output of a command, none of whose processes outlives this call or this process.

    Raises KernelError when it can not be started.
    """
    inner, outer = os.pipe()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", GUARDED, "sh", *command],
            stdin=inner,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"TMPDIR": str(temporary)},
            process_group=0,
        )
        with process:
            try:
                said, _ = process.communicate()
            finally:
                # The guard is still in the group, so its number is nobody else's.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    except OSError as error:
        raise KernelError(f"kernels: `{shlex.join(command)}` can not be run: {error}; {NEEDED}") from error
    finally:
        os.close(inner)
        os.close(outer)
    return process.returncode, said
