"""Profiles on disk: one safetensors file with its kind, version and checksum in the header. No pickle.

A file is replaced by rename, so a reader (or an instance that loads it again while serving) sees the old one or the
new one, never a mixture.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from narrows.errors import ConfigError

Arrays = Mapping[str, npt.NDArray[Any]]


def write(path: Path, kind: str, version: int, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Write `arrays` and a header of JSON values. Raises ConfigError when the place can not be written."""
    digest = _digest(header, arrays)
    metadata = {"kind": kind, "version": str(version), "header": json.dumps(header), "sha256": digest}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"profile: {path} can not be written: {error.strerror or error}; name a folder that exists and is yours"
        ) from error


def read(path: Path, kind: str, version: int) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Header and arrays of a file that `write` made with this kind and version; the arrays are read-only.

    Raises ConfigError saying what is wrong and how to make the file anew.
    """
    again = f"make it anew with: narrows profile {kind}"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except FileNotFoundError as error:
        raise ConfigError(f"profile: there is no file {path}; {again}") from error
    except (SafetensorError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"profile: {path} is damaged or no profile ({error}); {again}") from error
    if metadata.get("kind") != kind:
        what = f"a profile of {metadata['kind']}" if "kind" in metadata else "no profile"
        raise ConfigError(f"profile: {path} is {what}, not of {kind}; {again}")
    if metadata.get("version") != str(version):
        raise ConfigError(
            f"profile: {path} has version {metadata.get('version')}, this program reads version {version}; {again}"
        )
    try:
        header = json.loads(metadata["header"])
        intact = metadata["sha256"] == _digest(header, arrays)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"profile: {path} is damaged (no header); {again}") from error
    if not intact:
        raise ConfigError(f"profile: {path} is damaged (its checksum differs); {again}")
    for array in arrays.values():
        array.flags.writeable = False
    return header, arrays


def _digest(header: Mapping[str, Any], arrays: Arrays) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"|{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
