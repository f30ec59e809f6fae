"""Offline batches: `LLM(...).generate(prompts, SamplingParams(...))`, over the same processes that serve."""

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from narrows.config import DEFAULT_MODEL, EngineConfig
from narrows.core.ids import RequestId
from narrows.core.request import FinishReason, Request, SampledToken, SamplingParams
from narrows.errors import RequestError
from narrows.profiles import ensure_files
from narrows.runtime.client import Output
from narrows.runtime.cluster import Observer, open_cluster
from narrows.server.stream import TextStream
from narrows.server.template import Message
from narrows.server.tokenizer import Tokenizer

Prompt = str | Sequence[int]
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt. `error` is set exactly when finish_reason is ERROR."""

    prompt_token_ids: tuple[int, ...]
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason
    cached_tokens: int
    error: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)


class _Pending:
    """Collects one request's outputs, on the cluster's thread, and tells when it has ended."""

    def __init__(self, llm: "LLM", request: Request) -> None:
        self.request = request
        self.ended = threading.Event()
        self._llm = llm
        self._stream = TextStream(llm.tokenizer.decode, request.params)
        self._text: list[str] = []
        self._tokens: list[SampledToken] = []
        self.result: Completion | None = None

    def take(self, output: Output) -> None:
        if self.ended.is_set():
            return  # the end of an abort after a stop string
        piece = self._stream.push(output)
        self._text.append(piece.text)
        self._tokens.extend(placed.token for placed in piece.tokens)
        if piece.finish_reason is None:
            return
        self.result = Completion(
            self.request.prompt,
            "".join(self._text),
            tuple(self._tokens),
            piece.finish_reason,
            output.cached_tokens,
            output.error,
        )
        self.ended.set()
        if output.finish_reason is None:
            self._llm.cluster.abort(self.request.id, FinishReason.STOP)
        self._llm.slots.release()


class LLM:
    """A model over its own prefill and decode processes. `settings` are the fields of EngineConfig; `observers` hear
    every event, on the cluster's thread.

    Use it as a context manager, or call `close`. Raises ModelError, ConfigError or StartFailed.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, observers: Sequence[Observer] = (), **settings: Any) -> None:
        unknown = set(settings) - set(EngineConfig.__dataclass_fields__)
        if unknown:
            raise TypeError(f"LLM has no setting {', '.join(sorted(unknown))}; see narrows.config.EngineConfig")
        config = EngineConfig(model=model, **settings)
        self.cluster = open_cluster(config, observers=observers, ensure_files=ensure_files)
        try:
            self.tokenizer = Tokenizer(self.cluster.model.folder)
            self.cluster.wait_ready(START_TIMEOUT_S)
        except BaseException:
            self.cluster.close()
            raise
        self.slots = threading.Semaphore(config.max_queue)  # as many as may wait: none is refused

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """One completion per prompt (text or token ids), in order. `params`: one for all, or one each."""
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        batch = [prompts] if one else prompts
        return self._run([self._tokens(prompt) for prompt in batch], params)  # type: ignore[arg-type]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids; other libraries' integers become Python's, what is none is refused."""
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        try:
            return tuple(map(operator.index, prompt))
        except TypeError as error:
            raise RequestError("prompt", f"is neither text nor a sequence of token ids: {error}") from error

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Completion:
        """The model's answer to a conversation, by its chat template."""
        return self._run([tuple(self.tokenizer.apply_chat(messages))], params)[0]

    def _run(
        self, prompts: list[tuple[int, ...]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Completion]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise RequestError("params", f"{len(each)} for {len(prompts)} prompts; give one, or one for each")
        pending: list[_Pending] = []
        try:
            for prompt, its_params in zip(prompts, each, strict=True):
                self.slots.acquire()
                waiting = _Pending(self, Request(RequestId(uuid4().hex), prompt, its_params))
                try:
                    self.cluster.submit(waiting.request, waiting.take)
                except BaseException:
                    self.slots.release()
                    raise
                pending.append(waiting)
            for waiting in pending:
                waiting.ended.wait()
        except BaseException:
            for waiting in pending:
                self.cluster.abort(waiting.request.id)
            raise
        results = [waiting.result for waiting in pending]
        return [result for result in results if result is not None]

    def close(self) -> None:
        self.cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
