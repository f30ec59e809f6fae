"""The server as its users meet it: real processes, a real socket, the official client, and bad manners."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from conftest import FLAGS, Server, start, stop

from narrows.kernels.reference import ReferenceKernels
from narrows.models.load import load_model
from narrows.server.tokenizer import Tokenizer
from narrows.testing.driver import Driver


def wait_until_idle(server: Server) -> None:
    """Poll /metrics until no page is held on any instance; the test's time limit bounds it."""
    while any(server.gauge("narrows_used_pages").values()) or any(server.gauge("narrows_live_requests").values()):
        pass


def greedy(folder: Path, text: str, num_tokens: int) -> str:
    """What the model says, without any of the engine."""
    import torch

    kernels, tokenizer = ReferenceKernels(), Tokenizer(folder)
    driver = Driver(load_model(folder, torch.float32, kernels), kernels)
    return tokenizer.decode(driver.greedy(tokenizer.encode(text), num_tokens))


def completion(server: Server, text: str, **more: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": text, "temperature": 0, "max_tokens": 20, "ignore_eos": True, **more}
    return server.post("/v1/completions", json=body)


def test_the_official_client_gets_what_the_model_says(server: Server, tiny: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    prompt = "The quick brown fox jumps over the lazy dog. " * 3
    want = greedy(tiny, prompt, 20)
    answer = client.completions.create(
        model="tiny", prompt=prompt, temperature=0, max_tokens=20, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == want
    assert answer.usage is not None and answer.usage.completion_tokens == 20
    pieces = client.completions.create(
        model="tiny", prompt=prompt, temperature=0, max_tokens=20, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(piece.choices[0].text for piece in pieces) == want
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=5, n=2, seed=1
    )
    assert len(chat.choices) == 2
    client.close()


def test_a_repeated_prompt_is_taken_from_the_cache(server: Server) -> None:
    prompt = "x" * 100
    first, second = (completion(server, prompt).json() for _ in range(2))
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_every_page(server: Server, streamed: bool) -> None:
    """The connection is cut in the middle of the answer."""
    body = json.dumps(
        {"model": "tiny", "prompt": "abc" * 30, "max_tokens": 150, "ignore_eos": True, "stream": streamed}
    ).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        while not any(server.gauge("narrows_live_requests").values()):
            pass
        if streamed:
            raw.recv(64)
    wait_until_idle(server)
    assert completion(server, "still there?").status_code == 200


def test_two_hundred_at_once_on_two_decode_slots_all_end(server: Server) -> None:
    def one(i: int) -> int:
        return completion(server, f"request {i} " * (i % 7 + 1), max_tokens=8).status_code

    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        codes = list(pool.map(one, range(200)))
    assert set(codes) <= {200, 429} and codes.count(200) >= 100
    wait_until_idle(server)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x" * 300}, 400, "prompt"),
        ({"model": "other"}, 404, "model"),
        ({"prompt": 5}, 400, "prompt"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 10**9}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"temperature": 1e9}, 400, "temperature"),
        ({"temprature": 1}, 400, "temprature"),
    ],
)
def test_bad_requests_are_refused_by_name_and_service_goes_on(
    server: Server, change: dict[str, object], status: int, param: str
) -> None:
    answer = completion(server, "fine", **change)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["param"] == param and param in error["message"]) or status == 404
    assert completion(server, "fine").status_code == 200


def test_broken_json_and_a_huge_body_are_refused_and_service_goes_on(server: Server) -> None:
    broken = server.post("/v1/completions", content=b'{"model": ', headers={"Content-Type": "application/json"})
    assert broken.status_code == 400 and broken.json()["error"]["message"]
    huge = server.post("/v1/completions", content=b"x" * 100_000_000)
    assert huge.status_code == 413 and huge.json()["error"]["message"]
    assert completion(server, "fine").status_code == 200


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_lost_instances_come_back_and_open_requests_are_finished(tiny: Path, transport: str) -> None:
    server = start(f"--model={tiny}", *FLAGS, f"--transport={transport}")
    try:
        want = completion(server, "to be continued", max_tokens=200).json()["choices"][0]["text"]
        for restarts in (1, 2):
            oldest = server.workers()["0"]  # prefill, and once that is a new process, decode
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                answer = pool.submit(completion, server, "to be continued", max_tokens=200)
                while not any(server.gauge("narrows_running_requests").values()):
                    pass
                os.kill(oldest, signal.SIGKILL)
                assert answer.result().json()["choices"][0]["text"] == want
            while sum(server.gauge("narrows_restarts_total").values()) < restarts:
                pass
            while server.get("/ready").status_code != 200:
                pass
        lost = [line for line in server.log if "was lost" in line]
        assert ["prefill-0" in lost[0], "decode-0" in lost[1]] == [True, True], lost
    finally:
        assert stop(server) == 0, "".join(server.log)


def test_a_stopped_instance_is_noticed_and_replaced(tiny: Path) -> None:
    server = start(f"--model={tiny}", *FLAGS, "--silence-s=2")
    try:
        want = completion(server, "abc", max_tokens=10).json()["choices"]
        os.kill(server.workers()["1"], signal.SIGSTOP)
        assert completion(server, "abc", max_tokens=10).json()["choices"] == want
    finally:
        assert stop(server) == 0, "".join(server.log)


def test_killing_the_server_leaves_no_process(tiny: Path) -> None:
    server = start(f"--model={tiny}", *FLAGS)
    workers = [psutil.Process(pid) for pid in server.workers().values()]
    assert len(workers) == 2
    stop(server, signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_ctrl_c_ends_open_streams_properly(tiny: Path) -> None:
    server = start(f"--model={tiny}", *FLAGS)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait(30)
    assert stop(server) == 0
    reader.join(30)
    assert lines[-2] == "data: [DONE]" or "error" in lines[-2]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "narrows", *arguments], capture_output=True, text=True, timeout=60)


def test_wrong_flags_and_settings_say_what_and_how(tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "narrows.toml"
    config.write_text("max_num_seq = 3\n")
    cases = (
        (("serve", "--modle=x"), "--model"),
        (("serve", "--model=nowhere"), "nowhere"),
        (("serve", f"--model={tiny}", "--page-size=48"), "page_size: 48 is not a power of two; try 32 or 64"),
        (("serve", f"--model={tiny}", "--max-model-len=100000"), "max_model_len"),
        (("serve", f"--model={tiny}", f"--config={config}"), "max_num_seqs"),
        (("serve", f"--model={tiny}", "--decode=0"), "decode"),
    )
    for arguments, text in cases:
        done = run(*arguments)
        assert done.returncode != 0 and text in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_a_port_in_use_is_refused(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", f"--model={tiny}", f"--port={port}")
    assert done.returncode == 1 and str(port) in done.stderr and "Traceback" not in done.stderr


def test_truncated_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = run("serve", f"--model={tmp_path}", "--port=0", *FLAGS)
    assert done.returncode == 1 and "model.safetensors" in done.stderr, done.stderr


def test_run_answers_once(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run("run", "hello there", f"--model={tiny}", "--raw", "--max-tokens=9", f"--json={out}", *FLAGS)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    assert done.stdout == written["text"] + "\n"
    assert written["tokens"] <= 9 and written["ttft_s"] > 0
