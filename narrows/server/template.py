"""A model's chat template: jinja source from its folder, run in a sandbox, messages in and prompt text out."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from narrows.errors import ModelError, RequestError

FILE_NAME = "chat_template.jinja"
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

Message = Mapping[str, Any]  # at least "role" and "content"


@dataclass(frozen=True, slots=True)
class Source:
    """A template's text and the file that it stands in."""

    text: str
    file: Path


class ChatTemplate:
    """One compiled template. `variables` are the names it always sees, such as bos_token.

    `now` is what `strftime_now` in a template reads. Raises ModelError when the source does not compile.
    """

    def __init__(
        self, source: Source, variables: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source.text)
        except TemplateSyntaxError as error:
            raise ModelError(f"{source.file}: chat_template, line {error.lineno}: {error.message}") from error
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Raises RequestError when the template refuses the messages or `variables`."""
        if taken := RESERVED & variables.keys():
            raise RequestError(f"chat_template_kwargs.{min(taken)}", "is set by the server; leave it out")
        values = {**self._variables, **variables}
        try:
            text = self._template.render(
                values,
                messages=list(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            text.encode()  # lone surrogates, which JSON can carry, are no text
        # What a template does with values it does not expect is its own affair; these are the ways it can end.
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError("messages", f"the model's chat template refuses them: {error}") from error
        return text


def find_source(folder: Path, config_file: Path, config: Mapping[str, Any]) -> Source | None:
    """chat_template.jinja, else `chat_template` of `config`, which is what `config_file` holds, else None.

    A list of named templates gives the one called "default". Raises ModelError naming the file.
    """
    file = folder / FILE_NAME
    if file.exists():
        return Source(read_text(file), file)
    entry = config.get("chat_template")
    if isinstance(entry, list):
        try:
            named = {item["name"]: item["template"] for item in entry}
        except (TypeError, KeyError) as error:
            raise ModelError(f"{config_file}: chat_template must list objects with name and template") from error
        if "default" not in named:
            raise ModelError(f"{config_file}: chat_template has {sorted(named)} but none called 'default'")
        entry = named["default"]
    if entry is not None and not isinstance(entry, str):
        raise ModelError(f"{config_file}: chat_template must be text, not {type(entry).__name__}")
    return None if entry is None else Source(entry, config_file)


def read_text(file: Path) -> str:
    """A file of a model folder. Raises ModelError naming it."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing; a model folder needs its tokenizer") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} can not be read: {error}") from error


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes for HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> str:
    raise TemplateError(message)
