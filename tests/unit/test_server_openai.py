"""The official client against our server: it must not be able to tell the difference."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from narrows.runtime.client import ServedModel
from narrows.server.tokenizer import Tokenizer
from narrows.testing.client import FakeClient
from narrows.testing.http import serving
from narrows.testing.models import tiny_model

HI = [{"role": "user", "content": "Hi é€"}]
# The fake client says its prompt again: this is what the chat template makes of HI, special tokens left out.
ECHO = "user\nHi é€\nassistant\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Iterator[FakeClient]:
    client = FakeClient(ServedModel("tiny", str(tokenizer.folder), 512, tokenizer.vocab_size))
    yield client
    client.close()


@pytest.fixture(scope="module")
def url(engine: FakeClient, tokenizer: Tokenizer) -> Iterator[str]:
    with serving(engine, tokenizer, api_key="secret") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
        yield client


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "tiny"
    choice = answer.choices[0]
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", ECHO)
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    num_prompt = len(ECHO.encode()) + 3  # a token a byte, and three special ones
    assert answer.usage.prompt_tokens == answer.usage.completion_tokens == num_prompt
    assert answer.usage.total_tokens == 2 * num_prompt
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id == answer.id


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options={"include_usage": True})
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *body, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(ECHO.encode()) + 3
    assert all(chunk.usage is None for chunk in body)
    deltas = [chunk.choices[0].delta for chunk in body]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    # One chunk for each character: every token of this model is one byte.
    assert [delta.content for delta in deltas[1:-1]] == list(ECHO)
    assert deltas[-1].content is None
    assert [chunk.choices[0].finish_reason for chunk in body] == [None] * (len(body) - 1) + ["stop"]


def test_answers_fit_openais_own_types(url: str) -> None:
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer secret"}) as http:
        settings = {"model": "tiny", "max_tokens": 5}
        chat = {"messages": HI, "logprobs": True, "top_logprobs": 2}
        ChatCompletion.model_validate(http.post("/v1/chat/completions", json=settings | chat).json())
        Completion.model_validate(http.post("/v1/completions", json=settings | {"prompt": "x", "logprobs": 2}).json())
        stream = http.post("/v1/chat/completions", json=settings | chat | {"stream": True})
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = stream.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        for event in events[:-2]:
            ChatCompletionChunk.model_validate_json(event.removeprefix("data: "))


def test_several_choices_have_their_own_seeds(client: openai.OpenAI, engine: FakeClient) -> None:
    before = len(engine.submitted)
    answer = client.chat.completions.create(model="tiny", messages=HI, n=3, seed=2**63 - 2, max_tokens=2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "u"), (1, "u"), (2, "u")]
    requests = engine.submitted[before:]
    assert [request.id for request in requests] == [f"{answer.id}-{k}" for k in range(3)]
    assert [request.params.seed for request in requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    assert answer.usage.prompt_tokens == len(requests[0].prompt)


def test_streamed_choices_are_told_apart(client: openai.OpenAI) -> None:
    texts = {0: "", 1: "", 2: "", 3: ""}
    reasons = {}
    for chunk in client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "ab", 1: "ab", 2: "cd", 3: "cd"}
    assert reasons == dict.fromkeys(range(4), "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, stream: bool) -> None:
    answer = client.completions.create(model="tiny", prompt="one END two", stop=["END", "zzz"], stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == "one "
    assert choices[-1].finish_reason == "stop"
    kept = client.completions.create(
        model="tiny", prompt="one END two", stop="END", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "one END"


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_is_told_of_a_stop_string(tokenizer: Tokenizer, tmp_path: Path, stream: bool) -> None:
    engine = FakeClient(ServedModel("tiny", str(tmp_path), 512, tokenizer.vocab_size), paused=True)
    with serving(engine, tokenizer) as server, openai_client(server.url) as client:
        engine.step(len("one END"))  # what comes after it is never made
        answer = client.completions.create(model="tiny", prompt="one END two", stop="END", stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == "one "
        assert list(engine.ended.values()) == ["stop"]  # and not "abort", which metrics count apart
    engine.close()


def test_sampling_settings_reach_the_engine(client: openai.OpenAI, engine: FakeClient) -> None:
    extensions = {
        "top_k": 7,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "min_tokens": 2,
        "stop_token_ids": [65],
    }
    client.chat.completions.create(
        model="tiny",
        messages=HI,
        temperature=0,
        top_p=0.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        seed=5,
        max_completion_tokens=9,
        user="someone",
        extra_body=extensions,
    )
    params = engine.submitted[-1].params
    assert (params.temperature, params.top_p, params.presence_penalty, params.frequency_penalty) == (0, 0.5, -1, 0.5)
    assert (params.seed, params.max_tokens, params.logprobs) == (5, 9, None)
    assert (params.top_k, params.min_p, params.repetition_penalty) == (7, 0.25, 1.5)
    assert (params.ignore_eos, params.min_tokens, params.stop_token_ids) == (True, 2, (65,))


def test_default_lengths(client: openai.OpenAI, engine: FakeClient, tokenizer: Tokenizer) -> None:
    client.chat.completions.create(model="tiny", messages=HI)
    assert engine.submitted[-1].params.max_tokens is None
    assert client.completions.create(model="tiny", prompt="x" * 40).choices[0].text == "x" * 16
    # Where the context has no room for 16, the rest of it.
    answer = client.completions.create(model="tiny", prompt=tokenizer.encode("A" * 505))
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("A" * 7, "length")


def test_chat_logprobs(client: openai.OpenAI) -> None:
    settings = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answer = client.chat.completions.create(**settings, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    special, letter = answer.choices[0].logprobs.content or []
    assert (special.token, special.bytes, special.logprob) == ("<|im_start|>", list(b"<|im_start|>"), -0.5)
    assert (letter.token, letter.bytes) == ("u", [ord("u")])
    assert [(best.token, best.logprob) for best in letter.top_logprobs] == [("u", -0.5), ("v", -1.5)]
    bare = client.chat.completions.create(**settings, logprobs=True)
    assert bare.choices[0].logprobs is not None
    assert [entry.top_logprobs for entry in bare.choices[0].logprobs.content or []] == [[], []]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="tiny", prompt="aé", logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.top_logprobs == [{"a": -0.5}, {"bytes:\\xc3": -0.5}, {"bytes:\\xa9": -0.5}]
    assert logprobs.text_offset == [0, 1, 1]
    streamed = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(model="tiny", prompt="aé", logprobs=1, stream=True)
    ]
    assert [token for part in streamed if part for token in part.tokens or []] == logprobs.tokens
    assert [offset for part in streamed if part for offset in part.text_offset or []] == logprobs.text_offset


def test_prompts_may_be_tokens_and_be_echoed(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    echoed = client.completions.create(model="tiny", prompt=[tokenizer.encode("AB"), tokenizer.encode("C")], echo=True)
    assert [choice.text for choice in echoed.choices] == ["ABAB", "CC"]
    chunks = client.completions.create(model="tiny", prompt="ab", echo=True, stream=True)
    assert [chunk.choices[0].text for chunk in chunks] == ["ab", "a", "b", ""]


def test_messages_may_be_parts_and_answers_may_be_sent_back(client: openai.OpenAI, engine: FakeClient) -> None:
    first = client.chat.completions.create(model="tiny", messages=HI, max_tokens=3)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    history = [
        {"role": "developer", "content": "Be brief."},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": parts, "name": "Ada"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=history)
    assert answer.choices[0].message.content == "system\nBe brief.\nassistant\nus\nuser\na\nb\nassistant\n"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_errors_are_the_clients_own(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="guess") as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_is_an_error(tokenizer: Tokenizer, tmp_path: Path, stream: bool) -> None:
    model = ServedModel("tiny", str(tmp_path), 512, tokenizer.vocab_size)
    engine = FakeClient(model, lambda _: [RuntimeError("instance decode-0 is lost")])
    with (
        serving(engine, tokenizer) as server,
        openai_client(server.url) as client,
        pytest.raises(openai.InternalServerError, match="instance decode-0 is lost"),
    ):
        client.completions.create(model="tiny", prompt="a", stream=stream)
    engine.close()


def test_a_failure_later_ends_the_stream_with_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = ServedModel("tiny", str(tmp_path), 512, tokenizer.vocab_size)
    engine = FakeClient(model, lambda _: [*tokenizer.encode("A"), RuntimeError("instance decode-0 is lost")])
    with serving(engine, tokenizer) as server, openai_client(server.url) as client:
        chunks = client.completions.create(model="tiny", prompt="a", n=2, stream=True)
        assert next(chunks).choices[0].text == "A"
        with pytest.raises(openai.APIError, match="instance decode-0 is lost"):
            list(chunks)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="tiny", prompt="a")
    engine.close()


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
