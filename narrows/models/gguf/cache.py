"""GGUF files become ordinary model folders, once.

    $NARROWS_CACHE or ~/.cache/narrows/
      NAME-KEY/          complete: it appears by one rename
      NAME-KEY.partial/  being written, by whoever holds the lock; a leftover of a killed process is removed
      NAME-KEY.lock      held while converting; others wait and then find the folder

Standard library only, so that a front end whose model is in the cache loads nothing more.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from narrows.errors import ModelError

Progress = Callable[[int, int], None]  # tensors converted so far, tensors in all

# Goes into the key: raise it when the converter writes something else for the same file.
_FORMAT = 1


def cache_root() -> Path:
    """Where converted models are kept: $NARROWS_CACHE, or ~/.cache/narrows."""
    return Path(os.environ.get("NARROWS_CACHE") or Path.home() / ".cache" / "narrows")


def cached_folder(path: Path) -> Path:
    """Where the conversion of this file is or would be. Another size or change time is another file."""
    stat = path.stat()
    key = hashlib.sha256(f"{_FORMAT}|{path.name}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    return cache_root() / f"{path.stem}-{key}"


def convert_once(path: Path, write: Callable[[Path], None]) -> Path:
    """The converted folder of a GGUF file; `write(new folder)` makes it when it is not there.

    Safe between processes: one converts, the others block until it is done. Raises ModelError when the cache can not
    be written; whatever `write` raises leaves nothing behind.
    """
    folder = cached_folder(path)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _write(folder, write)
    except OSError as error:
        raise ModelError(
            f"{path} can not be converted into {folder}: {error}; set NARROWS_CACHE to a folder with room"
        ) from error
    return folder


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        write(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
