"""From a validated call to requests on the engine, and back to text, choice by choice."""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from narrows.core.ids import RequestId
from narrows.core.request import FinishReason, Request, SamplingParams
from narrows.errors import RequestError, Unavailable
from narrows.runtime.client import Client, ServedModel, stream
from narrows.server.errors import ContextExceeded, GenerationFailed
from narrows.server.stream import Piece, TextStream
from narrows.server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """What one HTTP call may ask for."""

    max_body_bytes: int = 8 * 2**20
    max_unread_bytes: int = 64 * 2**20  # of bodies that have not come in whole, over all connections
    body_timeout_s: float = 30.0  # between two pieces of a body
    max_choices: int = 128  # prompts times n
    max_waiting: int = 256  # requests that the engine lets wait: more choices than that would never be admitted
    max_stops: int = 64  # stop strings


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call: `num_choices` continuations of each prompt. Choice i belongs to prompt i // num_choices."""

    id: str
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    num_choices: int = 1
    include_stop: bool = False
    skip_special_tokens: bool = True

    def requests(self) -> list[Request]:
        """Choice k of a prompt is request `ID-k` with seed + k, so that choices differ and can be repeated."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.num_choices)]
        return [
            Request(
                RequestId(f"{self.id}-{index}"),
                prompt,
                replace(self.params, seed=_seed(self.params.seed, index % self.num_choices)),
            )
            for index, prompt in enumerate(prompts)
        ]


@dataclass(frozen=True, slots=True)
class Update:
    """News of one choice."""

    index: int
    piece: Piece
    cached_tokens: int


def make_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def check(call: Call, model: ServedModel, limits: Limits, prompt_name: str, max_tokens_name: str) -> Call:
    """The call as the engine takes it. Raises RequestError for what this model or server does not allow."""
    params = call.params
    if call.num_choices < 1:
        raise RequestError("n", f"{call.num_choices} is not allowed; use a whole number of at least 1")
    num_choices = call.num_choices * len(call.prompts)
    most = min(limits.max_choices, limits.max_waiting)
    if num_choices > most:
        name = "n" if call.num_choices > 1 else prompt_name
        why = "are allowed" if most == limits.max_choices else "may wait at once (max_queue)"
        raise RequestError(name, f"asks for {num_choices} choices; {most} at most {why}")
    if len(params.stop) > limits.max_stops:
        raise RequestError("stop", f"{len(params.stop)} strings; {limits.max_stops} at most are allowed")
    for prompt in call.prompts:  # first, since it is quick for any length
        _check_context(prompt, params, model.max_model_len, prompt_name, max_tokens_name)
    for name, ids in [("stop_token_ids", params.stop_token_ids), *((prompt_name, ids) for ids in call.prompts)]:
        if outside := [id for id in ids if not 0 <= id < model.vocab_size]:
            raise RequestError(name, f"token {outside[0]} is outside the vocabulary (0 to {model.vocab_size - 1})")
    return replace(call, params=replace(params, top_k=min(params.top_k, model.vocab_size)))


def check_length(text: str, tokenizer: Tokenizer, model: ServedModel, name: str) -> None:
    """Raises ContextExceeded for a text that can not fit, so that it need not be tokenized to know it."""
    longest = tokenizer.max_chars_per_token
    if longest is not None and len(text) > model.max_model_len * longest:
        raise ContextExceeded(
            name,
            f"has {len(text)} characters; at most {model.max_model_len * longest} can fit, since this model takes "
            f"{model.max_model_len} tokens in all and none of them stands for more than {longest} characters",
        )


def _check_context(
    prompt: Sequence[int], params: SamplingParams, max_model_len: int, prompt_name: str, max_tokens_name: str
) -> None:
    room = max_model_len - len(prompt)
    if not prompt:
        raise RequestError(prompt_name, "has no tokens; send at least one")
    if room < 1:
        raise ContextExceeded(
            prompt_name,
            f"has {len(prompt)} tokens; this model takes {max_model_len} in all, one of them for the answer",
        )
    for name, wanted in ((max_tokens_name, params.max_tokens), ("min_tokens", params.min_tokens)):
        if wanted is not None and wanted > room:
            raise ContextExceeded(
                name,
                f"{wanted} tokens do not fit: the prompt has {len(prompt)} and this model takes {max_model_len} in "
                f"all; use at most {room}",
            )


def _seed(seed: int | None, offset: int) -> int | None:
    """seed + offset, within 64 bits."""
    return None if seed is None else (seed + offset + 2**63) % 2**64 - 2**63


class Engine:
    """The client as HTTP calls use it. Knows what is open, so that a shutdown can end it."""

    def __init__(self, client: Client, tokenizer: Tokenizer) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self._open: set[RequestId] = set()
        self._closing = False

    async def run(self, call: Call) -> AsyncGenerator[Update, None]:
        """Updates until every choice has ended. Closing the generator early aborts the rest.

        Raises QueueFull, Unavailable and RequestError before the first update, GenerationFailed at any time; then no
        request of the call is left.
        """
        if self._closing:
            raise Unavailable("the server is shutting down")
        requests = call.requests()
        decode = partial(self.tokenizer.decode, skip_special_tokens=call.skip_special_tokens)
        choices = {
            request.id: (index, TextStream(decode, request.params, call.include_stop))
            for index, request in enumerate(requests)
        }
        unfinished = set(choices)
        self._open |= unfinished
        try:
            async with aclosing(stream(self.client, *requests)) as outputs:
                async for output in outputs:
                    if output.request not in unfinished:
                        continue  # it was cut at a stop string; this is the rest
                    if output.finish_reason is FinishReason.ERROR:
                        raise GenerationFailed(output.error or "the engine gave no reason")
                    index, text = choices[output.request]
                    piece = text.push(output)
                    if piece.finish_reason is not None:
                        unfinished.discard(output.request)
                        if output.finish_reason is None:
                            self.client.abort(output.request, FinishReason.STOP)
                    yield Update(index, piece, output.cached_tokens)
                    if not unfinished:
                        return
        finally:
            self._open -= choices.keys()

    def close(self) -> None:
        """Refuse what comes from now on, and end every open request with ABORT, which its own call then reports.

        The client stays open.
        """
        self._closing = True
        for request in tuple(self._open):
            self.client.abort(request)
