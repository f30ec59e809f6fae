"""Traces, arrivals and mixes: files written here, distributions against closed forms, errors by line and field."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.errors import ConfigError
from narrows.sim.mixes import GITHUB, MIXES, SHAREGPT, LogNormal, mix
from narrows.sim.traces import read_trace
from narrows.sim.workload import (
    HASH_BLOCK,
    Arrival,
    arrivals,
    constant_times,
    gamma_times,
    poisson_times,
    rate_of,
    rescaled,
    spaced,
)

# -- readers ---------------------------------------------------------------------------------------------------------

GOOD = {"timestamp": 1000, "input_length": 1025, "output_length": 7, "hash_ids": [5, 6, 9]}


def mooncake(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def test_mooncake_lines(tmp_path: Path) -> None:
    later = {"timestamp": 2500, "input_length": 3, "output_length": 1}
    trace = read_trace(mooncake(tmp_path, "", GOOD, "", later))
    assert trace == (Arrival(0.0, 1025, 7, (5, 6, 9)), Arrival(1.5, 3, 1))
    assert read_trace(mooncake(tmp_path, GOOD, "not JSON"), limit=1) == trace[:1]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([GOOD, {**GOOD, "input_length": -1}], r"jsonl:2: input_length: -1 is not allowed; use a whole number"),
        ([{**GOOD, "output_length": 0}], r"jsonl:1: output_length: 0"),
        ([{**GOOD, "output_length": 1.5}], r"jsonl:1: output_length: 1.5"),
        ([{**GOOD, "output_length": True}], r"jsonl:1: output_length: True"),
        ([GOOD, {k: v for k, v in GOOD.items() if k != "output_length"}], r"jsonl:2: output_length: missing; add it"),
        ([{k: v for k, v in GOOD.items() if k != "timestamp"}], r"jsonl:1: timestamp: missing; add it \(milliseconds"),
        ([{**GOOD, "timestamp": "now"}], r"jsonl:1: timestamp: 'now' is no time"),
        ([GOOD, GOOD, {**GOOD, "timestamp": 999}], r"jsonl:3: timestamp: earlier than the line before; sort"),
        ([{**GOOD, "hash_ids": [1]}], r"jsonl:1: hash_ids: 1 ids for 1025 tokens; give 3"),
        ([{**GOOD, "hash_ids": [1, "x", 2]}], r"jsonl:1: hash_ids: .* is no list of ids"),
        ([GOOD, "{"], r"jsonl:2: not JSON .*one JSON object"),
        ([GOOD, '{"timestamp": ' + "9" * 5000 + "}"], r"jsonl:2: not JSON"),
        (["", "  "], r"jsonl:1: the trace is empty"),
        ([GOOD, "[1]"], r"jsonl:2: not a JSON object"),
        (["what is this"], r"jsonl:1: not JSON"),
        ([], r"jsonl:1: the trace is empty"),
        ([{**GOOD, "timestamp": float("nan")}], r"jsonl:1: timestamp: nan is no time"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path: Path, rows: list[object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(mooncake(tmp_path, *rows))


def test_a_request_longer_than_the_cluster_is_named(tmp_path: Path) -> None:
    path = mooncake(tmp_path, GOOD, {**GOOD, "output_length": 8})
    assert len(read_trace(path, limit=1, most_tokens=1032)) == 1
    with pytest.raises(
        ConfigError, match=r"jsonl:2: input_length: 1025 tokens and 8 of output are more than .* \(1032"
    ):
        read_trace(path, most_tokens=1032)


def azure(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_azure_lines(tmp_path: Path, mark: str) -> None:
    """Both years' way of writing times: seven digits, and with an offset."""
    text = (
        f"{mark}TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:16:46.680590+00:00,4,9\r\n"
    )
    trace = read_trace(azure(tmp_path, text))
    assert [(a.num_prompt, a.num_output, a.prefix_ids) for a in trace] == [(374, 44, ()), (396, 109, ()), (4, 9, ())]
    assert [a.time_s for a in trace] == pytest.approx([0.0, 4.314579, 60.0], abs=1e-6)


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("TIME,ContextTokens,GeneratedTokens\n", r"csv:1: TIMESTAMP: missing in the header .*first line must be"),
        ("TIMESTAMP,ContextTokens\n", r"csv:1: GeneratedTokens: missing"),
        ("\n" + HEADER.replace("Gen", "gen"), r"csv:2: GeneratedTokens: missing"),
        (HEADER, r"csv:2: the trace has a header but no request"),
        (HEADER + "yesterday,1,1\n", r"csv:2: TIMESTAMP: 'yesterday' is no time"),
        (HEADER + "2023-11-16 18:15:46,-3,1\n", r"csv:2: ContextTokens: -3 is not allowed"),
        (HEADER + "2023-11-16 18:15:46,3,\n", r"csv:2: GeneratedTokens: '' is not allowed"),
        (HEADER + "2023-11-16 18:15:46,3\n", r"csv:2: GeneratedTokens: 2 values for 3 columns"),
        (HEADER + "2023-11-16 18:15:46,3,4\n2023-11-16 18:15:45,3,4\n", r"csv:3: TIMESTAMP: earlier than the line"),
        ("", r"csv:1: the trace is empty"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(azure(tmp_path, text))


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere can not be read: No such file"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(ConfigError, match="binary is not text in UTF-8"):
        read_trace(tmp_path / "binary")
    with pytest.raises(ConfigError, match="limit: 0"):
        read_trace(mooncake(tmp_path, GOOD), limit=0)


def test_cached_tokens_end_at_the_first_missing_block() -> None:
    arrival = Arrival(0.0, 2 * HASH_BLOCK + 1, 1, (5, 6, 9))
    assert [arrival.cached_tokens(held) for held in (set(), {6, 9}, {5, 9}, {5, 6})] == [0, 0, 512, 1024]
    assert arrival.cached_tokens({5, 6, 9}) == 1024  # the last part is one token, which is computed
    assert Arrival(0.0, 512, 1, (5,)).cached_tokens({5}) == 511


# -- times -----------------------------------------------------------------------------------------------------------


def test_even_times() -> None:
    assert list(constant_times(4, 2.0)) == [0.0, 0.5, 1.0, 1.5]
    assert list(gamma_times(4, 2.0, 0.0, seed=1)) == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_variation_asked_for(cv: float) -> None:
    """Of 40,000 gaps, the mean within four standard errors."""
    gaps = np.diff(list(gamma_times(40_001, 5.0, cv, seed=3)))
    assert gaps.mean() == pytest.approx(0.2, rel=4 * cv / 200)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_poisson_gaps_are_exponential() -> None:
    """Kolmogorov-Smirnov against 1 - exp(-rate t): below the 0.1 % quantile."""
    times = np.array(list(poisson_times(10_000, 4.0, seed=2)))
    gaps = np.sort(np.diff(times))
    reached = np.arange(1, len(gaps) + 1) / len(gaps)
    assert np.abs(reached - (1 - np.exp(-4.0 * gaps))).max() < 1.95 / math.sqrt(len(gaps))


def test_seeds_decide() -> None:
    assert list(poisson_times(9, 1.0, 1)) == list(poisson_times(9, 1.0, 1)) != list(poisson_times(9, 1.0, 2))
    assert mix("issue5", 99, 1) == mix("issue5", 99, 1) != mix("issue5", 99, 2)


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=20), st.floats(0.01, 1000))
def test_rescaling_keeps_the_pattern(gaps: list[float], rate: float) -> None:
    times = [0.0, *np.cumsum(gaps)]
    trace = arrivals([(10, 2)] * len(times), iter(times))
    scaled = rescaled(trace, rate)
    assert rate_of(scaled) == pytest.approx(rate)
    assert scaled[0].time_s == 0.0
    new = np.diff([a.time_s for a in scaled])
    assert np.allclose(new / new.sum(), np.array(gaps) / sum(gaps))


def test_times_that_can_not_be() -> None:
    at_once = arrivals([(1, 1), (1, 1)], iter([2.0, 2.0]))
    for call, says in [
        (lambda: rescaled(at_once, 3.0), "rate: all requests of this trace come at once"),
        (lambda: rescaled(at_once, 0.0), "rate: 0.0 is not allowed"),
        (lambda: constant_times(1, -1.0), "rate: -1.0"),
        (lambda: gamma_times(1, 1.0, -0.1, 0), "cv: -0.1"),
        (lambda: mix("issue2", 5, 0), "mix: 'issue2' is not known; did you mean 'issue"),
        (lambda: mix("issue1", 0, 0), "count: 0"),
        (lambda: LogNormal(10, 1.0, 20, 30), "median: 10"),
        (lambda: LogNormal(10, -1.0, 1, 30), "sigma: -1.0"),
    ]:
        with pytest.raises(ConfigError, match=says):
            call()
    assert spaced(at_once, iter([1.0, 4.0]))[1].time_s == 4.0
    assert rate_of(()) == rate_of(at_once) == math.inf


# -- lengths ---------------------------------------------------------------------------------------------------------


def cut_mean(lengths: LogNormal) -> float:
    """Of a log-normal between two values, in closed form."""

    def phi(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    low, high = (math.log(edge / lengths.median) / lengths.sigma for edge in (lengths.least, lengths.most))
    part = (phi(high - lengths.sigma) - phi(low - lengths.sigma)) / (phi(high) - phi(low))
    return lengths.median * math.exp(lengths.sigma**2 / 2) * part


@pytest.mark.parametrize(
    ("lengths", "documented"), [(SHAREGPT.prompt, 247), (SHAREGPT.output, 1_100), (GITHUB.prompt, 200_000)]
)
def test_means_are_those_of_the_cut_distribution_and_documented(lengths: LogNormal, documented: float) -> None:
    drawn = lengths.draw(100_000, np.random.default_rng(5))
    assert lengths.least <= drawn.min() and drawn.max() <= lengths.most
    assert drawn.mean() == pytest.approx(cut_mean(lengths), rel=0.02)
    assert cut_mean(lengths) == pytest.approx(documented, rel=0.01)


@pytest.mark.parametrize(("name", "long"), [("sharegpt", 0), ("issue1", 10), ("issue5", 50), ("github", 1000)])
def test_a_mix_has_exactly_its_share_of_long_ones(name: str, long: int) -> None:
    lengths = mix(name, 1000, seed=7)
    assert len(lengths) == 1000 and sum(prompt >= GITHUB.prompt.least for prompt, _ in lengths) == long
    assert MIXES[name] * 1000 == long


def test_short_requests_are_the_same_at_any_share() -> None:
    """So that workloads differ by the long ones alone."""
    plain, mixed = mix("sharegpt", 1000, seed=7), mix("issue5", 1000, seed=7)
    assert sum(a == b for a, b in zip(plain, mixed, strict=True)) == 950
