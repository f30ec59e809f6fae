"""Settings: their order of precedence, their refusals, and the sizes that follow from them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from narrows import cli, launch
from narrows.config import EngineConfig, ServerConfig, read_toml
from narrows.demo import check_lengths
from narrows.errors import ConfigError
from narrows.models.spec import read_spec
from narrows.runtime.sizing import plan_sizes
from narrows.testing.models import tiny_model


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"prefill": 0}, "prefill: 0 is too small; use at least 1"),
        ({"page_size": 48}, "page_size: 48 is not a power of two; try 32 or 64"),
        ({"link_gbps": 0.0}, "link_gbps: 0.0 is out of range"),
        ({"dtype": "int8"}, "dtype: 'int8' is not known; use one of bfloat16, float32"),
        ({"transport": "pigeon"}, "transport: 'pigeon' is not known; use one of auto, shm, tcp"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"silence_s": 0.1}, "silence_s"),
        ({"prefill": "two"}, "prefill: 'two' has the wrong type; use a whole number"),
        ({"prefill": True}, "prefill: True has the wrong type; use a whole number"),
        ({"prefill": 1.5}, "prefill: 1.5 has the wrong type; use a whole number"),
        ({"link_gbps": "1"}, "link_gbps: '1' has the wrong type; use a number"),
        ({"checksums": 1}, "checksums: 1 has the wrong type; use true or false"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes: 0 is too small"),
        ({"page_size": 2**20}, "page_size: 1048576 is too large; use at most 1024"),
        ({"served_model_name": ""}, "served_model_name: is empty"),
        ({"checksums": True, "transport": "shm"}, "checksums: shm copies KV without frames"),
    ],
)
def test_engine_settings_out_of_range_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**settings)  # type: ignore[arg-type]


def test_server_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="port: 70000"):
        ServerConfig(port=70_000)
    with pytest.raises(ConfigError, match="api_key: is empty"):
        ServerConfig(api_key="")


def test_auto_transport_is_one_that_can_do_what_is_asked() -> None:
    assert EngineConfig().transport_kind == "shm"
    assert EngineConfig(checksums=True).transport_kind == "tcp"
    assert EngineConfig(transport="tcp").transport_kind == "tcp"


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("max_num_seq = 3", "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'"),
        ("xyzzy = 3", "unknown setting 'xyzzy'; known are"),
        ("prefill =", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_by_line_or_name(tmp_path: Path, toml: str, text: str) -> None:
    file = tmp_path / "narrows.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=text):
        read_toml(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)


def test_command_line_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "narrows.toml"
    file.write_text("prefill = 2\ndecode = 2\nmax_queue = 2\nlink_gbps = 1\n")
    seen: list[tuple[EngineConfig, ServerConfig]] = []
    monkeypatch.setattr("narrows.launch.serve", lambda engine, server, timeout_s: seen.append((engine, server)))
    monkeypatch.setenv("NARROWS_SERVE_DECODE", "3")
    monkeypatch.setenv("NARROWS_SERVE_MAX_QUEUE", "3")
    done = CliRunner().invoke(cli.main, ["serve", f"--config={file}", "--max-queue=4", "--port=9"])
    assert done.exit_code == 0, done.output
    ((engine, server),) = seen
    assert (engine.prefill, engine.decode, engine.max_queue, engine.max_num_seqs) == (2, 3, 4, 16)
    assert engine.link_gbps == 1.0 and server.port == 9


def test_an_unknown_flag_names_the_nearest(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli.main, ["serve", "--max-num-seq=2"])
    assert done.exit_code == 2 and "--max-num-seqs" in done.output


def test_sizes_by_hand(tmp_path: Path) -> None:
    """Tiny model: 2 layers x 2 KV heads x (16 + 16) numbers x 4 bytes = 512 bytes a token."""
    spec = read_spec(tiny_model(tmp_path))
    config = EngineConfig(dtype="float32", page_size=8, max_model_len=100)
    assert plan_sizes(config, spec, memory_bytes=2**40).layout.num_pages == 4 * 13
    assert plan_sizes(config, spec, memory_bytes=10 * 512 * 8 * 20).layout.num_pages == 20  # a tenth of the memory
    exact = EngineConfig(dtype="float32", page_size=8, max_model_len=100, kv_cache_memory_bytes=512 * 8 * 13)
    assert plan_sizes(exact, spec).layout.num_pages == 13
    short = EngineConfig(dtype="float32", page_size=8, max_model_len=100, kv_cache_memory_bytes=512 * 8 * 12)
    with pytest.raises(ConfigError, match=f"raise kv_cache_memory_bytes to at least {512 * 8 * 13}"):
        plan_sizes(short, spec)
    with pytest.raises(ConfigError, match=r"2 pools of 1\.0 GiB are more than"):
        plan_sizes(EngineConfig(dtype="float32", kv_cache_memory_bytes=2**30), spec, memory_bytes=2**30)
    with pytest.raises(ConfigError, match="more than the 512 positions"):
        plan_sizes(EngineConfig(dtype="float32", max_model_len=513), spec)


# The command line


@pytest.mark.parametrize(
    "command",
    [["run", "hi"], ["demo"], ["bench", "transport"], ["bench", "engine"]],
    ids=lambda command: "-".join(command),
)
def test_a_result_that_can_not_be_written_is_refused_first(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("this is the work")

    for name in ("launch.run_once", "demo.demo", "bench.transport.run", "bench.engine.run"):
        monkeypatch.setattr(f"narrows.{name}", work)
    for file in (tmp_path / "none" / "x.json", tmp_path, Path("/proc/x.json")):  # root may write almost anywhere
        done = CliRunner().invoke(cli.main, [*command, f"--json={file}"])
        assert done.exit_code == 2
        assert "'--json'" in done.output and "can not be written" in done.output
    file = tmp_path / "x.json"
    with pytest.raises(AssertionError, match="this is the work"):
        CliRunner().invoke(cli.main, [*command, f"--json={file}"], catch_exceptions=False)
    assert not file.exists()
    file.write_text("old")
    with pytest.raises(AssertionError, match="this is the work"):
        CliRunner().invoke(cli.main, [*command, f"--json={file}"], catch_exceptions=False)
    assert file.read_text() == "old"


@pytest.mark.parametrize(
    "command", [["bench", "transport", "--rounds=0"], ["bench", "engine", "--rounds=0"], ["demo", "--max-tokens=0"]]
)
def test_counts_start_at_one(command: list[str]) -> None:
    done = CliRunner().invoke(cli.main, command)
    assert done.exit_code == 2 and "0 is not in the range x>=1" in done.output


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ((4000, 9000, 8192), "max_tokens: 9000 does not fit; use 1 to 8064"),
        ((8192, 64, 8192), "tokens: 8192 does not fit; use 128 to 8128"),
        ((127, 64, 8192), "tokens: 127 does not fit; use 128 to 8128"),
        ((128, 1, 128), "max_model_len: 128 tokens are too few for the demo; use at least 129"),
    ],
)
def test_a_demo_that_does_not_fit_names_what_to_change(lengths: tuple[int, int, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_lengths(*lengths)


def test_the_longest_demos_fit() -> None:
    check_lengths(8128, 64, 8192)
    check_lengths(128, 8064, 8192)


def test_prompts_must_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    monkeypatch.setattr("narrows.launch.run_once", lambda config, prompt, params, **_: prompts.append(prompt))
    done = CliRunner().invoke(cli.main, ["run", "-"], input=b"a\xff")
    assert done.exit_code == 1
    assert "prompt: standard input is not UTF-8 text: invalid start byte at byte 1" in done.output
    for arguments in (["a\udcff"], ["a", "--stop=b", "--stop=a\udcff"]):
        done = CliRunner().invoke(cli.main, ["run", *arguments])
        assert done.exit_code == 2 and "character 1 is not valid UTF-8" in done.output
    assert CliRunner().invoke(cli.main, ["run", "-"], input="Grüße".encode()).exit_code == 0
    assert prompts == ["Grüße"]


LOGGING = """
import logging, sys, types
from narrows import cli, launch

def serve(*_):
    for name in ("narrows.runtime.cluster", "uvicorn.error", "httpx"):
        logging.getLogger(name).info("%s at info", name)
        logging.getLogger(name).warning("%s at warning", name)

sys.modules["narrows.launch"] = types.SimpleNamespace(serve=serve)
cli.main([*sys.argv[1:], "serve"])
"""


@pytest.mark.parametrize("verbose", [False, True])
def test_logging_goes_to_standard_error_in_one_format(verbose: bool) -> None:
    command = [sys.executable, "-c", LOGGING, *(["-v"] if verbose else [])]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == ""
    lines = [line.split(" ", 2)[2] for line in done.stderr.splitlines()]  # less date and time
    info = ["INFO narrows.runtime.cluster at info"] if verbose else []
    warnings = [f"WARNING {name} at warning" for name in ("narrows.runtime.cluster", "uvicorn.error", "httpx")]
    assert lines == [*info, *warnings]


def test_nothing_is_shown_while_nothing_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: EngineConfig, **_: object) -> None:
        raise ConfigError("model: is not there")

    monkeypatch.setattr(launch, "open_cluster", fail)
    with pytest.raises(ConfigError), launch.started(EngineConfig()):
        pass
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("given", "share"), [(0.25, 0.25), (0, 0.0), ("0.5", 0.5), ("auto", None)])
def test_speculation_as_a_file_or_a_flag_says_it(given: object, share: float | None) -> None:
    assert EngineConfig(select="exact", speculative=given).scheme.speculative == share  # type: ignore[arg-type]
