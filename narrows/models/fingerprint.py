"""Which model a folder holds, for files that are true for one model only. Standard library only."""

import hashlib
from pathlib import Path

from narrows.errors import ModelError

_SAMPLE_BYTES = 64 << 10


def folder_fingerprint(folder: Path) -> str:
    """Sixteen hex digits of config.json and of each weight file its name, size, first and last 64 KiB.

    Takes milliseconds whatever the model's size; another place or date of the same files is the same model. Raises
    ModelError when a file can not be read.
    """
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                size = path.stat().st_size
                digest.update(f"|{path.name}|{size}|".encode() + file.read(_SAMPLE_BYTES))
                file.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"{folder}: {error.filename or 'a file'} can not be read: {error.strerror}") from error
    return digest.hexdigest()[:16]
