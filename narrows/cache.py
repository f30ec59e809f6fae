"""What is made once and kept between runs: where it lies, and how several processes make it without doing so twice.

    $NARROWS_CACHE, else $XDG_CACHE_HOME/narrows, else ~/.cache/narrows
      kernels/, models/          one folder a kind
        ENTRY                    complete: it appears by one rename
        ENTRY.RANDOM.partial/    being made, by whoever holds the lock
        ENTRY.lock               held while ENTRY is made; others wait and then find it

A lock that nobody holds belongs to a dead process: whoever comes next removes it and the partials beside it.
Standard library only.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from narrows.errors import ConfigError

LOCK, PARTIAL = ".lock", ".partial"


def cache_root() -> Path:
    """The folder of all that is kept between runs; it need not exist. Raises ConfigError if no rule gives one."""
    own, user = os.environ.get("NARROWS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(user or "~/.cache") / "narrows"
    try:
        return folder.expanduser()
    except RuntimeError as error:
        raise ConfigError(f"NARROWS_CACHE: {folder} names no folder ({error}); set it to one for the cache") from error


def make_once(entry: Path, make: Callable[[Path], None]) -> Path:
    """`entry`, a file or folder, after `make(path)` has made it if it was not there.

    `path` has the entry's name and lies in a fresh folder, where `make` may also put what is only needed meanwhile.
    Safe between processes and threads: one makes, the others block until it is done (and try themselves if it failed).
    Whatever `make` raises leaves nothing behind. Raises OSError when the cache can not be written; does not write when
    the entry is there.
    """
    if entry.exists():
        return entry
    entry.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(entry.parent)
    with _holding(entry.with_name(entry.name + LOCK), os.O_CREAT, fcntl.LOCK_EX):
        if not entry.exists():
            scratch = Path(tempfile.mkdtemp(prefix=entry.name + ".", suffix=PARTIAL, dir=entry.parent))
            try:
                make(scratch / entry.name)
                (scratch / entry.name).rename(entry)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return entry


def _remove_stale(folder: Path) -> None:
    for lock in [path for path in folder.iterdir() if path.name.endswith(LOCK)]:
        # An error means held, gone meanwhile or another user's: nothing of ours to remove.
        with suppress(OSError), _holding(lock, 0, fcntl.LOCK_EX | fcntl.LOCK_NB):
            pass


@contextmanager
def _holding(lock: Path, flags: int, operation: int) -> Iterator[None]:
    """Holds a lock file that is gone afterwards. What a dead holder left of its entry is removed first."""
    while True:
        file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
        try:
            fcntl.flock(file, operation)
            if not _is_at(file, lock):
                continue  # its last holder removed it: those who come now meet at a new one
            try:
                for path in list(lock.parent.iterdir()):
                    made_for = path.name.removesuffix(PARTIAL).rpartition(".")[0]
                    if path.name.endswith(PARTIAL) and made_for == lock.name.removesuffix(LOCK):
                        shutil.rmtree(path, ignore_errors=True)
                yield
            finally:
                lock.unlink(missing_ok=True)
            return
        finally:
            os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
