"""Real processes: a server on a tiny model, spoken to over HTTP."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from narrows.testing.models import tiny_model

# Small enough that a few requests fill it.
FLAGS = (
    "--dtype=float32",
    "--kernels=reference",
    "--threads=1",
    "--max-model-len=256",
    "--page-size=8",
    "--max-num-seqs=2",
    "--max-num-batched-tokens=64",
)


@dataclass
class Server:
    """`narrows serve` in a process of its own."""

    process: "subprocess.Popen[str]"
    url: str
    log: list[str]
    reader: threading.Thread

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **more)

    def workers(self) -> dict[str, int]:
        """Pids of the instances, as the process table shows them, in the order of their start."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [c for c in children if "narrows.runtime.worker" in " ".join(c.cmdline())]
        return {str(i): child.pid for i, child in enumerate(sorted(found, key=lambda c: c.create_time()))}

    def gauge(self, name: str) -> dict[str, float]:
        """A metric by instance (or "" for one without labels)."""
        page = self.get("/metrics").text
        lines = re.findall(rf"^{name}(?:{{([^}}]*)}})? (\S+)$", page, re.MULTILINE)
        return {(re.search(r'instance="([^"]*)"', labels) or [None, ""])[1]: float(value) for labels, value in lines}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def start(*flags: str) -> Server:
    """Start a server and wait until it says where it is. Fails with its log when it ends before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "narrows", "serve", "--port=0", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    log: list[str] = []
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"served at (http://\S+)/v1", line):
            reader = threading.Thread(target=log.extend, args=(process.stderr,))
            reader.start()
            return Server(process, found[1], log, reader)
    process.stderr.close()
    raise AssertionError(f"the server ended with {process.wait()}: {''.join(log)}")


def stop(server: Server, number: int = signal.SIGINT) -> int:
    """Ctrl-C, or another signal; the exit status once nothing of it is left."""
    if server.process.poll() is None:
        server.process.send_signal(number)
    status = server.process.wait(30)
    server.reader.join(30)
    assert server.process.stderr is not None
    server.process.stderr.close()
    return status


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    one = start(f"--model={tiny}", *FLAGS)
    yield one
    assert stop(one) == 0, "".join(one.log)
