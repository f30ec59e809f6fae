"""The cache: where it is, and that an entry is made by one and leaves nothing but itself."""

import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from narrows.cache import cache_root, make_once
from narrows.errors import ConfigError


@pytest.mark.parametrize(
    ("own", "user", "expected"),
    [
        ("/own", "/user", "/own"),
        ("~/own", None, "/home/me/own"),
        (None, "/user", "/user/narrows"),
        ("", "~/user", "/home/me/user/narrows"),
        (None, None, "/home/me/.cache/narrows"),
        (None, "", "/home/me/.cache/narrows"),
    ],
)
def test_where_it_is(monkeypatch: pytest.MonkeyPatch, own: str | None, user: str | None, expected: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in (("NARROWS_CACHE", own), ("XDG_CACHE_HOME", user)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWS_CACHE", "~no-such-user/cache")
    with pytest.raises(ConfigError, match=r"NARROWS_CACHE: ~no-such-user/cache names no folder"):
        cache_root()


def test_one_makes_and_the_others_wait(tmp_path: Path) -> None:
    """Threads here, each with its own descriptor of the lock file, as processes have."""
    entry, calls = tmp_path / "cache" / "entry", []
    started, barrier = threading.Event(), threading.Barrier(5)

    def make(path: Path) -> None:
        calls.append(path)
        started.wait()
        path.write_text("whole")

    def one(_: int) -> str:
        barrier.wait()
        return make_once(entry, make).read_text()

    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(one, range(4))
        barrier.wait()
        assert not entry.exists()
        started.set()
        assert list(answers) == ["whole"] * 4
    assert len(calls) == 1
    assert list(entry.parent.iterdir()) == [entry]


def test_a_failure_leaves_nothing_and_may_be_tried_again(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("half")
        (path.parent / "temporary").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "entry", fail)
    assert list(tmp_path.iterdir()) == []
    assert make_once(tmp_path / "entry", Path.mkdir).is_dir()


def test_what_dead_processes_left_is_removed_and_what_living_ones_hold_is_not(tmp_path: Path) -> None:
    for name in ("dead.ab12_xyz.partial", "live.ab12_xyz.partial", "new.ab12_xyz.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    (tmp_path / "dead.lock").touch()
    kept = ["live.lock", "live.ab12_xyz.partial", "new.so.ab12_xyz.partial", "new.partial", "somebody's"]
    for name in kept[2:]:
        (tmp_path / name).touch()
    with (tmp_path / "live.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_once(tmp_path / "new", Path.touch)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "new"])


def test_what_is_there_is_not_made_and_nothing_written(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.touch()
    before = tmp_path.stat().st_mtime_ns
    assert make_once(entry, lambda _: pytest.fail("made again")) == entry
    assert tmp_path.stat().st_mtime_ns == before
