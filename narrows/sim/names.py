"""Looking things up by the name a user wrote."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from narrows.errors import ConfigError

Value = TypeVar("Value")


def find(known: Mapping[str, Value], name: str, field: str) -> Value:
    """known[name], in any spelling of case. Raises ConfigError naming the field and the nearest known name."""
    spelled = {key.lower(): key for key in known}
    key = spelled.get(name.lower())
    if key is None:
        raise ConfigError(f"{field}: {name!r} is not known{nearest(name, known)}")
    return known[key]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, or all of them."""
    spelled = {key.lower(): key for key in known}
    near = difflib.get_close_matches(name.lower(), spelled, n=1)
    if near:
        return f"; did you mean {spelled[near[0]]!r}?"
    return f"; known are {', '.join(sorted(spelled.values()))}"
