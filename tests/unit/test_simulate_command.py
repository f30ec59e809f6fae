"""`narrows simulate`: what it writes can be run again, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from narrows.cli import main

SMALL = ("--requests", "40", "--rate", "20", "--prefill", "0", "--mix", "sharegpt")
LINES = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}',
    '{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]}',
)


def simulate(*words: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, words)])


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows = json.loads(file.read_text())["results"]
    for row in rows:
        assert row.pop("wall_s") > 0
    return rows  # type: ignore[no-any-return]


def test_files_are_written_and_the_json_runs_again(tmp_path: Path) -> None:
    first, again, png, trace = (tmp_path / name for name in ("a.json", "b.json", "a.png", "t.json"))
    done = simulate(*SMALL, "--json", first, "--png", png, "--chrome-trace", trace)
    assert done.exit_code == 0, done.output
    assert "tpot_mean_ms" in done.output
    assert png.read_bytes().startswith(b"\x89PNG")
    spans = json.loads(trace.read_text())["traceEvents"]
    assert {"decode-0", "decode-7"} <= {e["args"]["name"] for e in spans if e["name"] == "process_name"}
    done = simulate(first, "--json", again)
    assert done.exit_code == 0, done.output
    assert rows_of(again) == rows_of(first)
    (row,) = rows_of(first)
    assert row["requests"] == 40
    assert row["slo_attainment"] == 1.0


def test_a_trace_and_policies_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "small.jsonl").write_text("\n".join(LINES) + "\n")
    (tmp_path / "scenario.toml").write_text(
        '[workload]\ntrace = "small.jsonl"\n[model]\nname = "Qwen3-8B"\n[hardware]\nname = "L20"\n'
        "[cluster]\nprefill_instances = 1\ninstances_per_node = 2\n"
    )
    out, elsewhere = tmp_path / "out.json", tmp_path / "deep" / "b.json"
    png = tmp_path / "p.png"
    done = simulate(tmp_path / "scenario.toml", "--policy", "least-batch, uniform-cp:2", "--json", out, "--png", png)
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["p-least-batch.png", "p-uniform-cp2.png"]
    rows = rows_of(out)
    assert [row["policy"] for row in rows] == ["least-batch", "uniform-cp:2"]
    assert [row["spread_requests"] for row in rows] == [0, 2]
    assert rows[0]["cached_share"] == 512 / 1300  # its trace is named relative to the scenario
    elsewhere.parent.mkdir()
    elsewhere.write_text(out.read_text())
    again = tmp_path / "again.json"
    assert simulate(elsewhere, "--json", again).exit_code == 0  # and found from anywhere
    assert rows_of(again) == rows


def test_settings_by_flag_go_before_the_files(tmp_path: Path) -> None:
    out, scenario = tmp_path / "out.json", tmp_path / "scenario.toml"
    scenario.write_text('[workload]\nrequests = 10\nmix = "sharegpt"\n[cluster]\nprefill_instances = 0\n')
    done = simulate(
        *(scenario, "--requests", 20, "--set", "decode.two_batch_overlap=true", "--set", "workload.arrivals=constant"),
        *("--json", out),
    )
    assert done.exit_code == 0, done.output
    config = json.loads(out.read_text())["config"]["scenario"]
    assert config["workload"]["requests"] == 20
    assert config["workload"]["arrivals"] == "constant"
    assert config["decode"]["two_batch_overlap"] is True
    assert config["cluster"]["prefill_instances"] == 0


def test_prefill_has_room_for_the_longest_request(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = simulate("--mix", "github", "--requests", 3, "--rate", 1, "--kv-tokens", 150_000, "--json", out)
    assert done.exit_code == 0, done.output
    (row,) = rows_of(out)
    assert row["spread_requests"] == 3  # longer than a decode instance, too


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "dual-balance"], "policy.name: 'dual-balance' is not known; the nearest is 'dual-balanced'"),
        (["--policy", "least-batch,uniform-cp:1"], "policy.name: 'uniform-cp:1'"),
        (["--set", "clutser.nodes=2"], "clutser: unknown table; did you mean 'cluster'?"),
        (["--set", "cluster.node=2"], "cluster.node: unknown setting; did you mean 'nodes'?"),
        (["--set", "cluster.nodes"], "set: 'cluster.nodes' has no value"),
        (["--set", "decode.lock_step=1"], "decode.lock_step: 1 has the wrong type; use true or false"),
        (["--nodes", "0"], "cluster.nodes: 0 is too small; use at least 1"),
        (["--model", "DeepSeek-V4"], "model.name: 'DeepSeek-V4' is not known; did you mean 'DeepSeek-V3'?"),
        (["--transfer", "fast"], "policy.transfer: 'fast' is not known"),
        (["missing.json"], "scenario: missing.json can not be read"),
        (["--mix", "github", "--requests", "5", "--kv-tokens", "1024"], "more than the cluster can hold"),
        (["--policy", "least-batch", "--mix", "sharegpt", "--kv-tokens", "4096"], "input_length + output_length"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], said: str) -> None:
    done = simulate(*words)
    assert done.exit_code == 1
    assert said in done.output, done.output
    assert "Traceback" not in done.output


def test_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    scenario = tmp_path / "s.toml"
    scenario.write_text("[cluster]\nnodes = 2\n\n[decode]\nlockstep = true\n")
    assert f"{scenario}:5: decode.lockstep: unknown setting" in simulate(scenario).output
    trace = tmp_path / "t.jsonl"
    trace.write_text(LINES[0] + "\n" + LINES[1].replace("5,", "-5,") + "\n")
    assert f"{trace}:2: output_length: -5 is not allowed" in simulate("--trace", trace).output
    wrong = tmp_path / "w.json"
    wrong.write_text('{"name": "handover", "config": {}}')
    assert "is no result of narrows simulate" in simulate(wrong).output
    wrong.write_text('{"name": "simulate", "config": {"scenario": {"cluster": {"nodez": 1}}, "policies": []}}')
    assert f"{wrong}: config.scenario: cluster.nodez: unknown setting" in simulate(wrong).output
