"""What clients may send. A field that is not known, or known but not served, is refused by name, never ignored.

Names follow OpenAI's API, extensions follow vLLM's. `null` always means "as if left out".
"""

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from narrows.core.request import SamplingParams
from narrows.errors import RequestError

Values = tuple[object, ...]

_INT64 = range(-(2**63), 2**63)
_MAX_DEPTH, _MAX_VALUES = 32, 10_000  # of chat_template_kwargs: looking through them must not keep others waiting
_MAX_MESSAGES = 10_000  # nor must this, long before a context is full

# Fields that are not served, with the values that ask for nothing and are therefore accepted.
_NOT_SERVED: dict[str, Values] = {
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "priority": (0,),
}
_NOT_SERVED_CHAT: dict[str, Values] = _NOT_SERVED | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # only says how tools would be called
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "prompt_cache_key": (),
    "safety_identifier": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
}


def _wrong(field: str, reason: str) -> PydanticCustomError:
    """An error about `field` of the object being validated; errors.from_validation reads it."""
    field = field.encode(errors="backslashreplace").decode()  # JSON can carry names that are no text
    return PydanticCustomError("request", "{reason}", {"field": field, "reason": reason})


class Body(BaseModel):
    """Strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    not_served: ClassVar[Mapping[str, Values]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name not in cls.not_served:
                near = difflib.get_close_matches(name, [*cls.model_fields, *cls.not_served], n=1)
                raise _wrong(name, f"unknown field{f'; did you mean {near[0]!r}?' if near else ''}")
            elif value is not None and value not in cls.not_served[name]:
                raise _wrong(name, "is not supported by this server; leave it out")
        return kept


def _is_text(value: str) -> str:
    """JSON can carry half of a surrogate pair; nothing else can."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "request", "character {at} is half of a surrogate pair, which is not text", {"at": error.start}
        ) from error
    return value


def _is_int64(value: int) -> int:
    if not _INT64.start <= value < _INT64.stop:
        raise PydanticCustomError("request", "is not a 64-bit whole number")
    return value


def _is_plain(value: Any) -> Any:
    """What a template can be given: numbers and text as above, and not too deep for what walks through it."""
    waiting, num = [(value, 1)], 1
    while waiting:
        item, depth = waiting.pop()
        if isinstance(item, list | dict) and (num := num + len(item)) > _MAX_VALUES:
            raise PydanticCustomError("request", "has more than {most} values", {"most": _MAX_VALUES})
        if depth > _MAX_DEPTH:
            raise PydanticCustomError(
                "request", "is nested more than {depth} deep, the most that is read", {"depth": _MAX_DEPTH}
            )
        match item:
            case str():
                _is_text(item)
            case bool():
                pass
            case int():
                _is_int64(item)
            case float() if not math.isfinite(item):
                raise PydanticCustomError("request", "has a number beyond 64 bits")
            case list():
                waiting += [(inner, depth + 1) for inner in item]
            case dict():
                waiting += [(inner, depth + 1) for pair in item.items() for inner in pair]
    return value


def _stops(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(stop, str) for stop in value):
        return [_is_text(stop) for stop in value]
    raise PydanticCustomError("request", "use a string or a list of strings")


def _prompts(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(item) is int for item in value)):
        value = [value]
    if not isinstance(value, list) or not all(
        isinstance(item, str) or (isinstance(item, list) and all(type(id) is int for id in item)) for item in value
    ):
        raise PydanticCustomError(
            "request", "use a string, a list of strings, a list of token ids, or a list of lists of token ids"
        )
    if not value or not all(value):
        raise PydanticCustomError("request", "is empty; send at least one character or token")
    for item in value:
        if isinstance(item, str):
            _is_text(item)
    return value


def _text(value: Any) -> Any:
    """A message's content: a string, or parts of type text, which are joined by newlines."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str) or len(part) != 2:
            raise PydanticCustomError(
                "request", 'every part must be {"type": "text", "text": "..."}; nothing else is read'
            )
        texts.append(part["text"])
    return "\n".join(texts)


Int = Annotated[int, AfterValidator(_is_int64)]
Str = Annotated[str, AfterValidator(_is_text)]
Variables = Annotated[dict[str, Any], BeforeValidator(_is_plain, json_schema_input_type=dict[str, Any])]
StopStrings = Annotated[list[str], BeforeValidator(_stops, json_schema_input_type=str | list[str])]
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
Text = Annotated[Str, BeforeValidator(_text, json_schema_input_type=str | list[dict[str, str]])]


class StreamOptions(Body):
    not_served = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = False


class Generate(Body):
    """What both generating routes take. Ranges are SamplingParams' business."""

    model: Str | None = None  # None: the one that is served
    max_tokens: Int | None = None
    min_tokens: Int = 0
    n: Int = 1
    temperature: float = 1.0
    top_k: Int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Int | None = None
    stop: StopStrings = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Str | None = None  # a label of the sender's; it changes nothing

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "is allowed only with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, max_tokens: int | None, logprobs: int | None, names: Mapping[str, str]) -> SamplingParams:
        """Raises RequestError under the sender's own name; `names` holds those that differ from SamplingParams'."""
        try:
            return SamplingParams(
                max_tokens=max_tokens,
                min_tokens=self.min_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                seed=self.seed,
                stop=tuple(self.stop),
                stop_token_ids=tuple(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                logprobs=logprobs,
            )
        except RequestError as error:
            reason = str(error).removeprefix(f"{error.field}: ")
            raise RequestError(names.get(error.field, error.field), reason) from error


class CompletionRequest(Generate):
    """POST /v1/completions"""

    not_served: ClassVar[Mapping[str, Values]] = _NOT_SERVED | {"suffix": ("",)}

    prompt: Prompts
    best_of: Int | None = None
    echo: bool = False
    logprobs: Int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise _wrong("best_of", f"is supported only when equal to n ({self.n})")
        if self.echo and self.logprobs is not None:
            raise _wrong("echo", "is not supported together with logprobs")
        return self

    def sampling(self) -> SamplingParams:
        return self._sampling(self.max_tokens, self.logprobs, {})


class ChatMessage(Body):
    """One message of a conversation."""

    # What an answer of ours carries besides its text, so that it can be sent back as it is.
    not_served = {
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "reasoning_content": (),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    name: Str | None = None

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: they call OpenAI's developer role system."""
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class Conversation(Body):
    """What makes a prompt of messages."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MAX_MESSAGES)
    add_generation_prompt: bool = True
    chat_template_kwargs: Variables = Field(default_factory=dict)


class ChatRequest(Generate, Conversation):
    """POST /v1/chat/completions"""

    not_served = _NOT_SERVED_CHAT

    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "is allowed only with logprobs: true")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise _wrong("max_tokens", "is the old name of max_completion_tokens; send one of them")
        return self

    @property
    def max_tokens_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling(self) -> SamplingParams:
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._sampling(max_tokens, logprobs, {"max_tokens": self.max_tokens_name, "logprobs": "top_logprobs"})


class TokenizeRequest(Body):
    """POST /tokenize: of a text, or of a conversation."""

    model: Str | None = None
    prompt: Str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=_MAX_MESSAGES)
    add_generation_prompt: bool = True
    chat_template_kwargs: Variables = Field(default_factory=dict)
    add_special_tokens: bool | None = None  # None: yes for a prompt, no for messages
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise _wrong("prompt", "send either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize"""

    model: Str | None = None
    tokens: list[int]
