"""What clients receive: the JSON of choices, chunks, log probabilities and usage, as OpenAI shapes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from narrows.core.request import FinishReason, TokenLogprob
from narrows.server.generate import Call, Update
from narrows.server.stream import Piece, PlacedToken
from narrows.server.tokenizer import Tokenizer

Json = dict[str, Any]

_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


class Shape(Protocol):
    """How one route dresses choices."""

    @property
    def object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def choice(self, index: int, text: str, tokens: Sequence[PlacedToken], reason: FinishReason) -> Json:
        """A whole choice."""
        ...

    def first_chunks(self, num_choices: int) -> list[Json]:
        """The choices sent before any text."""
        ...

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        """The choices, one a chunk, that say what `piece` says; none when it has nothing to say."""
        ...


@dataclass(frozen=True, slots=True)
class ChatShape:
    """/v1/chat/completions"""

    tokenizer: Tokenizer
    logprobs: bool
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def choice(self, index: int, text: str, tokens: Sequence[PlacedToken], reason: FinishReason) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def first_chunks(self, num_choices: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(num_choices)]

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        chunks = []
        if piece.text or (self.logprobs and piece.tokens):
            chunks.append(self._chunk(index, {"content": piece.text}, self._logprobs(piece.tokens)))
        if piece.finish_reason is not None:
            chunks.append(self._chunk(index, {}, None, piece.finish_reason))
        return chunks

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, reason: FinishReason | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if not self.logprobs:
            return None
        return {"content": [self._token(known) for known in _known(tokens)], "refusal": None}

    def _token(self, known: TokenLogprob) -> Json:
        best = [self._entry(id, logprob) for id, logprob in known.top]
        return self._entry(known.token, known.logprob) | {"top_logprobs": best}

    def _entry(self, id: int, logprob: float) -> Json:
        content = self.tokenizer.token_bytes(id)
        text = content.decode(errors="replace")
        return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": list(content)}


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """/v1/completions. `echoed` is the prompt's text per choice when it is to be repeated."""

    tokenizer: Tokenizer
    logprobs: int | None
    echoed: Sequence[str] = ()
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def choice(self, index: int, text: str, tokens: Sequence[PlacedToken], reason: FinishReason) -> Json:
        return self._choice(index, self.echoed[index] + text if self.echoed else text, tokens, reason)

    def first_chunks(self, num_choices: int) -> list[Json]:
        return [self._choice(index, text, (), None) for index, text in enumerate(self.echoed)]

    def chunks(self, index: int, piece: Piece) -> list[Json]:
        if piece.text or piece.finish_reason is not None or (self.logprobs is not None and piece.tokens):
            return [self._choice(index, piece.text, piece.tokens, piece.finish_reason)]
        return []

    def _choice(self, index: int, text: str, tokens: Sequence[PlacedToken], reason: FinishReason | None) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if self.logprobs is None:
            return None
        known = _known(tokens)
        return {
            "tokens": [self._name(entry.token) for entry in known],
            "token_logprobs": [max(entry.logprob, _LOWEST_LOGPROB) for entry in known],
            "top_logprobs": [self._best(entry) for entry in known] if self.logprobs else None,
            "text_offset": [token.offset for token in tokens],
        }

    def _best(self, entry: TokenLogprob) -> dict[str, float]:
        """The best tokens, and the chosen one where it is not among them."""
        pairs = (*entry.top, (entry.token, entry.logprob))
        return {self._name(id): max(logprob, _LOWEST_LOGPROB) for id, logprob in pairs}

    def _name(self, id: int) -> str:
        """The token's text; for a part of a character its bytes, so that different tokens keep different names."""
        content = self.tokenizer.token_bytes(id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _known(tokens: Sequence[PlacedToken]) -> list[TokenLogprob]:
    known = [placed.token.logprob for placed in tokens]
    assert all(known), "the engine left out log probabilities that were asked for"
    return [entry for entry in known if entry is not None]


@dataclass(slots=True)
class Tally:
    """Counts tokens of one call while its updates pass."""

    call: Call
    completion_tokens: int = 0
    _cached: dict[int, int] = field(default_factory=dict)  # by prompt

    def add(self, update: Update) -> None:
        self.completion_tokens += len(update.piece.tokens)
        prompt, choice = divmod(update.index, self.call.num_choices)
        if choice == 0:  # later choices of a prompt find the first one's KV, which says nothing about the prompt
            self._cached[prompt] = max(self._cached.get(prompt, 0), update.cached_tokens)

    def usage(self) -> Json:
        """Each prompt counts once, however many choices continue it."""
        prompt_tokens = sum(len(prompt) for prompt in self.call.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def event(data: Json) -> bytes:
    """One server-sent event. ASCII only: some clients split lines at U+2028 and its like."""
    return b"data: " + json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n\n"


DONE = b"data: [DONE]\n\n"
