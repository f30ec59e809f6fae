"""Scenario files: the documented one, what the defaults mean, and every refusal by file, line and field."""

from pathlib import Path

import pytest

from narrows.errors import ConfigError
from narrows.sim.cluster_file import PARTS, Scenario, make_scenario, read_scenario
from narrows.sim.measured import Fitted, Table
from narrows.sim.workload import rate_of

DOCS = (Path(__file__).parents[2] / "docs" / "simulator-costs.md").read_text(encoding="utf-8")
DOCUMENTED, CONSTANTS = (block.split("```")[0] for block in DOCS.split("```toml\n")[1:])
COSTS = DOCS.split("```json\n")[1].split("```")[0]


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_documented_scenario(tmp_path: Path) -> None:
    """Four nodes of eight H200 at 40 requests a second, as NanoCP's section 6."""
    scenario = read_scenario(written(tmp_path, DOCUMENTED))
    assert scenario.cluster.num_decode == 32 and scenario.model_shape.name == "DeepSeek-V3"
    assert scenario.decode_hardware.link_bytes_per_s == 50e9
    assert scenario.decode_cost().name == "roofline of DeepSeek-V3 on H200"
    trace = scenario.trace()
    assert len(trace) == 1000 and sum(a.num_prompt > 8192 for a in trace) == 10
    assert rate_of(trace) == pytest.approx(40, rel=0.1)
    assert trace == read_scenario(written(tmp_path, DOCUMENTED)).trace()


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, ""))
    assert {name: getattr(scenario, name) for name in PARTS} == {name: part() for name, part in PARTS.items()}
    assert scenario.kv_tokens % 64 == 0
    assert scenario.prefill_hardware == scenario.decode_hardware


def test_documented_constants_and_overrides(tmp_path: Path) -> None:
    """A hand-over's way and a machine's numbers, in the units that their names say."""
    more = "[hardware]\nname = 'l20'\nprefill = 'A100'\nmemory_gb = 24\nfabric_gb_per_s = 8\n"
    more += "[link]\ngbps = 8\nlatency_us = 7\n"
    model = "[model]\nname = 'Qwen3-8B'\nweights = 'BF16'\n[cluster]\ninstances_per_node = 2\n"
    scenario = read_scenario(written(tmp_path, CONSTANTS + more + model))
    assert dict(scenario.costs.constants) == {"cp_latency_s": 10e-6}
    decode, prefill = scenario.decode_hardware, scenario.prefill_hardware
    assert (decode.memory_bytes, decode.fabric_bytes_per_s, decode.per_node) == (24 * 10**9, 8e9, 2)
    assert prefill.memory_bytes == 80 * 10**9 and prefill.device == "A100" and decode.device == "L20"
    for hardware in (decode, prefill):
        assert (hardware.link_bytes_per_s, hardware.link_latency_s) == (1e9, pytest.approx(7e-6))
    assert (scenario.model.weights, scenario.hardware.name) == ("bf16", "L20")


def test_kv_tokens_are_whole_pages() -> None:
    assert make_scenario({"cluster": {"kv_tokens": 1000, "page_size": 64}}).kv_tokens == 960


def test_measured_costs_lie_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(COSTS, encoding="utf-8")
    for kind, made in (("table", Table), ("fitted", Fitted)):
        path = written(tmp_path, f"[costs]\nkind = '{kind}'\nfile = 'mine.json'\n")
        assert type(read_scenario(path).decode_cost()) is made
    with pytest.raises(ConfigError, match=r"yours.json can not be read"):
        read_scenario(written(tmp_path, "[costs]\nkind = 'table'\nfile = 'yours.json'\n")).decode_cost()


TRACE = """{"timestamp": 0, "input_length": 10, "output_length": 2}
{"timestamp": 4000, "input_length": 20, "output_length": 2}
"""


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ("", [0.0, 4.0]),
        ("rate = 0.5", [0.0, 2.0]),
        ("arrivals = 'constant'\nrate = 10", [0.0, 0.1]),
        ("requests = 1", [0]),
    ],
)
def test_a_trace_at_its_own_times_or_others(tmp_path: Path, settings: str, times: list[float]) -> None:
    (tmp_path / "t.jsonl").write_text(TRACE, encoding="utf-8")
    trace = read_scenario(written(tmp_path, f"[workload]\ntrace = 't.jsonl'\n{settings}\n")).trace()
    assert [a.time_s for a in trace] == pytest.approx(times)
    assert [a.num_prompt for a in trace] == [10, 20][: len(times)]


def test_a_request_longer_than_the_cluster(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TRACE, encoding="utf-8")
    small = "[cluster]\nkv_tokens = 8\npage_size = 8\ninstances_per_node = 2\n"
    with pytest.raises(
        ConfigError, match=r"t.jsonl:2: input_length: 20 tokens and 2 of output are more than .* \(16\)"
    ):
        read_scenario(written(tmp_path, small + "[workload]\ntrace = 't.jsonl'\n")).trace()
    with pytest.raises(ConfigError, match=r"workload.mix: request 0 has \d+ tokens, more than the cluster"):
        read_scenario(written(tmp_path, small)).trace()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[cluster]\nnodes = 4\ninstances_per_nod = 8\n",
            r":3: cluster.instances_per_nod: unknown .*'instances_per_node'",
        ),
        ("[cluster]\nnodes = 0\n", r":2: cluster.nodes: 0 is too small; use at least 1"),
        ("[cluster]\n\ninstances_per_node = 0\n", r":3: cluster.instances_per_node: 0 is too small"),
        ("[cluster]\nnodes = 1.5\n", r":2: cluster.nodes: 1.5 has the wrong type; use a whole number"),
        ("[cluster]\nnodes = true\n", r":2: cluster.nodes: True has the wrong type"),
        ("[cluster]\npage_size = 48\n", r":2: cluster.page_size: 48 is not a power of two; try 32 or 64"),
        ("[clster]\nnodes = 1\n", r":1: clster: unknown table; did you mean 'cluster'"),
        ("cluster = 3\n", r":1: cluster: 3 is no table; write \[cluster\]"),
        ("[hardware]\nname = 'H201'\n", r":2: hardware.name: 'H201' is not known; did you mean 'H200'"),
        ("[hardware]\nmemory_gb = 0\n", r":2: hardware.memory_gb: 0.0 is too small; use a number above 0"),
        ("[hardware]\nmemory_gb = inf\n", r":2: hardware.memory_gb: inf is not allowed"),
        ("[model]\nname = 'DeepSeek-V4'\n", r":2: model.name: 'DeepSeek-V4' is not known; did you mean 'DeepSeek-V3'"),
        ("[model]\nweights = 'int4'\n", r":2: model.weights: 'int4' is not known; did you mean 'int8'"),
        ("[model]\nname = 3\n", r":2: model.name: 3 has the wrong type; use text"),
        ("[model]\nname = 'Kimi-K2'\n", r":2: model.name: Kimi-K2 leaves no room for KV on 8 instances of H200"),
        ("[link]\ngbps = -1\n", r":2: link.gbps: -1.0 is too small"),
        ("[link]\nlatency_us = nan\n", r":2: link.latency_us: nan is not allowed"),
        ("[policy]\nname = 'dual-balance'\n", r":2: policy.name: 'dual-balance' is not known.*'dual-balanced'"),
        ("[policy]\nname = 'uniform-cp:1'\n", r":2: policy.name: .*at least 2"),
        ("[policy]\nselect_ratio = 1.5\n", r":2: policy.select_ratio: 1.5 is too large; use at most 1"),
        ("[policy]\ntransfer = 'fast'\n", r":2: policy.transfer: 'fast' is not known"),
        ("[workload]\nrate = 0\n", r":2: workload.rate: 0.0 is too small"),
        ("[workload]\nrequests = 0\n", r":2: workload.requests: 0 is too small"),
        ("[workload]\nmix = 'issue9'\n", r":2: workload.mix: 'issue9' is not known"),
        ("[workload]\ntrace = 'x'\nmix = 'issue1'\n", r":3: workload.mix: given together with workload.trace"),
        ("[workload]\narrivals = 'trace'\n", r":2: workload.arrivals: 'trace' needs workload.trace"),
        ("[costs]\nkind = 'table'\n", r":1: costs.file: missing"),
        ("[costs.constants]\ncp_latncy_s = 1\n", r":1: costs.constants: 'cp_latncy_s' is not known.*'cp_latency_s'"),
        ("[costs.constants]\ncp_latency_s = -1\n", r":1: costs.constants: cp_latency_s is -1"),
        ("[costs]\nconstants = { cp_latency_s = 'x' }\n", r":2: costs.constants: cp_latency_s is 'x'; use a number"),
        ("[cluster\n", r" is not valid TOML: .*line 1"),
    ],
)
def test_refusals_name_file_line_and_field(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"scenario.toml{says}"):
        read_scenario(written(tmp_path, text))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scenario: .*nowhere can not be read"):
        read_scenario(tmp_path / "nowhere")


def test_times_that_a_trace_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(TRACE.replace("4000", "0"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"workload.rate: all requests of this trace come at once"):
        read_scenario(written(tmp_path, "[workload]\ntrace = 't.jsonl'\nrate = 2\n")).trace()


def test_a_scenario_is_never_written_into() -> None:
    scenario = Scenario()
    with pytest.raises(AttributeError):
        scenario.cluster.nodes = 2  # type: ignore[misc]
