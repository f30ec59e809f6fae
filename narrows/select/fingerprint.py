"""What tells one selector from another."""

import hashlib

from narrows.errors import ConfigError


def check_ratio(ratio: float) -> float:
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(f"select_ratio: {ratio} is not a part of a request's entries; use one in (0, 1], such as 0.2")
    return ratio


def fingerprint(*parts: object) -> str:
    """Short, and another one whenever any part differs."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
