"""Bodies that are no JSON, that do not end, that are too many, and clients that close their sending side."""

import json
import select
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from narrows.runtime.client import ServedModel, Status
from narrows.server.connection import Connection
from narrows.server.generate import Limits
from narrows.server.tokenizer import Tokenizer
from narrows.testing.client import FakeClient
from narrows.testing.http import Serving, serving
from narrows.testing.models import tiny_model

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> Iterator[FakeClient]:
    """Nothing moves in it until it is told to."""
    client = FakeClient(ServedModel("tiny", str(tokenizer.folder), 512, tokenizer.vocab_size), paused=True)
    yield client
    client.close()


@pytest.fixture
def server(engine: FakeClient, tokenizer: Tokenizer) -> Iterator[Serving]:
    with serving(engine, tokenizer) as running:
        yield running


def connect(server: Serving) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port))


def head(num_bytes: int, version: str = "1.1") -> bytes:
    lines = (f"POST {COMPLETIONS} HTTP/{version}", "Host: x", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {num_bytes}", "", "")).encode()


def post(body: dict[str, Any], version: str = "1.1") -> bytes:
    content = json.dumps(body).encode()
    return head(len(content), version) + content


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def answer_of(received: bytes) -> bytes:
    """Without the interim answers, which every client of HTTP/1.1 skips."""
    while received.startswith(b"HTTP/1.1 100 "):
        received = received.partition(b"\r\n\r\n")[2]
    return received


# What is not JSON, or JSON that stands for nothing


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"[" * 100_000, "the body is nested too deeply"),
        (b'{"prompt": "\xff"}', "the body is not UTF-8 text: invalid start byte at byte 12"),
        (b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}", "a whole number of more than 4300 digits"),
        (b'{"prompt": "a", "temperature": NaN}', "the body is not JSON: NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "the body is not JSON: -Infinity"),
        (b'{"prompt": "a",}', "the body is not JSON: Illegal trailing comma|the body is not JSON: Expecting"),
    ],
    ids=["deep", "bytes", "digits", "nan", "infinity", "comma"],
)
def test_a_body_that_can_not_be_read_names_the_cause(server: Serving, content: bytes, cause: str) -> None:
    answer = httpx.post(server.url + COMPLETIONS, content=content, headers=JSON)
    assert answer.status_code == 400
    assert any(part in answer.json()["error"]["message"] for part in cause.split("|")), answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": ["a", "\ud800"]}, "prompt"),
        ({"prompt": "a", "stop": "\ud800"}, "stop"),
        ({"prompt": "a", "stop": ["a", "\udfff"]}, "stop"),
        ({"prompt": "a", "user": "\ud800"}, "user"),
        ({"prompt": "a", "model": "\ud800"}, "model"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud800"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}, "messages.0.name"),
        ({"messages": MESSAGES, "stop": ["\ud800"]}, "stop"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"\ud800": 1}}, "chat_template_kwargs"),
    ],
)
def test_half_a_surrogate_pair_goes_no_further(
    engine: FakeClient, server: Serving, body: dict[str, Any], param: str
) -> None:
    route = CHAT if "messages" in body else COMPLETIONS
    answer = httpx.post(server.url + route, content=json.dumps(body), headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "surrogate" in answer.json()["error"]["message"]
    assert engine.submitted == []


@pytest.mark.parametrize(
    "field", ["max_tokens", "min_tokens", "n", "top_k", "seed", "best_of", "logprobs", "top_logprobs", "temperature"]
)
@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 10**400])
def test_numbers_beyond_64_bits_are_named(server: Serving, field: str, value: int) -> None:
    chat = field == "top_logprobs"
    body = {"messages": MESSAGES, "logprobs": True} if chat else {"prompt": "a"}
    answer = httpx.post(server.url + (CHAT if chat else COMPLETIONS), json=body | {field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ({"a": 2**63}, "64-bit"),
        ({"a": {"b": [1.0, float("1e308") * 10]}}, "beyond 64 bits"),
        (json.loads('{"a": ' + "[" * 32 + "]" * 32 + "}"), "more than 32 deep"),
        (json.loads('{"a": ' + "[" * 800 + "]" * 800 + "}"), "more than 32 deep"),
        ({"a": [[0] * 5000] * 2}, "more than 10000 values"),
    ],
    ids=["integer", "float", "deep", "deeper", "many"],
)
def test_template_variables_are_plain_values(server: Serving, value: dict[str, Any], cause: str) -> None:
    content = json.dumps({"messages": MESSAGES, "chat_template_kwargs": value}).replace("Infinity", "1e999")
    answer = httpx.post(server.url + CHAT, content=content, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
    assert cause in answer.json()["error"]["message"]


def test_template_variables_may_be_any_plain_value(engine: FakeClient, server: Serving) -> None:
    engine.run()
    values = {"a": [1, -(2**63), 2**63 - 1, 1.5, True, None, "Grüße"], "b": json.loads("[" * 30 + "]" * 30)}
    answer = httpx.post(server.url + CHAT, json={"messages": MESSAGES, "chat_template_kwargs": values})
    assert answer.status_code == 200


def test_a_conversation_of_any_number_of_messages_is_not_read(server: Serving) -> None:
    answer = httpx.post(server.url + CHAT, json={"messages": MESSAGES * 10_001})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "at most 10000 items" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", ["tools", "messages", "stop", "logit_bias", "n", "nothing"])
def test_deep_values_elsewhere_are_refused_by_name(server: Serving, field: str) -> None:
    deep = "[" * 900 + "]" * 900
    others = "" if field == "messages" else f', "messages": {json.dumps(MESSAGES)}'
    answer = httpx.post(server.url + CHAT, content=f'{{"{field}": {deep}{others}}}', headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)


# What can never be served


def test_more_choices_than_may_ever_wait_are_the_senders_error(engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.run()
    with serving(engine, tokenizer, limits=Limits(max_waiting=4)) as server, httpx.Client(base_url=server.url) as http:
        for body, param in (
            ({"prompt": "a", "n": 5}, "n"),
            ({"prompt": ["a", "b"], "n": 3}, "n"),
            ({"prompt": ["a"] * 5}, "prompt"),
        ):
            answer = http.post(COMPLETIONS, json=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert "4 at most may wait at once (max_queue)" in answer.json()["error"]["message"]
        assert http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2}).status_code == 200


def test_a_text_that_can_not_fit_is_not_tokenized(
    engine: FakeClient, server: Serving, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 512 * len("<|endoftext|>")  # the longest of the tiny model's vocabulary
    encode, seen = tokenizer.encode, list[int]()

    def counted(text: str, add_special_tokens: bool = True) -> list[int]:
        seen.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counted)
    for route, field, body in (
        (COMPLETIONS, "prompt", {"prompt": "x" * (longest + 1)}),
        (CHAT, "messages", {"messages": [{"role": "user", "content": "x" * (longest + 1)}]}),
        ("/tokenize", "prompt", {"prompt": "x" * (longest + 1)}),
    ):
        answer = httpx.post(server.url + route, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert f"at most {longest} can fit, since this model takes 512 tokens" in error["message"]
    assert seen == []
    answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "x" * longest})
    assert "tokens; this model takes 512 in all" in answer.json()["error"]["message"]
    assert seen == [longest]


def test_detokenize_takes_no_more_than_a_context(server: Serving) -> None:
    assert httpx.post(server.url + "/detokenize", json={"tokens": [65] * 512}).status_code == 200
    answer = httpx.post(server.url + "/detokenize", json={"tokens": [65] * 513})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")


# Bodies that do not come


def test_a_body_that_stops_coming_is_answered(engine: FakeClient, tokenizer: Tokenizer) -> None:
    with serving(engine, tokenizer, limits=Limits(body_timeout_s=0.05)) as server, connect(server) as connection:
        connection.sendall(head(100) + b"{")
        received = read_all(connection)  # it ends, so the connection is closed
        assert received.startswith(b"HTTP/1.1 408 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


def test_a_head_that_stops_coming_is_cut(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "head_timeout_s", 0.05)
    with connect(server) as silent, connect(server) as half:
        half.sendall(b"POST /v1/comp")
        assert read_all(silent) == read_all(half) == b""


def test_bodies_on_their_way_are_bounded_together(engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.run()
    limits = Limits(max_body_bytes=100, max_unread_bytes=150)
    with (
        serving(engine, tokenizer, limits=limits) as server,
        connect(server) as first,
        connect(server) as second,
        httpx.Client(base_url=server.url) as http,
    ):
        first.sendall(head(100) + b" " * 90)
        second.sendall(head(100) + b" " * 90)
        # Either may have been the first to be read; the other is the one that is too much.
        (refused,), _, _ = select.select([first, second], [], [], 20)
        kept = second if refused is first else first
        refused.sendall(b" " * 10)
        received = read_all(refused)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in received.lower()
        # What comes in one piece is never on its way.
        assert http.post(COMPLETIONS, json={"prompt": "ab"}).status_code == 200
        # The largest is read to its end, and then there is room again.
        kept.sendall(b'{"n": 1}'.ljust(10))
        assert kept.recv(65536).startswith(b"HTTP/1.1 400 ")
        with connect(server) as third:
            third.sendall(head(100) + b'{"prompt": "ab"}'.ljust(90))
            third.sendall(b" " * 10)
            assert third.recv(65536).startswith(b"HTTP/1.1 200 ")


# Clients that close their sending side


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_done_with_sending_gets_its_answer(
    engine: FakeClient, server: Serving, stream: bool, version: str
) -> None:
    with connect(server) as connection:
        connection.sendall(post({"prompt": "abc", "stream": stream}, version))
        connection.shutdown(socket.SHUT_WR)
        engine.wait_for(lambda: len(engine.submitted) == 1)
        if version == "1.1":
            assert connection.recv(1, socket.MSG_PEEK)  # the question whether it is still there
        engine.run()
        received = answer_of(read_all(connection))  # it ends, so the connection is closed
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b'"finish_reason":"stop"' in received
        assert (b"data: [DONE]" in received) == stream
    assert list(engine.ended.values()) == ["stop"]


def test_requests_in_line_are_answered_too(engine: FakeClient, server: Serving) -> None:
    engine.run()
    with connect(server) as connection:
        connection.sendall(post({"prompt": "ab"}) + post({"prompt": "cd"}) + b"POST /v1/comp")
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
        assert b'"text":"ab"' in received and b'"text":"cd"' in received


def test_a_client_that_goes_after_closing_its_sending_side_aborts(engine: FakeClient, server: Serving) -> None:
    with connect(server) as connection:
        connection.sendall(post({"prompt": "abc"}))
        connection.shutdown(socket.SHUT_WR)
        engine.wait_for(lambda: len(engine.submitted) == 1)
        assert connection.recv(1)
    engine.wait_for(lambda: len(engine.ended) == 1)
    assert list(engine.ended.values()) == ["abort"]


def test_an_unfinished_request_is_not_waited_for(server: Serving) -> None:
    for sent in (b"", b"POST /v1/comp", head(100) + b"{"):
        with connect(server) as connection:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == b""


# Probes


def test_health_and_readiness_answer_head(engine: FakeClient, server: Serving) -> None:
    assert [httpx.head(server.url + path).status_code for path in ("/health", "/ready")] == [200, 200]
    engine.status_now = Status(ready=False, queued=0, instances=(), reason="decode-0 is starting")
    answers = [httpx.head(server.url + path) for path in ("/health", "/ready")]
    assert [answer.status_code for answer in answers] == [200, 503]
    assert [answer.content for answer in answers] == [b"", b""]
    assert httpx.get(server.url + "/openapi.json").status_code == 200
