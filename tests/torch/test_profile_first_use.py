"""Profiles on first use: made once, found again, made anew where they are damaged or for something else."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from narrows import profiles
from narrows.config import EngineConfig
from narrows.errors import ConfigError
from narrows.models.fingerprint import folder_fingerprint
from narrows.profile.importance import VERSION, Group, ImportanceProfile
from narrows.profile.timing import Timing
from narrows.profiles import Workshop, ensure_files
from narrows.runtime.files import ProfileFiles
from narrows.select.registry import NEEDS_CALIBRATION
from narrows.testing.models import tiny_model


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("NARROWS_CACHE", str(tmp_path / "cache"))
    folder = tiny_model(tmp_path / "tiny", num_hidden_layers=4)
    return EngineConfig(model=str(folder), dtype="float32", kernels="reference", threads=1, page_size=8, select="exact")


def files_of(config: EngineConfig) -> ProfileFiles:
    return ensure_files(config, Path(config.model))


def test_without_a_selector_nothing_is_made(config: EngineConfig, tmp_path: Path) -> None:
    assert files_of(replace(config, select="none")) == ProfileFiles()
    assert not (tmp_path / "cache").exists()


def test_first_use_makes_what_the_second_finds(config: EngineConfig, capsys: pytest.CaptureFixture[str]) -> None:
    files = files_of(config)
    said = capsys.readouterr().err
    assert "measuring which KV matters, once" in said and "measuring prefill, once" in said
    assert files.model == folder_fingerprint(Path(config.model)) and files.calibration is None
    assert files.importance is not None and files.timing is not None
    made = ImportanceProfile.load(Path(files.importance), model=files.model, selector=None)
    assert made.selector == Workshop(config, Path(config.model)).selector(None).fingerprint
    assert [group.num_tokens for group in made.groups] == [512 - 64]
    assert Timing.load(Path(files.timing), model=files.model, setup=None).prefill_s([]) >= 0
    # Found again, and without torch: a server's front end starts in a moment.
    program = f"""
import sys
from pathlib import Path
from narrows.config import EngineConfig
from narrows.profiles import ensure_files
files = ensure_files({config!r}, Path({config.model!r}))
assert "torch" not in sys.modules
print(files)
"""
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stdout.strip() == repr(files) and again.stderr == ""


def test_what_is_damaged_is_made_anew(config: EngineConfig) -> None:
    files = files_of(config)
    assert files.importance is not None and files.timing is not None
    for path in map(Path, (files.importance, files.timing)):
        whole = path.read_bytes()
        path.write_bytes(whole[:-5])
        assert files_of(config) == files
        assert len(path.read_bytes()) == len(whole)


def test_other_settings_are_other_files(config: EngineConfig) -> None:
    shop = Workshop(config, Path(config.model))
    others = [
        replace(config, select="streaming"),
        replace(config, select_ratio=0.3),
        replace(config, page_size=16),
        replace(config, dtype="bfloat16"),
        replace(config, max_model_len=300),
    ]
    paths = {Workshop(other, Path(config.model)).importance_path(None) for other in others}
    assert len(paths | {shop.importance_path(None)}) == 6
    assert Workshop(replace(config, threads=2), Path(config.model)).timing_path != shop.timing_path


def test_a_profile_that_is_named_is_used_or_refused(config: EngineConfig, tmp_path: Path) -> None:
    own = tmp_path / "own.safetensors"
    group = Group.from_counts(np.ones((4, 64), dtype=int), 1)
    ImportanceProfile(folder_fingerprint(Path(config.model)), "any", VERSION, (group,)).save(own)
    assert files_of(replace(config, importance=str(own))).importance == str(own)
    ImportanceProfile("another", "any", VERSION, (group,)).save(own)
    with pytest.raises(ConfigError, match="another model"):
        files_of(replace(config, importance=str(own)))


def test_a_selector_that_learns_gets_its_calibration(config: EngineConfig) -> None:
    files = files_of(replace(config, select="hata"))
    assert files.calibration is not None and Path(files.calibration).is_file()
    assert files.importance is not None
    made = ImportanceProfile.load(Path(files.importance), model=files.model, selector=None)
    shop = Workshop(replace(config, select="hata"), Path(config.model))
    assert made.selector == shop.selector(Path(files.calibration)).fingerprint


def test_the_selectors_that_learn_are_known_without_torch() -> None:
    assert set(profiles.CALIBRATED) == NEEDS_CALIBRATION


def test_a_cache_that_can_not_be_written_is_named(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NARROWS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"can not be kept.*NARROWS_CACHE"):
        files_of(config)


def test_a_context_too_short_to_measure_in_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="max_model_len: 64 tokens are too few"):
        files_of(replace(config, max_model_len=64))
