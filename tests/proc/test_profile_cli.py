"""`narrows profile` as a user types it, on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from narrows.profile.importance import ImportanceProfile
from narrows.profile.timing import Timing, Work
from narrows.testing.models import tiny_model

FLAGS = ("--dtype=float32", "--kernels=reference", "--threads=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny", num_hidden_layers=4))


def profile(*words: object, cache: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "NARROWS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "narrows", "profile", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)


def test_importance_is_measured_saved_and_drawn(model: str, tmp_path: Path) -> None:
    text = tmp_path / "own.jsonl"
    text.write_text("".join(json.dumps({"prompt": f"{i} bottles of beer on the wall. " * 9}) + "\n" for i in range(9)))
    out, png, table = tmp_path / "i.safetensors", tmp_path / "i.png", tmp_path / "i.json"
    words = ["--model", model, *FLAGS, "--select", "exact", "--page-size", 8, "--blocks", 50]
    done = profile(
        "importance", *words, "--text", text, "--groups", "100,300", "--out", out, "--json", table, cache=tmp_path
    )
    assert done.returncode == 0, done.stderr
    made = ImportanceProfile.load(out, model=None, selector=None)
    assert [(g.num_tokens, g.matrix.shape) for g in made.groups] == [(100, (4, 50)), (300, (4, 50))]
    assert [row["prompt_tokens"] for row in json.loads(table.read_text())["results"]] == [100, 300]
    shown = profile("show", out, "--png", png, cache=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "300" in shown.stdout and made.model in shown.stdout
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_out_files_are_where_serving_looks(model: str, tmp_path: Path) -> None:
    for words in (("importance", "--select", "exact", "--groups", "64"), ("timing",)):
        done = profile(*words, "--model", model, *FLAGS, cache=tmp_path)
        assert done.returncode == 0, done.stderr
        path = Path(done.stdout.splitlines()[-1])
        assert path.is_relative_to(tmp_path / "profiles")
        shown = profile("show", path, cache=tmp_path)
        assert shown.returncode == 0 and "tokens" in shown.stdout
    assert Timing.load(path, model=None, setup=None).prefill_s([Work(64, 64)]) > 0
    assert not (tmp_path / "models").exists()


def test_hash_weights_are_trained(model: str, tmp_path: Path) -> None:
    done = profile("hash", "--model", model, *FLAGS, "--out", tmp_path / "h", cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(len(array) == 4 for array in load_file(tmp_path / "h").values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("importance", "--groups", "5,x"), "is not a list of lengths"),
        (("importance", "--groups", "0"), "0 is no length"),
        (("importance", "--text", "/missing"), "text: /missing can not be read"),
        (("importance", "--select", "none"), "Invalid value for '--select'"),
        (("importance", "--out", "/no/such/folder/x"), "can not be written"),
        (("hash", "--select", "exact"), "Invalid value for '--select'"),
        (("show", "/missing"), "there is no file /missing"),
        (("show", __file__), "neither a profile of importance nor one of timing"),
    ],
)
def test_what_can_not_be_done_is_said(model: str, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    extra = () if words[0] == "show" else ("--model", model, *FLAGS)
    if words[0] == "importance" and "--select" not in words:
        extra += ("--select", "exact")
    done = profile(*words, *extra, cache=tmp_path)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
