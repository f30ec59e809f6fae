"""The transport benchmark runs and keeps the benchmarks' contract; its figures are not tested."""

import os

import pytest

from narrows.bench.transport import run


def test_rows_have_the_promised_fields(capsys: pytest.CaptureFixture[str]) -> None:
    cores = os.sched_getaffinity(0)
    result = run(block_bytes=(8192, 1 << 20), link_gbps=(), total_bytes=4 << 20, rounds=1)
    assert result["name"] == "transport"
    assert {"name", "config", "results", "environment"} <= set(result)
    rows = result["results"]
    assert [(row["transport"], row["block_bytes"]) for row in rows] == [
        ("tcp", 8192),
        ("tcp", 1 << 20),
        ("shm", 8192),
        ("shm", 1 << 20),
    ]
    for row in rows:
        assert set(row) == {"transport", "block_bytes", "gb_per_s", "reference_gb_per_s", "ratio"}
        assert row["gb_per_s"] > 0
        assert row["reference_gb_per_s"] > 0
    assert "block bytes" in capsys.readouterr().out
    assert os.sched_getaffinity(0) == cores
