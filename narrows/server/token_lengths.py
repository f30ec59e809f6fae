"""How much text a token can stand for, so that a text that can not fit is refused before it is tokenized."""

from collections.abc import Collection, Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

# Characters that a normalizer makes one of, at most. Unicode composes up to four (UAX 15, the expansion of NFD).
_SHRINKS = {"NFC": 4, "NFD": 1, "Prepend": 1}
_KEEPS_ALL = frozenset({"ByteLevel", "Metaspace", "Digits"})


def max_chars_per_token(settings: Mapping[str, Any], vocabulary: Collection[str]) -> int | None:
    """Characters of a text that one token stands for, at most. None when this tokenizer may drop text, or join any
    amount of it into one token: then no length can be refused. `settings` is what tokenizer.json holds.
    """
    normalizers = _steps(settings.get("normalizer"), "normalizers")
    splits = _steps(settings.get("pre_tokenizer"), "pretokenizers")
    added = settings.get("added_tokens") or ()
    if not _knows_every_byte(settings["model"], splits, vocabulary):
        return None  # what is unknown is dropped, or one token stands for all of it
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # such a token takes the white space beside it
    if not all(_keeps_all(step) for step in splits) or not all(map(_shrinks_little, normalizers)):
        return None
    factor = 1
    for step in normalizers:
        factor *= _SHRINKS.get(step["type"], 1)
    # A token is written with one character for each character of the text, or for each of its bytes.
    return factor * max(map(len, vocabulary))


def _knows_every_byte(
    model: Mapping[str, Any], splits: Collection[Mapping[str, Any]], vocabulary: Collection[str]
) -> bool:
    if model["type"] != "BPE":
        return False
    if any(step["type"] == "ByteLevel" for step in splits):
        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _keeps_all(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPS_ALL or (step["type"] == "Split" and step["behavior"] != "Removed")


def _shrinks_little(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) in range(1, len(step["content"]) + 1)
    return step["type"] in _SHRINKS


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence, or of sequences in it; else the one step."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [deeper for each in step[inner] for deeper in _steps(each, inner)]
