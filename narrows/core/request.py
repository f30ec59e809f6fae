"""What a caller asks for, and what comes back."""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum

from narrows.core.ids import RequestId
from narrows.errors import RequestError

MAX_LOGPROBS = 20
MAX_COUNT = 2**31 - 1  # of tokens, and of token ids


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Names follow OpenAI's and vLLM's.

    Raises RequestError naming the field when a value is out of its range.
    """

    max_tokens: int | None = None  # None: up to the model's context
    min_tokens: int = 0  # end-of-sequence and stop tokens can not be chosen before
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int | None = None  # None: drawn by the client when the request is made
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; 0: of the chosen token; n: and of the n best

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise RequestError(name, f"{getattr(self, name)!r} is not allowed; use {rule}")

        for name in ("max_tokens", "min_tokens", "top_k", "seed", "logprobs"):
            check(is_whole(getattr(self, name)) or getattr(self, name) is None, name, "a whole number")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            check(is_number(getattr(self, name)) and math.isfinite(getattr(self, name)), name, "a finite number")
        most = f"at most {MAX_COUNT}"
        check(self.max_tokens is None or 1 <= self.max_tokens <= MAX_COUNT, "max_tokens", f"at least 1 and {most}")
        check(self.min_tokens is not None and 0 <= self.min_tokens <= MAX_COUNT, "min_tokens", f"at least 0 and {most}")
        check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
        )
        check(0.0 <= self.temperature <= 100.0, "temperature", "a number from 0 to 100")
        check(
            self.top_k is not None and -1 <= self.top_k <= MAX_COUNT, "top_k", f"-1 or 0 (off), or at least 1, {most}"
        )
        check(0.0 < self.top_p <= 1.0, "top_p", "a number above 0, at most 1")
        check(0.0 <= self.min_p <= 1.0, "min_p", "a number from 0 to 1")
        check(0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", "a number above 0, at most 100")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "a number from -2 to 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "a number from -2 to 2")
        check(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit whole number")
        check(
            isinstance(self.stop, tuple) and all(map(is_text, self.stop)),
            "stop",
            "a tuple of strings that are not empty",
        )
        check(all(is_whole(t) and 0 <= t <= MAX_COUNT for t in self.stop_token_ids), "stop_token_ids", "token ids")
        check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"a whole number from 0 to {MAX_LOGPROBS}",
        )


def is_whole(value: object) -> bool:
    """A whole number, and neither a truth value nor another library's integer, which could not be sent on."""
    return type(value) is int


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def is_text(value: object) -> bool:
    """A string that is not empty and can be written as UTF-8 (a lone surrogate can not)."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= char <= "\udfff" for char in value)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be continued.

    `output` is what earlier attempts already produced: after a preemption or the loss of an instance the request is
    prefilled again from prompt + output, and `generation` counts the attempt, so that nothing late can be mistaken.

    Where decode selects, prefill would give the KV of the output other values than decode had, and other tokens would
    follow: there `output` begins empty again and `known` is what has been produced. Those tokens are decoded once
    more, each taken as it is known (`replayed`).
    """

    id: RequestId
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival_s: float = 0.0
    output: tuple[int, ...] = ()
    generation: int = 0
    known: tuple[int, ...] = ()  # the first tokens of the output, not to be chosen anew

    def replayed(self) -> "Request":
        """The same, to be decoded again from the prompt's end on."""
        return replace(self, output=(), known=self.output)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Everything known so far: prompt, then output."""
        return self.prompt + self.output

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class FinishReason(StrEnum):
    """Why a request ended. Exactly one per request."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # its caller went away or took it back
    ERROR = "error"  # it could not be finished; the event says why


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a chosen token, and of the best alternatives (id, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token and, when asked for, its log probability."""

    id: int
    logprob: TokenLogprob | None = None
