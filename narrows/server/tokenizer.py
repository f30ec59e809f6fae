"""Text to token ids and back, from a model's tokenizer.json and tokenizer_config.json."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from narrows.errors import ModelError, RequestError
from narrows.server.template import ChatTemplate, Message, find_source, read_text
from narrows.server.token_lengths import max_chars_per_token

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model folder. Safe to use from several threads.

    Raises ModelError when a file is missing or unreadable. A folder without a chat template is served, but
    `apply_chat` refuses.
    """

    def __init__(self, folder: str | Path, now: Callable[[], datetime] = datetime.now) -> None:
        self.folder = Path(folder)
        file = self.folder / "tokenizer.json"
        source = read_text(file)
        try:
            self._backend = Backend.from_str(source)
        except Exception as error:  # the library raises plain Exception, and nothing narrower
            raise ModelError(f"{file}: {error}") from error
        # A saved limit would cut prompts silently.
        self._backend.no_truncation()
        self._backend.no_padding()

        config_file = self.folder / "tokenizer_config.json"
        config = _read_json(config_file)
        self.named_tokens = {name: _content(config[name]) for name in _NAMED_TOKENS if config.get(name)}
        template = find_source(self.folder, config_file, config)
        self.chat_template = None if template is None else ChatTemplate(template, self.named_tokens, now)

        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self._added = {id: token.content for id, token in added.items()}
        settings = json.loads(source)
        self.max_chars_per_token = max_chars_per_token(settings, self._backend.get_vocab())
        decoder = settings.get("decoder") or {}
        self._decoders = {step["type"] for step in decoder.get("decoders", [decoder]) if step}

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also what the model wants around it, such as BOS.

        Special tokens written out in the text become those tokens. Other threads run meanwhile. Raises RequestError
        for a string that is no text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                "prompt", f"character {error.start} is half of a surrogate pair, which is not text"
            ) from error
        # A batch, of one: the library's other ways keep Python's lock, and with it every client, for seconds.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary give nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that the model's chat template makes of `messages`; `variables` are further names it sees.

        Raises RequestError when there is no template or it refuses them.
        """
        if self.chat_template is None:
            raise RequestError(
                "messages", "this model has no chat template; send the finished prompt to /v1/completions instead"
            )
        return self.chat_template.render(messages, add_generation_prompt, tools, variables or {})

    def apply_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of `render_chat`; the template itself writes BOS and the like."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
        return self.encode(text, add_special_tokens=False)

    def token(self, id: int) -> str:
        """The token as it stands in the vocabulary; empty for an id outside it."""
        return self._backend.id_to_token(id) or ""

    def token_bytes(self, id: int) -> bytes:
        """The bytes this token adds to the text, which need not be whole characters."""
        if id in self._added:
            return self._added[id].encode()
        token = self.token(id)
        if "ByteLevel" in self._decoders:
            return b"".join(self._byte_of.get(char, char.encode()) for char in token)
        if "ByteFallback" in self._decoders and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    @cached_property
    def _byte_of(self) -> dict[str, bytes]:
        """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(0x100) if byte not in printable]
        alphabet = {chr(byte): bytes([byte]) for byte in printable}
        return alphabet | {chr(0x100 + rank): bytes([byte]) for rank, byte in enumerate(others)}

    def _named_id(self, name: str) -> int | None:
        content = self.named_tokens.get(name)
        if content is None:
            return None
        id: int | None = self._backend.token_to_id(content)
        return id


def _read_json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        value = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} must hold an object")
    return value


def _content(token: str | dict[str, Any]) -> str:
    """A token is written as a string or as {"content": ...}."""
    return token if isinstance(token, str) else str(token["content"])
