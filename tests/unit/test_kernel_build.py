"""Building the kernels: once, by one process, with nothing left behind. Compilers here are small scripts."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from narrows.errors import KernelError
from narrows.kernels import build

WRITE = 'while [ "$1" != -o ]; do shift; done; echo made > "$2"'
NO_CACHE = ["/dev/null", "/proc/none"]  # a file, and a folder that nobody can make


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NARROWS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def compiler(folder: Path, *lines: str) -> Path:
    """A script that notes its arguments in `calls` and then does `lines`."""
    path = folder / "compiler"
    path.write_text("\n".join(["#!/bin/sh", f'echo "$*" >> {folder}/calls', *lines]) + "\n")
    path.chmod(0o755)
    return path


def start(code: str, cc: Path) -> "subprocess.Popen[str]":
    """In a group of its own, as a shell starts a program."""
    return subprocess.Popen(
        [sys.executable, "-c", f"from narrows.kernels.build import build, prepare\n{code}"],
        env=os.environ | {"CC": str(cc)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def test_of_several_processes_one_compiles(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "go")
    cc = compiler(tmp_path, f"read _ < {tmp_path}/go", WRITE)
    started = [start("prepare(lambda text: print(text, flush=True))", cc) for _ in range(3)]
    for process in started:  # each has found no library
        assert process.stdout is not None
        assert process.stdout.readline() == "building the CPU kernels, once\n"
    (tmp_path / "go").write_text("go\n")
    assert [process.communicate() for process in started] == [("", "")] * 3
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_prepare_makes_what_build_finds(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(compiler(tmp_path, WRITE)))
    said: list[str] = []
    build.prepare(said.append)
    assert said == ["building the CPU kernels, once"]
    assert build.build().read_text() == "made\n"
    assert list(cache.iterdir()) == [build.build()]
    build.prepare(said.append)
    assert len(said) == 1
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


@pytest.mark.parametrize("cc", ["no-such-compiler", "false", "true", "'"])
def test_prepare_leaves_complaints_to_those_who_need_the_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch, cc: str
) -> None:
    monkeypatch.setenv("CC", cc)
    build.prepare()
    assert not cache.exists() or list(cache.iterdir()) == []


@pytest.mark.parametrize("folder", NO_CACHE)
def test_prepare_without_a_cache_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("CC", str(compiler(tmp_path, WRITE)))
    monkeypatch.setenv("NARROWS_CACHE", folder)
    build.prepare(pytest.fail)
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_a_compiler_ends_with_its_caller(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """The compiler's child too, which ignores a terminal's Ctrl-C. The pipe ends when all that hold it are gone."""
    os.mkfifo(tmp_path / "alive")
    cc = compiler(tmp_path, f"exec 3>{tmp_path}/alive", "echo started >&3", "sleep 100 & wait")
    process = start("build()", cc)
    with (tmp_path / "alive").open() as alive:
        assert alive.readline() == "started\n"
        os.killpg(process.pid, by)
        assert alive.read() == ""
    _, said = process.communicate()
    if by == signal.SIGINT:
        assert "KeyboardInterrupt" in said
        assert list(cache.iterdir()) == []
    else:
        assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".partial"]
    monkeypatch.setenv("CC", str(compiler(tmp_path, WRITE)))
    library = build.build()
    assert list(cache.iterdir()) == [library]


@pytest.mark.parametrize(
    ("cc", "said"),
    [
        ("true", "succeeded but wrote no library"),
        ("false", "failed with 1"),
        ("cc '", "CC=cc ' is no command"),
        ("no-such-compiler -m64", "CC=no-such-compiler -m64 not found"),
    ],
)
def test_a_compiler_that_can_not(monkeypatch: pytest.MonkeyPatch, cache: Path, cc: str, said: str) -> None:
    monkeypatch.setenv("CC", cc)
    with pytest.raises(KernelError, match=f"(?s)kernels: .*{said}.*install a C compiler"):
        build.build()
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_compiler_of_several_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", f"{compiler(tmp_path, WRITE)} gcc 'two words'")
    one = build.build()
    assert (tmp_path / "calls").read_text().startswith("gcc two words -O3 ")
    monkeypatch.setenv("CC", f"{compiler(tmp_path, WRITE)} clang")
    assert build.build() != one


@pytest.mark.parametrize("folder", NO_CACHE)
def test_a_cache_that_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    """One library for this process, which loads and leaves no file."""
    sources, temporary = tmp_path / "sources", tmp_path / "temporary"
    sources.mkdir()
    temporary.mkdir()
    (sources / "answer.c").write_text(f"int answer(void) {{ return {len(folder)}; }}\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("NARROWS_CACHE", folder)
    build.private_library.cache_clear()
    with caplog.at_level(logging.WARNING):
        library = build.build()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert folder in caplog.text and "set NARROWS_CACHE" in caplog.text
    assert build.load_library(library).answer() == len(folder)
    assert build.build() == library
    assert list(temporary.iterdir()) == []


def test_no_cache_and_nowhere_else_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(compiler(tmp_path, WRITE)))
    monkeypatch.setenv("NARROWS_CACHE", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null")
    with pytest.raises(KernelError, match=r"no library without a cache either: .*set NARROWS_CACHE or TMPDIR"):
        build.build()
