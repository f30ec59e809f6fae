"""GGUF files become ordinary model folders, once: models/NAME-KEY in the cache (see narrows.cache).

Standard library only, so that a front end whose model is in the cache loads nothing more.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from narrows.cache import cache_root, make_once
from narrows.errors import ModelError

Progress = Callable[[int, int], None]  # tensors converted so far, tensors in all

# Goes into the key: raise it when the converter writes something else for the same file.
_FORMAT = 2
_MIB = 1 << 20
_HEAD_BYTES = 8 * _MIB  # metadata, vocabulary and merges, which for 150 000 tokens take 6 MiB
_SAMPLE_BYTES = _MIB // 2
_NUM_SAMPLES = 4
_READ_BYTES = _MIB // 4  # at once: small enough to stay in the processor's cache


def convert_once(path: Path, write: Callable[[Path], None]) -> Path:
    """The converted folder of a GGUF file; `write(new empty folder)` fills it when it is not there.

    Safe between processes: one converts, the others block until it is done. Raises ModelError when the file can not be
    read or the cache not be written; whatever `write` raises leaves nothing behind.
    """

    def make(folder: Path) -> None:
        folder.mkdir()
        write(folder)

    try:
        folder = cached_folder(path)
    except OSError as error:
        raise ModelError(f"{path} can not be read: {error}") from error
    try:
        return make_once(folder, make)
    except OSError as error:
        raise ModelError(
            f"{path} can not be converted into the cache folder {folder.parent}: {error}; "
            "make room there, or set NARROWS_CACHE to a folder that can be written"
        ) from error


def cached_folder(path: Path) -> Path:
    """Where the conversion of this file is or would be.

    Another place, size, change time, metadata or sample of the weights is another file. Takes milliseconds.
    """
    where, stat = path.resolve(), path.stat()
    key = hashlib.sha256(f"{_FORMAT}|{stat.st_size}|{stat.st_mtime_ns}|".encode() + os.fsencode(where))
    key.update(_sample(path, stat.st_size))
    # A name of 48 characters and what is appended to it fit what a file system takes, 255 bytes.
    return cache_root() / "models" / f"{path.stem[:48]}-{key.hexdigest()[:20]}"


def _sample(path: Path, num_bytes: int) -> bytes:
    """A digest of the head and of samples from the rest: all of a small file.

    |----- head -----|        |--|        |--|        |--|        |--|   the last sample ends with the file
    """
    runs = [(0, _HEAD_BYTES)]
    if num_bytes > _HEAD_BYTES:
        rest = num_bytes - _SAMPLE_BYTES - _HEAD_BYTES
        runs += [(_HEAD_BYTES + rest * i // _NUM_SAMPLES, _SAMPLE_BYTES) for i in range(1, _NUM_SAMPLES + 1)]
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for start, length in runs:
            file.seek(start)
            for _ in range(length // _READ_BYTES):
                digest.update(file.read(_READ_BYTES))
    return digest.digest()
