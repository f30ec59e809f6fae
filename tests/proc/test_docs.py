"""What README and the documents tell a reader to type works as written."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Server, start, stop

from narrows.config import EngineConfig, ServerConfig, read_toml

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    """(document, text) of each fenced block in that language."""
    return [
        (document.name, text)
        for document in DOCUMENTS
        for text in re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    ]


def commands(program: str) -> list[str]:
    return [line for _, text in blocks("console") for line in text.splitlines() if line.startswith(program)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = start()
    yield one
    assert stop(one) == 0


@pytest.mark.slow
@pytest.mark.parametrize("code", [text for _, text in blocks("python")], ids=range(len(blocks("python"))))
def test_python_blocks_run(code: str, server: Server) -> None:
    code = code.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("line", [c for c in commands("narrows") if " serve" not in c and " bench" not in c])
def test_commands_run(line: str) -> None:
    words = [sys.executable, "-m", *shlex.split(line)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("line", [c for c in commands("narrows serve") if "--help" not in c])
def test_serve_commands_start(line: str) -> None:
    flags = [word for word in shlex.split(line)[2:] if word != "8000" and word != "--port"]
    one = start(*flags)
    try:
        assert one.get("/ready").status_code == 200
    finally:
        assert stop(one) == 0


def test_serve_help_names_every_setting() -> None:
    done = subprocess.run([sys.executable, "-m", "narrows", "serve", "--help"], capture_output=True, text=True)
    for name in (*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__):
        assert f"--{name.replace('_', '-')}" in done.stdout


def test_make_targets_that_are_named_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = {t for document in DOCUMENTS for t in re.findall(r"`?make (\w+)", document.read_text())}
    assert {"demo", "test", "serve", "setup", "bench"} <= named & set(targets)


# Scenarios of the simulator are read by tests/unit/test_sim_cluster_file.py.
@pytest.mark.parametrize(("document", "text"), [one for one in blocks("toml") if "simulator" not in str(one)])
def test_toml_blocks_are_valid_settings(document: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "narrows.toml"
    file.write_text(text)
    assert read_toml(file)


def test_links_lead_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
