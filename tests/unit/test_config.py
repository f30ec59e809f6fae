"""Settings: their order of precedence, their refusals, and the sizes that follow from them."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from narrows import cli
from narrows.config import EngineConfig, ServerConfig, read_toml
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
