"""Named tensors from a folder's safetensors files: memory-mapped, checked, never unpickled."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from narrows.errors import ModelError
from narrows.models.fields import read_fields

INDEX_NAME = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FILE_DTYPES = {"F32", "F16", "BF16"}


class Weights:
    """Tensors by name, seen from a prefix. Each `take` checks the shape and remembers the name for `leftovers`."""

    def __init__(
        self, files: dict[str, "_File"], dtype: torch.dtype, prefix: str = "", taken: set[str] | None = None
    ) -> None:
        self._files = files  # full tensor name -> the file that holds it
        self._dtype = dtype
        self._prefix = prefix
        self._taken = set() if taken is None else taken

    def under(self, prefix: str) -> "Weights":
        """The same tensors, from inside `prefix` (which ends in a dot)."""
        return Weights(self._files, self._dtype, self._prefix + prefix, self._taken)

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in the model's dtype. Shares the mapped file's memory when it is stored in that dtype.

        Raises ModelError naming the tensor when it is missing or of another shape or an unknown dtype.
        """
        name = self._prefix + name
        if name not in self._files:
            raise ModelError(f"tensor {name} is missing (expected shape {list(shape)})")
        self._taken.add(name)
        return self._files[name].read(name, shape).to(self._dtype)

    def leftovers(self) -> list[str]:
        """Names that nobody took, sorted."""
        return sorted(set(self._files) - self._taken)


class _File:
    """One safetensors file, mapped as long as a tensor of it lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle: Any = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{path} is missing") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is truncated or no safetensors file: {error}") from error

    def names(self) -> list[str]:
        return list(self._handle.keys())

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        part = self._handle.get_slice(name)
        found = part.get_shape()
        if found != list(shape):
            raise ModelError(f"{self.path}: tensor {name} has shape {found}, expected {list(shape)}")
        if part.get_dtype() not in _FILE_DTYPES:
            supported = ", ".join(sorted(_FILE_DTYPES))
            raise ModelError(f"{self.path}: tensor {name} is stored as {part.get_dtype()}; supported are {supported}")
        tensor: Tensor = self._handle.get_tensor(name)
        return tensor


def open_weights(folder: Path, dtype: torch.dtype) -> Weights:
    """Open all of a folder's safetensors files; reads headers only.

    With an index, the files it names; without, every *.safetensors. Raises ModelError naming the file: no weights,
    a missing shard, one that is truncated or corrupt, a tensor in two files or not in the file the index says.
    """
    index = folder / INDEX_NAME
    files = _indexed(index) if index.exists() else _listed(folder)
    return Weights(files, dtype)


def _indexed(index: Path) -> dict[str, _File]:
    where = read_fields(index).raw("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise ModelError(f"{index}: weight_map: is not an object of tensor names and file names")
    shards: dict[str, _File] = {}
    for shard in sorted(set(where.values())):
        if Path(shard).name != shard:
            raise ModelError(f"{index}: weight_map: {shard!r} is not a plain file name")
        shards[shard] = _File(index.with_name(shard))
    held = {shard: set(file.names()) for shard, file in shards.items()}
    for name, shard in where.items():
        if name not in held[shard]:
            raise ModelError(f"{index.with_name(shard)}: tensor {name} is missing, though {INDEX_NAME} places it there")
    return {name: shards[shard] for name, shard in where.items()}


def _listed(folder: Path) -> dict[str, _File]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        reason = (
            f"; {pickles[0]} is a pickle, which can run code and is never opened: convert it to safetensors"
            if pickles
            else ""
        )
        raise ModelError(f"{folder} holds no safetensors file{reason}")
    files: dict[str, _File] = {}
    for file in map(_File, paths):
        for name in file.names():
            if name in files:
                raise ModelError(f"tensor {name} is in {files[name].path} and in {file.path}, and no index says which")
            files[name] = file
    return files
