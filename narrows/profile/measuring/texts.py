"""The texts that profiles are made of. Standard library only."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from narrows.errors import ConfigError

MOST_BYTES = 64 << 20  # of all files together: far more than a profile is made of, and no more than memory bears
_FIELDS = ("text", "prompt")


def read_texts(files: Sequence[Path]) -> list[str]:
    """One text per file, or per line of a JSONL file: its "text" or "prompt" (a list of chat messages gives their
    contents). Without files: prose that every Python brings along, the chapters of its language reference.

    Reads at most MOST_BYTES. Raises ConfigError naming file, line and fix.
    """
    if not files:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
        return [text for _, text in sorted(topics.items())]
    texts: list[str] = []
    left = MOST_BYTES
    for file in files:
        try:
            with file.open("rb") as source:
                raw = source.read(left)
        except OSError as error:
            raise ConfigError(f"text: {file} can not be read: {error.strerror}; name text or JSONL files") from error
        left -= len(raw)
        try:
            # A character may be cut in two where the limit fell.
            content = raw.decode("utf-8-sig", errors="strict" if left else "ignore")
        except UnicodeDecodeError as error:
            raise ConfigError(f"text: {file} is not UTF-8 text ({error.reason} at byte {error.start})") from error
        texts += _lines(file, content, whole=left > 0) if file.suffix == ".jsonl" else [content]
        if not left:
            break
    if not any(text.strip() for text in texts):
        raise ConfigError(f"text: {', '.join(map(str, files))} hold no text; name files that do")
    return texts


def _lines(file: Path, content: str, *, whole: bool) -> list[str]:
    lines = content.split("\n")
    if not whole:
        lines.pop()
    return [_text(f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _text(where: str, line: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"text: {where} is not JSON ({error}); a .jsonl file has one object a line") from error
    fields = [record.get(name) for name in _FIELDS] if isinstance(record, dict) else []
    value: Any = next((field for field in fields if isinstance(field, str | list)), None)
    if isinstance(value, list):
        contents = [message.get("content") for message in value if isinstance(message, dict)]
        value = "\n\n".join(text for text in contents if isinstance(text, str)) or None
    if not isinstance(value, str):
        raise ConfigError(f'text: {where} has neither "text" nor "prompt" that is text')
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"text: {where} has half of a surrogate pair, which is no character; leave it out")
    return value
