"""Files of what an algorithm derives from weights or a calibration run: safetensors, with what they are for."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from narrows.errors import ConfigError
from narrows.select.fingerprint import fingerprint
from narrows.select.shape import SelectorShape

VERSION = "2"


def save(path: Path, name: str, model: str, arrays: Mapping[str, Tensor]) -> None:
    """Write the calibration of algorithm `name` for the model of that fingerprint; appears whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"narrows": "calibration", "version": VERSION, "selector": name, "model": model}
        save_file(dict(arrays), partial, about | {"content": _content(name, arrays)})
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"select: {path} can not be written: {error}; name a file in a folder that can") from error


def read(
    path: Path | None, name: str, shape: SelectorShape, sizes: Mapping[str, tuple[int, int | None]]
) -> tuple[dict[str, Tensor], str]:
    """The arrays of algorithm `name` for a model of this shape, and the fingerprint of them all.

    Each array is [L, Hkv, *size] float32; sizes that are None agree with one another and are multiples of 4.
    Raises ConfigError naming what to do when there is no file, or one for something else.
    """
    make = f"make one with `narrows profile hash --select {name}`"
    if path is None:
        raise ConfigError(f"select: {name} needs a calibration file; {make}")
    if not path.is_file():
        raise ConfigError(f"select: {name}: there is no calibration file {path}; {make}")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"select: {name}: {path} is truncated or no safetensors file ({error}); {make}") from error
    if about.get("narrows") != "calibration" or about.get("version") != VERSION:
        raise ConfigError(f"select: {name}: {path} is no calibration file of version {VERSION}; {make}")
    if about.get("selector") != name:
        raise ConfigError(f"select: {name}: {path} is a calibration of {about.get('selector')}; {make}")
    if shape.model is not None and about.get("model") != shape.model:
        raise ConfigError(
            f"select: {name}: {path} was made with another model ({about.get('model')}, not {shape.model}); {make}"
        )
    free = next((found[key].shape[-1] for key, (_, width) in sizes.items() if width is None and key in found), 0)
    for key, (rows, width) in sizes.items():
        wanted = (shape.num_layers, shape.num_kv_heads, rows, free if width is None else width)
        has = tuple(found[key].shape) if key in found else None
        if has != wanted or wanted[3] % 4:
            raise ConfigError(
                f"select: {name}: {path} does not fit the model: {key} is {has}, this model needs {wanted}; {make}"
            )
    content = _content(name, {key: found[key] for key in sizes})
    if about.get("content") != content:
        raise ConfigError(f"select: {name}: {path} is damaged (its checksum differs); {make}")
    return {key: found[key].float() for key in sizes}, content


def _content(name: str, arrays: Mapping[str, Tensor]) -> str:
    """The fingerprint of a calibration's arrays."""
    sums = [(key, hashlib.sha256(arrays[key].contiguous().numpy().tobytes()).hexdigest()) for key in sorted(arrays)]
    return fingerprint(name, VERSION, sums)
