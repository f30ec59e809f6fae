"""Real sockets: clients that go away, bodies that do not end, servers that stop."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest

import narrows.server.serve
from narrows import launch
from narrows.config import EngineConfig, ServerConfig
from narrows.errors import ConfigError, NarrowsError
from narrows.runtime.client import ServedModel
from narrows.server.generate import Limits
from narrows.server.serve import bind, url_of
from narrows.server.tokenizer import Tokenizer
from narrows.testing.client import FakeClient
from narrows.testing.http import Serving, serving
from narrows.testing.models import tiny_model

COMPLETIONS = "/v1/completions"


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


@pytest.fixture
def http(server: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def connect(server: Serving) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port))


def post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


def read_until(connection: socket.socket, text: bytes) -> bytes:
    """Byte by byte, so that nothing after `text` is taken."""
    received = b""
    while not received.endswith(text):
        byte = connection.recv(1)
        assert byte, f"closed after {received!r}"
        received += byte
    return received


def read_until_cut(connection: socket.socket) -> None:
    """Until the other side has closed, politely or not."""
    try:
        read_all(connection)
    except ConnectionResetError:
        return


def chunk_of(line: str) -> dict[str, Any]:
    chunk: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return chunk


# Streams


def test_each_token_is_sent_at_once(engine: FakeClient, http: httpx.Client) -> None:
    engine.step()  # the engine makes no other token before this one has arrived
    with http.stream("POST", COMPLETIONS, json={"prompt": "abcdef", "stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for letter in "abcdef":
            assert chunk_of(next(lines))["choices"][0]["text"] == letter
            engine.step()
        assert chunk_of(next(lines))["choices"][0]["finish_reason"] == "stop"
        assert list(lines) == ["data: [DONE]"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_a_client_that_goes_away_aborts_its_requests(
    engine: FakeClient, server: Serving, stream: bool, num_tokens: int
) -> None:
    with connect(server) as connection:
        connection.sendall(post(COMPLETIONS, {"prompt": "abcdef", "n": 2, "stream": stream}))
        engine.wait_for(lambda: len(engine.submitted) == 2)
        engine.step(num_tokens)
        if stream and num_tokens:
            read_until(connection, b"data: ")
    engine.wait_for(lambda: len(engine.ended) == 2)
    assert list(engine.ended.values()) == ["abort", "abort"]


def test_a_client_that_stays_is_not_aborted(engine: FakeClient, server: Serving) -> None:
    with connect(server) as connection:
        request = post(COMPLETIONS, {"prompt": "ab"})
        connection.sendall(request + request)  # the second waits in line, which is no disconnect
        engine.run()
        for _ in range(2):
            read_until(connection, b'"finish_reason":"stop"')
    assert list(engine.ended.values()) == ["stop", "stop"]


def test_many_at_once_are_served_or_refused(tokenizer: Tokenizer) -> None:
    engine = FakeClient(ServedModel("tiny", str(tokenizer.folder), 512, tokenizer.vocab_size), capacity=5, paused=True)
    with serving(engine, tokenizer) as server, ThreadPoolExecutor(200) as pool:
        limits = httpx.Limits(max_connections=200)
        with httpx.Client(base_url=server.url, limits=limits, timeout=60) as http:
            answers = [
                pool.submit(http.post, COMPLETIONS, json={"prompt": "ab", "stream": i % 2 == 0}) for i in range(200)
            ]
            engine.wait_for(lambda: len(engine.submitted) == 5)
            engine.run()
            statuses = [answer.result().status_code for answer in answers]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) == len(engine.submitted) >= 5
    assert set(engine.ended.values()) == {"stop"}
    engine.close()


# Bodies


def endless(num_bytes: int) -> Iterator[bytes]:
    for _ in range(num_bytes // 2**20):
        yield b" " * 2**20


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_100_mb_is_refused(engine: FakeClient, http: httpx.Client, chunked: bool) -> None:
    size = 100 * 2**20
    headers = {"Content-Type": "application/json"} | ({} if chunked else {"Content-Length": str(size)})
    answer = http.post(COMPLETIONS, content=endless(size), headers=headers)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"
    assert "8388608" in answer.json()["error"]["message"]
    engine.run()
    assert http.post(COMPLETIONS, json={"prompt": "ab"}).status_code == 200


def test_a_client_that_sends_all_before_it_reads_hears_why(server: Serving) -> None:
    with connect(server) as connection:
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {100 * 2**20}\r\n\r\n".encode())
        for piece in endless(100 * 2**20):
            connection.sendall(piece)
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_the_limit_is_exact(engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.run()
    body = b'{"prompt": "ab"}'
    with serving(engine, tokenizer, limits=Limits(max_body_bytes=100)) as server, httpx.Client() as http:

        def status(size: int, chunked: bool) -> int:
            padded = body.ljust(size)
            content = iter([padded[:50], padded[50:]]) if chunked else padded
            headers = {"Content-Type": "application/json"}
            return http.post(server.url + COMPLETIONS, content=content, headers=headers).status_code

        for chunked in (False, True):
            assert (status(100, chunked), status(101, chunked)) == (200, 413)


def test_a_client_that_asks_first_need_not_send_its_body(server: Serving) -> None:
    with connect(server) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**9}\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert read_all(connection).startswith(b"HTTP/1.1 413")


# Stopping


def test_open_requests_end_properly_when_the_server_stops(engine: FakeClient, server: Serving) -> None:
    with connect(server) as streaming, connect(server) as whole:
        streaming.sendall(post(COMPLETIONS, {"prompt": "abcdef", "stream": True}))
        whole.sendall(post(COMPLETIONS, {"prompt": "abcdef"}))
        engine.wait_for(lambda: len(engine.submitted) == 2)
        engine.step()
        received = read_until(streaming, b"data: ")
        server.stop()
        received += read_all(streaming)
        *_, last, done = (line for line in received.decode().split("\r\n") if line.startswith("data: "))
        error = chunk_of(last)["error"]
        assert (error["type"], error["code"]) == ("server_error", "unavailable")
        assert error["message"].startswith("the server is shutting down")
        assert done.strip() == "data: [DONE]"
        assert b'"abort"' not in received
        assert read_all(whole).startswith(b"HTTP/1.1 503")
    assert list(engine.ended.values()) == ["abort", "abort"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_is_refused_when_the_server_stops(
    engine: FakeClient, server: Serving, stream: bool
) -> None:
    with connect(server) as connection:
        connection.sendall(post(COMPLETIONS, {"prompt": "abcdef", "n": 2, "stream": stream}))
        engine.wait_for(lambda: len(engine.submitted) == 2)
        server.stop()
        assert read_all(connection).startswith(b"HTTP/1.1 503")
    assert list(engine.ended.values()) == ["abort", "abort"]


def test_requests_may_finish_while_there_is_time(engine: FakeClient, tokenizer: Tokenizer) -> None:
    with serving(engine, tokenizer, grace_s=60) as server, connect(server) as connection:
        connection.sendall(post(COMPLETIONS, {"prompt": "abcdef"}))
        engine.wait_for(lambda: len(engine.submitted) == 1)
        server.stop()
        engine.run()
        assert b'"text":"abcdef"' in read_all(connection)


def test_clients_that_stall_do_not_hold_the_server(engine: FakeClient, tokenizer: Tokenizer) -> None:
    # Longer than the buffers between the two: the server waits for this client, which does not read.
    long = {"prompt": "x" * 500, "n": 100, "logprobs": 20, "stream": True}
    with (
        serving(engine, tokenizer, close_s=0.2) as server,
        connect(server) as half,
        connect(server) as body,
        connect(server) as deaf,
    ):
        half.sendall(b"POST /v1/comp")
        body.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        deaf.sendall(post(COMPLETIONS, long))
        engine.wait_for(lambda: len(engine.submitted) == 100)
        engine.run()
        engine.wait_for(lambda: len(engine.ended) == 100)
        server.stop()
        for connection in (half, body):
            read_until_cut(connection)


PROGRAM = """
import sys
from narrows.runtime.client import ServedModel
from narrows.server.serve import bind, serve, Grace
from narrows.server.tokenizer import Tokenizer
from narrows.testing.client import FakeClient

tokenizer = Tokenizer(sys.argv[1])
client = FakeClient(ServedModel("tiny", sys.argv[1], 512, tokenizer.vocab_size), paused=True)
serve(client, tokenizer, bind("127.0.0.1", 0), grace=Grace(float(sys.argv[2]), 60.0),
      on_listening=lambda url: print(url, flush=True))
client.close()
print("closed", flush=True)
"""


@pytest.mark.parametrize(("grace_s", "signals"), [(0, ["SIGTERM"]), (0, ["SIGINT"]), (60, ["SIGINT", "SIGINT"])])
def test_signals_stop_the_server_and_return_to_the_caller(
    tokenizer: Tokenizer, grace_s: int, signals: list[str]
) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tokenizer.folder), str(grace_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT) as process:
        assert process.stdout is not None
        url = httpx.URL(process.stdout.readline().strip())
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(post(COMPLETIONS, {"prompt": "abcdef", "stream": True}))
            answered = httpx.get(url.join("/metrics"))
            while "submitted 1" not in answered.text:
                answered = httpx.get(url.join("/metrics"))
            for name in signals:
                process.send_signal(getattr(signal, name))
                if len(signals) == 2 and name is signals[0]:
                    # The first has been heard when no new connection is accepted.
                    while accepts(url):
                        pass
            read_all(connection)
        assert process.stdout.read() == "closed\n"
    assert process.returncode == 0


ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).parents[2])}


def accepts(url: httpx.URL) -> bool:
    try:
        socket.create_connection((url.host, url.port)).close()
    except ConnectionError:
        return False
    return True


class Failing(FakeClient):
    """A cluster that fails for good after it was asked twice."""

    def reload(self) -> None:
        raise AssertionError("nobody has sent SIGHUP")

    asked = 0

    @property
    def failure(self) -> str:
        self.asked += 1
        return "" if self.asked < 3 else "decode-0 can not serve: lost too often"


def test_a_failed_cluster_ends_the_server(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Failing(ServedModel("tiny", str(tokenizer.folder), 512, tokenizer.vocab_size))
    monkeypatch.setattr(launch, "started", lambda config, timeout_s: nullcontext((cluster, tokenizer)))
    limits: list[Limits] = []
    serve = narrows.server.serve.serve

    def spied(*args: Any, **settings: Any) -> str:
        limits.append(settings["limits"])
        return serve(*args, **settings)

    monkeypatch.setattr(narrows.server.serve, "serve", spied)
    with pytest.raises(NarrowsError, match=r"^decode-0 can not serve: lost too often$"):
        launch.serve(EngineConfig(max_queue=7), ServerConfig(port=0), 1.0)
    assert [limit.max_waiting for limit in limits] == [7]
    cluster.close()


# Addresses


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port: {port} on 127\.0\.0\.1 is in use.*another --port"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", port).close()


@pytest.mark.parametrize(
    ("host", "port", "field"),
    [("127.0.0.1", -1, "port"), ("127.0.0.1", 65536, "port"), ("no such host", 0, "host"), ("203.0.113.7", 0, "host")],
)
def test_an_impossible_address_is_refused(host: str, port: int, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: ") as caught:
        bind(host, port)
    assert field == "port" or "--port" not in str(caught.value)


def test_the_address_is_reported_as_clients_need_it() -> None:
    with bind("0.0.0.0", 0) as everywhere:
        assert url_of(everywhere) == f"http://127.0.0.1:{everywhere.getsockname()[1]}"


def test_the_client_outlives_its_server(engine: FakeClient, tokenizer: Tokenizer) -> None:
    engine.run()
    for _ in range(2):
        with serving(engine, tokenizer) as server:
            assert httpx.post(server.url + COMPLETIONS, json={"prompt": "ab"}).status_code == 200
    assert not any(thread.name == "server" for thread in threading.enumerate())
