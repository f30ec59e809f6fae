"""Real texts of this machine as long prompts: what every Python brings along, in kinds that differ."""

import ast
import itertools
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Protocol

from narrows.errors import ConfigError

KINDS = ("code", "docstrings", "tables", "prose", "mixed")
MIXED = ("code", "docstrings")  # prose is what importance is measured on when nothing else is given


class Encoder(Protocol):
    """What is needed of server.tokenizer.Tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Documents:
    """Prompts that share their beginning from round to round and never their end.

    Document d is a stretch of one text: its prefix of `prefix_tokens`, then a tail for each round, from what follows.

        text of a kind   |-- prefix 0 --|- tail -|- tail -|-- prefix 1 --|- tail -|- tail -|...
        (d = 0, round 1) |-- prefix 0 --|        |- tail -|

    Prompt d is d tokens shorter than `prompt_tokens`, so that a profile can hold a group for each (see bench.oracle).
    """

    def __init__(
        self, encoder: Encoder, kind: str, *, prompt_tokens: int, prefix_tokens: int, documents: int, rounds: int
    ) -> None:
        """`kind` is one of KINDS. Raises ConfigError when this machine has not enough text of it."""
        kinds = MIXED if kind == "mixed" else (kind,)
        self.prompt_tokens, self.prefix_tokens = prompt_tokens, prefix_tokens
        beginning = encoder.encode("")[:1]  # what the tokenizer begins every prompt with, if anything
        self._tail = prompt_tokens - prefix_tokens
        length = prefix_tokens + rounds * self._tail
        streams = {name: _tokens(encoder, name, length * -(-documents // len(kinds))) for name in kinds}
        self._texts: list[tuple[int, ...]] = []
        for document in range(documents):
            at, which = divmod(document, len(kinds))
            stretch = streams[kinds[which]][at * length : (at + 1) * length]
            self._texts.append((*beginning, *stretch)[:length])

    def prefix(self, document: int) -> tuple[int, ...]:
        """[prefix_tokens + 1] tokens: one more than is shared, since the last token of a prompt is always computed."""
        return self._texts[document][: self.prefix_tokens + 1]

    def prompt(self, document: int, round: int) -> tuple[int, ...]:
        """[prompt_tokens - document] tokens."""
        text, first = self._texts[document], self.prefix_tokens + round * self._tail
        return text[: self.prefix_tokens] + text[first : first + self._tail - document]


def _tokens(encoder: Encoder, kind: str, count: int) -> list[int]:
    tokens: list[int] = []
    for text in _SOURCES[kind]():
        tokens += encoder.encode(text, add_special_tokens=False)
        if len(tokens) >= count:
            return tokens
    raise ConfigError(
        f"text: this machine has {len(tokens)} tokens of {kind} and {count} are needed; use fewer rounds, smaller "
        "batches, shorter prompts or another kind of text"
    )


def _code() -> Iterator[str]:
    """The standard library's modules."""
    return (path.read_text(encoding="utf-8", errors="replace") for path in _modules())


def _docstrings() -> Iterator[str]:
    """What the standard library says of itself, without the code."""
    for path in _modules():
        tree = ast.parse(path.read_bytes())
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        yield "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


def _tables() -> Iterator[str]:
    """Character sets: numbers, names and hardly a sentence."""
    for path in sorted((_library() / "encodings").glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _prose() -> Iterator[str]:
    """Python's language reference."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return (text for _, text in sorted(topics.items()))


def _modules() -> Iterator[Path]:
    library = _library()
    packages = (path for path in sorted(library.glob("*/*.py")) if path.parent.name not in ("test", "site-packages"))
    return itertools.chain(sorted(library.glob("*.py")), packages)


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


_SOURCES = {"code": _code, "docstrings": _docstrings, "tables": _tables, "prose": _prose}
