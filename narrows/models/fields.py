"""Typed access to a JSON object from outside, with errors that name the file, the field and what was found."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrows.errors import ModelError


class Fields:
    """One JSON object. A field that is null counts as absent, as it does to the libraries that write these files."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self._path = path
        self._values = values
        self._prefix = prefix

    def error(self, name: str, message: str) -> ModelError:
        return ModelError(f"{self._path}: {self._prefix}{name}: {message}")

    def has(self, name: str) -> bool:
        """True also for an explicit null."""
        return name in self._values

    def raw(self, name: str) -> Any:
        """The value as it stands, None when absent."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(name, f"{value!r} is not a whole number of at least {least}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.raw(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.error(name, f"{value!r} is not a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"{value!r} is not true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"{value!r} is not a string")
        return value

    def nested(self, name: str) -> "Fields":
        """The object of that name; an empty one when absent."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"{value!r} is not an object")
        return Fields(self._path, value, f"{self._prefix}{name}.")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id, a list of them, or none."""
        value = self.raw(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(name, f"{value!r} is not a token id or a list of them")
        return tuple(ids)

    def _value(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value


def read_fields(path: Path) -> Fields:
    """Raises ModelError when the file is not there or holds no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: a model folder needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can not be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} holds no JSON object")
    return Fields(path, values)
