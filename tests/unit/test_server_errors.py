"""Bad input: each gets OpenAI's error shape, the right status and the name of the field; the server goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from narrows import __version__
from narrows.errors import ConfigError
from narrows.runtime.client import ServedModel, Status
from narrows.server.app import create_app
from narrows.server.generate import Limits
from narrows.server.tokenizer import Tokenizer
from narrows.testing.client import FakeClient
from narrows.testing.http import serving
from narrows.testing.models import tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 512
JSON = {"Content-Type": "application/json"}  # with json.dumps, which unlike httpx writes half surrogate pairs too
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Iterator[FakeClient]:
    client = FakeClient(ServedModel("tiny", str(tokenizer.folder), CONTEXT, tokenizer.vocab_size))
    yield client
    client.close()


@pytest.fixture(scope="module")
def http(engine: FakeClient, tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    limits = Limits(max_choices=8, max_stops=4)
    with serving(engine, tokenizer, limits=limits) as server, httpx.Client(base_url=server.url) as client:
        yield client


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temprature", 1, "unknown field; did you mean 'temperature'"),
        ("top_kk", 1, "did you mean 'top_k'"),
        ("zzzzzz", 1, "unknown field"),
        ("temperature", -0.1, "0 to 100"),
        ("temperature", "hot", "valid number"),
        ("temperature", True, "valid number"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.1, "at most 1"),
        ("top_k", -2, "-1 or 0"),
        ("top_k", 1.5, "valid integer"),
        ("min_p", 2, "0 to 1"),
        ("repetition_penalty", 0, "above 0"),
        ("presence_penalty", 3, "-2 to 2"),
        ("frequency_penalty", -3, "-2 to 2"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -5, "at least 1"),
        ("max_tokens", "5", "valid integer"),
        ("max_tokens", 5.5, "valid integer"),
        ("max_tokens", 10**9, f"{10**9} tokens do not fit.*{CONTEXT}"),
        ("max_tokens", 10**30, "64-bit"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 10**9, "do not fit|at most max_tokens"),
        ("n", 0, "at least 1"),
        ("n", -1, "at least 1"),
        ("n", 9, "9 choices; 8 at most"),
        ("n", 10**9, "8 at most"),
        ("n", "2", "valid integer"),
        ("seed", 2**63, "64-bit"),
        ("seed", "lucky", "valid integer"),
        ("stop", 5, "a string or a list of strings"),
        ("stop", ["a", 5], "a string or a list of strings"),
        ("stop", "", "not empty"),
        ("stop", ["a", ""], "not empty"),
        ("stop", list("abcde"), "4 at most"),
        ("stop_token_ids", 5, "valid list"),
        ("stop_token_ids", [-1], "token ids"),
        ("stop_token_ids", [260], "outside the vocabulary"),
        ("ignore_eos", "yes", "valid boolean"),
        ("stream", "yes", "valid boolean"),
        ("stream_options", {"include_usage": True}, "only with stream"),
        ("logit_bias", {"5": 1}, "not supported"),
        ("response_format", {"type": "json_object"}, "not supported"),
        ("length_penalty", 2.0, "not supported"),
        ("user", 5, "valid string"),
        ("model", 5, "valid string"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_wrong_field_is_named(http: httpx.Client, route: str, field: str, value: Any, message: str) -> None:
    body = {"messages": MESSAGES} if route == CHAT else {"prompt": "Hi"}
    error = error_of(http.post(route, json=body | {field: value}), 400)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert_matches(message, error["message"])


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "required"),
        ({"prompt": None}, "prompt", "required"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt", "empty"),
        ({"prompt": "a\ud800"}, "prompt", "surrogate"),
        ({"prompt": "a", "\ud800": 1}, "\\ud800", "unknown field"),
        ({"prompt": 5}, "prompt", "use a string"),
        ({"prompt": ["a", 5]}, "prompt", "use a string"),
        ({"prompt": [1, True]}, "prompt", "use a string"),
        ({"prompt": {"a": 1}}, "prompt", "use a string"),
        ({"prompt": [5, 260]}, "prompt", "260 is outside the vocabulary"),
        ({"prompt": [-1]}, "prompt", "-1 is outside the vocabulary"),
        ({"prompt": ["a"] * 9}, "prompt", "8 at most"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": "a", "n": 2, "best_of": 3}, "best_of", "equal to n"),
        ({"prompt": "a", "best_of": 3}, "best_of", "equal to n"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "0 to 20"),
        ({"prompt": "a", "logprobs": -1}, "logprobs", "0 to 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo", "together with logprobs"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", r"at most max_tokens \(16\)"),
        (
            {"prompt": "a", "stream": True, "stream_options": {"include_usge": True}},
            "stream_options.include_usge",
            "_usage",
        ),
    ],
)
def test_wrong_completions(http: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    error = error_of(http.post(COMPLETIONS, content=json.dumps(body), headers=JSON), 400)
    assert error["param"] == param
    assert_matches(message, error["message"])


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hi"}, "messages", "valid list"),
        ({"messages": ["Hi"]}, "messages.0", "valid dictionary|object"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "required"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role", "required"),
        ({"messages": [*MESSAGES, {"role": "robot", "content": "Hi"}]}, "messages.1.role", "'user'"),
        ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages.0.role", "'user'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": "", "nmae": "x"}]}, "messages.0.nmae", "did you mean 'name'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls", "not supp"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "type",
        ),
        ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages.0.content", "surrogate"),
        ({"messages": MESSAGES, "max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
        ({"messages": MESSAGES, "max_completion_tokens": 600}, "max_completion_tokens", "600 tokens do not fit"),
        ({"messages": MESSAGES, "max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", "one of them"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs", "only with logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"messages": MESSAGES, "logprobs": 1}, "logprobs", "valid boolean"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "not supported"),
        ({"messages": MESSAGES, "echo": True}, "echo", "not supported"),
        ({"messages": MESSAGES, "modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"messages": MESSAGES, "prompt": "Hi"}, "prompt", "unknown field"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools", "leave it out"),
        ({"messages": MESSAGES, "chat_template_kwargs": 5}, "chat_template_kwargs", "dictionary"),
    ],
)
def test_wrong_chats(http: httpx.Client, body: dict[str, Any], param: str, message: str) -> None:
    error = error_of(http.post(CHAT, content=json.dumps(body), headers=JSON), 400)
    assert error["param"] == param
    assert_matches(message, error["message"])


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "functions": None, "logit_bias": {}},
        {"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "metadata": {}, "audio": None},
        {"temperature": None, "n": None, "stop": None, "max_tokens": None, "stream": None, "user": None, "seed": None},
    ],
)
def test_fields_that_ask_for_nothing_are_accepted(http: httpx.Client, body: dict[str, Any]) -> None:
    assert http.post(CHAT, json={"messages": MESSAGES} | body).status_code == 200


def test_a_prompt_must_leave_room_for_an_answer(http: httpx.Client, engine: FakeClient) -> None:
    longest = http.post(COMPLETIONS, json={"prompt": "x" * (CONTEXT - 1)})
    assert longest.json()["usage"]["completion_tokens"] == 1
    error = error_of(http.post(COMPLETIONS, json={"prompt": "x" * CONTEXT}), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert_matches(f"{CONTEXT} tokens.* {CONTEXT} in all", error["message"])
    long = [{"role": "user", "content": "x" * 5000}]
    error = error_of(http.post(CHAT, json={"messages": long}), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_max_tokens_must_fit_beside_the_prompt(http: httpx.Client) -> None:
    assert http.post(COMPLETIONS, json={"prompt": "x" * 12, "max_tokens": 500}).status_code == 200
    error = error_of(http.post(COMPLETIONS, json={"prompt": "x" * 12, "max_tokens": 501}), 400)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert_matches("501 tokens do not fit: the prompt has 12 and this model takes 512", error["message"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"prompt": "a",}',
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
    ],
    ids=lambda content: repr(content[:20]),
)
def test_broken_json(http: httpx.Client, content: bytes) -> None:
    error_of(http.post(COMPLETIONS, content=content, headers=JSON), 400)


def test_a_body_of_another_type(http: httpx.Client) -> None:
    error = error_of(http.post(COMPLETIONS, data={"prompt": "a"}), 400)
    assert "Content-Type: application/json" in error["message"]


def test_unknown_routes_methods_and_models(http: httpx.Client) -> None:
    assert "GET /v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    answer = http.get(CHAT)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"
    for route, body in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        error = error_of(http.post(route, json=body | {"model": "gpt-9"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'tiny'" in error["message"]


@pytest.mark.parametrize(("key", "problem"), [("", "is empty"), ("  ", "is empty"), ("key\n", "white space")])
def test_a_key_that_no_client_could_send_is_refused(
    engine: FakeClient, tokenizer: Tokenizer, key: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"api_key: .*{problem}.*; give another one, or leave it out"):
        create_app(engine, tokenizer, api_key=key)


def test_the_api_key(engine: FakeClient, tokenizer: Tokenizer) -> None:
    with serving(engine, tokenizer, api_key="pässword") as server, httpx.Client(base_url=server.url) as http:
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert http.get(path).status_code == 200
        wrong = [{}, *({"Authorization": value} for value in ("", "Bearer", "Bearer x", "Basic pw", b"Bearer p\xff"))]
        for headers in wrong:
            for path in ("/v1/models", "/nothing", "/docs"):
                answer = http.get(path, headers=headers)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert http.post(CHAT, json={"messages": MESSAGES}).status_code == 401
        right = {"Authorization": "Bearer pässword".encode()}
        assert http.post(CHAT, json={"messages": MESSAGES}, headers=right).status_code == 200


def test_a_full_queue_refuses_the_whole_call(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = ServedModel("tiny", str(tmp_path), CONTEXT, tokenizer.vocab_size)
    engine = FakeClient(model, capacity=2, paused=True)
    with serving(engine, tokenizer) as server, httpx.Client(base_url=server.url) as http:
        for stream in (False, True):
            answer = http.post(COMPLETIONS, json={"prompt": "a", "n": 3, "stream": stream})
            error = error_of(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert answer.headers["retry-after"] == "1"
        # Two of each were taken in, and taken back.
        assert [engine.ended[request.id] for request in engine.submitted] == ["abort"] * 4
        engine.run()
        assert http.post(COMPLETIONS, json={"prompt": "a", "n": 2}).status_code == 200
    engine.close()


def test_not_ready(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = FakeClient(ServedModel("tiny", str(tmp_path), CONTEXT, tokenizer.vocab_size))
    ready = engine.status_now
    with serving(engine, tokenizer) as server, httpx.Client(base_url=server.url) as http:
        assert (http.get("/ready").status_code, http.get("/ready").json()) == (200, {"status": "ready"})
        engine.status_now = Status(ready=False, queued=0, instances=(), reason="decode-0 is starting")
        assert http.get("/health").status_code == 200
        answer = http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "decode-0 is starting"
        error = error_of(http.post(COMPLETIONS, json={"prompt": "a"}), 503)
        assert (error["type"], error["code"]) == ("server_error", "unavailable")
        assert "decode-0 is starting" in error["message"]
        engine.status_now = ready
        assert http.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
    engine.close()


def test_operations(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}
    metrics = http.get("/metrics")
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "narrows_requests_submitted" in metrics.text
    assert http.get("/openapi.json").status_code == 200


def test_tokenize_and_detokenize(http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = http.post("/tokenize", json={"model": "tiny", "prompt": "é<|im_end|>"}).json()
    ids = tokenizer.encode("é<|im_end|>")
    assert answer == {"count": 3, "max_model_len": CONTEXT, "tokens": ids, "token_strs": None}
    strings = http.post("/tokenize", json={"prompt": "é", "return_token_strs": True}).json()["token_strs"]
    assert strings == ["Ã", "©"]
    chat = http.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert chat["tokens"] == tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "é<|im_end|>"}
    assert error_of(http.post("/detokenize", json={"tokens": [260]}), 400)["param"] == "tokens"
    assert error_of(http.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert error_of(http.post("/tokenize", json={"prompt": "a", "messages": MESSAGES}), 400)["param"] == "prompt"


def test_an_unexpected_exception_is_still_an_answer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    class Broken(FakeClient):
        def metrics(self) -> str:
            raise KeyError("oops")

    engine = Broken(ServedModel("tiny", str(tmp_path), CONTEXT, tokenizer.vocab_size))
    with serving(engine, tokenizer) as server, httpx.Client(base_url=server.url) as http:
        assert error_of(http.get("/metrics"), 500)["code"] == "internal_error"
        assert http.get("/health").status_code == 200
    engine.close()
