"""Costs: the contract by hand, the roofline against published measurements, tables and fits against exact functions.

Published numbers marked "calibrated" chose a constant (calibration.CONSTANTS): that they come out only shows that it
was done right. The others are predictions.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrows.errors import ConfigError
from narrows.profile.timing import Work
from narrows.sim.cost import Cost, LayerTimes, Null, StepLoad, StepTimes, overlapped_s
from narrows.sim.hardware import A100, GBPS, H100, H200, L20
from narrows.sim.measured import Affine, Fitted, Grid, Table, read_costs
from narrows.sim.model_shapes import DEEPSEEK_V3, LLAMA_3_1_8B, QWEN3_14B
from narrows.sim.roofline import Roofline

NANOCP = Roofline(H200, DEEPSEEK_V3)
OUTPUT, CONTEXT = 1100, 950  # of a short request: mean output, and mean context seen at a random step


def all_of(value: float, width: int = 32) -> npt.NDArray[np.int64]:
    return np.full(width, round(value))


def layer(*seconds: list[float]) -> LayerTimes:
    return LayerTimes(*(np.array(phase) for phase in seconds))


# -- the contract ----------------------------------------------------------------------------------------------------

TWO = layer([1, 2], [0, 1], [5, 1], [0, 1], [3, 4], [2, 1], [1, 6])


def test_lock_step_by_hand() -> None:
    """Before dispatch 6 and 5, behind it 6 and 11: all wait for the first, then for the second."""
    assert TWO.lock_step_s == 6 + 11
    assert TWO.cp.tolist() == [0, 2] and TWO.moe.tolist() == [4, 10]
    assert StepTimes(TWO, 3, TWO, 1, 0.5).total_s == 4 * 17 + 0.5


def test_two_batches_by_hand() -> None:
    """Halves that differ in attention: 6 against communication of 10, then 20 against 10; experts 2 each."""
    slow = replace(TWO, attention=np.array([5.0, 16.0]))
    nothing = layer(*[[0, 0]] * 7)
    assert overlapped_s(StepTimes(TWO, 2, nothing, 1, 0.5), StepTimes(slow, 2, nothing, 1, 0.25)) == 2 * (12 + 22) + 0.5


@pytest.mark.parametrize("kind", ["null", "roofline", "table", "fitted"])
def test_every_cost_keeps_the_contract(kind: str, file: Path) -> None:
    measured = read_costs(file)
    made: dict[str, Cost] = {"null": Null(), "roofline": NANOCP, "table": Table(measured), "fitted": Fitted(measured)}
    cost = made[kind]
    load = StepLoad(np.array([3, 0, 9]), np.array([4, 0, 9]), np.array([900, 0, 9000]), all_of(0, 3), all_of(0, 3))
    times = cost.decode(load)
    for phase in (times.moe, times.dense):
        for name in LayerTimes.__dataclass_fields__:
            seconds = getattr(phase, name)
            assert seconds.shape == (3,) and (seconds >= 0).all() and np.isfinite(seconds).all(), name
    assert times.total_s > 0 and times.total_s == cost.decode(load).total_s
    assert cost.prefill_s([Work(600, 9000)]) > 0
    assert cost.transfer_s(10**6, across=True) >= cost.transfer_s(10**6, across=False) >= 0
    assert cost.name


def test_the_null_twin_is_constant() -> None:
    times = Null(phase_s=2.0, once_s=1.0, num_layers=5).decode(StepLoad.local(all_of(7), all_of(70)))
    assert times.total_s == 5 * 7 * 2.0 + 1.0  # seven phases, none overlapping


# -- roofline: attention ---------------------------------------------------------------------------------------------


def attention_us(batch: float, tokens: float, cost: Roofline = NANOCP) -> float:
    return float(cost.attention_s(all_of(batch, 1), all_of(tokens, 1))[0]) * 1e6


def test_attention_reaches_the_rates_of_its_kernel() -> None:
    """FlashMLA: 660 TFLOP/s where computing limits (calibrated), on the machine that it was measured on."""
    seconds = float(Roofline(H100, DEEPSEEK_V3).attention_s(all_of(1, 1), all_of(10**8, 1))[0])
    assert 10**8 * 2 * 128 * 1088 / seconds == pytest.approx(660e12, rel=1e-3)


def test_attention_that_memory_limits_by_hand() -> None:
    """Llama's 8 KV heads of 128 in BF16 are 4,096 bytes a token and layer, at 30/33.5 of an L20's 864 GB/s."""
    seconds = float(Roofline(L20, LLAMA_3_1_8B).attention_s(all_of(1, 1), all_of(10**6, 1))[0])
    assert seconds == pytest.approx((10**6 + 352) * 4096 / (864e9 * 3000 / 3350) + 5e-6)


def test_light_instances_of_figure_5b() -> None:
    """40-55 us (calibrated) at the batch that 30 requests a second of vLLM make."""
    assert 40 <= attention_us(72, 72 * CONTEXT) <= 55


def test_the_straggler_of_figure_5b_fits_in_memory() -> None:
    """539.5 us is what an instance full of KV takes, within the figure's own batch."""
    assert attention_us(72, NANOCP.kv_tokens(32)) == pytest.approx(539.5, rel=0.15)


def test_more_sequences_take_longer_for_the_same_tokens() -> None:
    """NanoCP, figure 3(a), and the reason against uniform CP: eight times the sequences, the same KV."""
    times = [attention_us(batch, 131_072) for batch in (1, 16, 64, 512)]
    assert times == sorted(times) and times[-1] > 1.5 * times[0]
    assert attention_us(0, 0) == 0.0


@given(st.integers(1, 256), st.integers(1, 10**6), st.integers(0, 10**6))
def test_more_tokens_take_no_less(batch: int, tokens: int, more: int) -> None:
    assert attention_us(batch, tokens + more) >= attention_us(batch, tokens) > 0


def test_a_window_bounds_what_is_read() -> None:
    """Of 32 layers an eighth attend to all 100,000 tokens, the others to 1,024."""
    local = Roofline(L20, replace(LLAMA_3_1_8B, window=1024, window_period=8), constants={"attention_launch_s": 0.0})
    full = Roofline(L20, LLAMA_3_1_8B, constants={"attention_launch_s": 0.0})
    share = attention_us(1, 100_000, local) / attention_us(1, 100_000, full)
    assert share == pytest.approx(1 / 8 + 7 / 8 * 1024 / 100_000, rel=0.01)


# -- roofline: communication -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "dispatch_us", "combine_us", "within"),
    [(8, 77, 114, 0.25), (16, 118, 195, 0.06), (32, 155, 273, 0.06), (64, 173, 314, 0.06), (128, 192, 369, 0.15)],
)
def test_deep_ep(width: int, dispatch_us: float, combine_us: float, within: float) -> None:
    """DeepEP's table of low-latency kernels: 128 tokens, H800 (160 GB/s of NVLink), 50 GB/s between nodes. Latencies
    are calibrated on 16 to 64; what bytes add, and 8 and 128, are predictions."""
    cost = Roofline(replace(H100, fabric_bytes_per_s=160e9), DEEPSEEK_V3)
    batch = all_of(128, width)
    assert cost.dispatch_s(batch).max() * 1e6 == pytest.approx(dispatch_us, rel=within)
    assert cost.combine_s(batch).max() * 1e6 == pytest.approx(combine_us, rel=within)


def test_one_instance_has_nobody_to_send_to() -> None:
    assert NANOCP.dispatch_s(all_of(9, 1)).tolist() == NANOCP.combine_s(all_of(9, 1)).tolist() == [0.0]


def test_most_instances_of_figure_5a() -> None:
    """Dispatch and combine together between 100 and 500 us, over the batches that LeastCache leaves (2 to 140)."""
    for batch in (2, 72, 140):
        moe = NANOCP.decode(StepLoad.local(all_of(batch), all_of(batch * CONTEXT))).moe.moe.max()
        assert 95e-6 <= moe <= 500e-6


def cp_us(batch: float, queries: float) -> float:
    load = StepLoad(all_of(batch), all_of(batch), all_of(batch * CONTEXT), all_of(queries), all_of(queries))
    return float(NANOCP.decode(load).moe.cp.max()) * 1e6


def test_cp_communication() -> None:
    """NanoCP, section 6.5, both calibrated: 60.4 us with one request of degree 8 an instance, 629.8 with all of 98."""
    assert cp_us(98, 7) == pytest.approx(60.4, rel=0.05)
    assert cp_us(98, 98 * 7) == pytest.approx(629.8, rel=0.03)
    assert cp_us(98, 0) == 0.0


def test_a_binding_across_nodes_takes_the_link() -> None:
    load = StepLoad(*(all_of(8, 2) for _ in range(3)), all_of(0, 2), all_of(0, 2), np.array([10, 0]), np.array([0, 10]))
    query, result = NANOCP.routes_s(load)
    assert query.tolist() == pytest.approx([27e-6 + 5e-6 + 10 * 147_456 / 50e9] * 2)
    assert result.tolist() == pytest.approx([27e-6 + 5e-6 + 10 * 131_584 / 50e9] * 2)


# -- roofline: steps -------------------------------------------------------------------------------------------------


def steady(load: Callable[[float], StepLoad], rate: float, step_s: Callable[[StepLoad], float] | None = None) -> float:
    """TPOT that makes as many active requests as it takes them to be served (Little's law), 32 instances of at most 256
    each (NanoCP, section 6.7: "per-GPU batch sizes up to 256"); beyond, requests wait."""
    step_s = step_s or (lambda load: NANOCP.decode(load).total_s)
    tpot = 0.03
    for _ in range(200):
        tpot = step_s(load(min(256, rate * OUTPUT * tpot / 32)))
    return tpot


def short_only(batch: float) -> StepLoad:
    return StepLoad.local(all_of(batch), all_of(batch * CONTEXT))


def balanced(batch: float) -> StepLoad:
    """One in a hundred has 200,000 tokens more, spread over eight; the fullest instance a third more than the mean."""
    tokens = batch * (CONTEXT + 0.01 * 200_000)
    return StepLoad(*map(all_of, (batch, batch * 1.07, tokens * 1.33, batch * 0.07, batch * 0.07)))


def test_tpot_of_nanocp_at_40_requests_a_second() -> None:
    """49.08 ms (calibrated, NanoCP section 6.6)."""
    assert steady(balanced, 40.0) == pytest.approx(49.08e-3, rel=0.05)


def test_tpot_of_short_requests_at_100_a_second() -> None:
    """82.33 ms, and 56.70 with two-batch overlap (NanoCP, figure 20)."""

    def in_halves(load: StepLoad) -> float:
        half = StepLoad.local(load.moe_batch // 2, load.kv_tokens // 2)
        return overlapped_s(NANOCP.decode(half), NANOCP.decode(half))

    assert steady(short_only, 100.0) == pytest.approx(82.33e-3, rel=0.1)
    assert steady(short_only, 100.0, in_halves) == pytest.approx(56.70e-3, rel=0.2)


def test_a_layer_is_made_of_its_phases_by_hand() -> None:
    """Weights that memory must give, at 80 % of 4.8 TB/s: attention's 187,105,280 bytes; nine experts' 44,040,192 each
    and the router's 7168 x 256, all experts chosen by someone."""
    times = NANOCP.decode(short_only(64)).moe
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    assert times.other.max() == pytest.approx(175e-6 + attention / 3.84e12)
    assert times.expert.max() == pytest.approx((9 * 3 * 7168 * 2048 + 7168 * 256) / 3.84e12, rel=1e-3)


def test_prefill_against_smartgen() -> None:
    """48K tokens on six L20, 75 % cached, against 25 Gbps: 6.5x for Llama-3.1-8B (calibrated); 4.7x for Qwen3-14B and
    an A100's 1.9x (calibrated) of figure 2."""
    ratios = []
    for model in (LLAMA_3_1_8B, QWEN3_14B):
        prefill = Roofline(L20, model, weights="bf16").prefill_s([Work(2_000, 8_000)])
        ratios.append(48_000 * model.kv_bytes_per_token() / (25 * GBPS) / prefill)
    assert ratios == [pytest.approx(6.5, rel=0.03), pytest.approx(4.7, rel=0.1)]
    l20, a100 = (
        Roofline(hardware, QWEN3_14B, weights="bf16").prefill_s([Work(2_500, 10_000)]) for hardware in (L20, A100)
    )
    assert l20 / a100 == pytest.approx(1.9, rel=0.03)


def test_prefill_of_a_prompt_is_that_of_its_parts() -> None:
    """Chunks compute the same products and pairs; only the launch is paid twice."""
    cost = Roofline(L20, QWEN3_14B, weights="bf16", constants={"prefill_launch_s": 0.0})
    head = QWEN3_14B.head_flops() / (119.5e12 * 0.96)
    parts = cost.prefill_s([Work(3000, 3000)]) + cost.prefill_s([Work(5000, 8000)])
    assert parts == pytest.approx(cost.prefill_s([Work(8000, 8000)]) + head)


def test_transfers_by_hand() -> None:
    assert NANOCP.transfer_s(5e9) == pytest.approx(0.1, abs=1e-5)
    assert NANOCP.transfer_s(4.5e9, across=False) == pytest.approx(0.01, abs=1e-5)


# -- measured costs --------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "simulator-costs.md"
SAID = json.loads(DOCS.read_text(encoding="utf-8").split("```json\n")[1].split("```")[0])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The documented example."""
    return written(tmp_path / "costs.json", SAID)


def written(path: Path, said: object) -> Path:
    path.write_text(said if isinstance(said, str) else json.dumps(said), encoding="utf-8")
    return path


def test_a_grid_by_hand() -> None:
    grid = Grid((np.array([1.0, 3.0]), np.array([10.0, 20.0])), np.array([[1.0, 2.0], [5.0, 8.0]]))
    batch, kv = np.array([1, 3, 2, 0, 5, 2]), np.array([10, 20, 15, 10, 10, 30])
    # Corners; the middle of all four; clamped before the first; beyond: 5 + 4, and (2 + 8)/2 + ((2-1) + (8-5))/2.
    assert grid(batch, kv).tolist() == [1.0, 8.0, 4.0, 1.0, 9.0, 7.0]
    falling = Grid((np.array([0.0, 1.0]),), np.array([2.0, 1.0]))
    assert falling(np.array([0.5, 5.0])).tolist() == [1.5, 0.0]
    assert Grid((np.array([4.0]),), np.array([3.0]))(np.array([1, 9])).tolist() == [3.0, 3.0]


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=8, unique=True),
    st.lists(st.floats(0.0, 10.0), min_size=8, max_size=8),
    st.lists(st.integers(0, 1000), min_size=1, max_size=8),
)
def test_a_grid_of_one_axis_is_numpys_interpolation(axis: list[int], seconds: list[float], at: list[int]) -> None:
    places, values = np.array(sorted(axis), dtype=np.float64), np.array(seconds[: len(axis)])
    inside = np.minimum(np.array(at), places[-1])
    assert np.allclose(Grid((places,), values)(inside), np.interp(inside, places, values))


def test_a_table_gives_back_what_was_measured(file: Path) -> None:
    table = Table(read_costs(file))
    load = StepLoad(*(all_of(value, 2) for value in (64, 64, 131_072)), np.array([512, 0]), np.array([3, 0]))
    times = table.decode(load)
    assert (times.moe.attention * 1e6).tolist() == pytest.approx([70, 70])
    assert (times.moe.other * 1e6).tolist() == pytest.approx([108, 108])
    assert (times.moe.q_route * 1e6).tolist() == pytest.approx([230, 0])
    assert (times.moe.dispatch * 1e6).tolist() == pytest.approx([45 + 110 * 63 / 127] * 2)
    assert times.dense.dispatch.tolist() == [0, 0]
    assert (times.num_moe_layers, times.num_dense_layers, times.once_s) == (1, 1, 900e-6)
    assert table.prefill_s([Work(512, 8192), Work(8192, 8192)]) == pytest.approx(0.64)
    assert table.transfer_s(500_000) == pytest.approx(15e-6)
    assert table.transfer_s(2_000_000, across=False) == pytest.approx(6e-6)


@given(st.floats(0.001, 1.0), st.floats(0.0, 0.1), st.floats(0.0, 0.001))
def test_a_fit_finds_the_affine_function(constant: float, slope: float, other: float) -> None:
    axes = (np.array([1.0, 8.0, 64.0]), np.array([10.0, 1000.0, 9000.0]))
    exact = constant + slope * axes[0][:, None] + other * axes[1][None, :]
    fit = Affine.fit(Grid(axes, exact))
    assert np.allclose(fit(*np.meshgrid(*axes, indexing="ij")), exact, rtol=1e-6)


def test_fitted_prefill_is_fitted_to_pairs(file: Path) -> None:
    """Points made from a + b uncached + c attended, where a table between them is off."""

    def seconds(work: Work) -> float:
        return 0.01 + 1e-4 * work.uncached + 1e-9 * work.attended

    axes = {"uncached": [100, 1000, 9000], "context": [1000, 9000, 50_000]}
    us = [[seconds(Work(u, max(u, c))) * 1e6 for c in axes["context"]] for u in axes["uncached"]]
    written(file, {**SAID, "prefill": {**axes, "us": us}})
    batch = [Work(5000, 20_000), Work(300, 300)]
    expected = sum(map(seconds, batch)) - 0.01
    assert Fitted(read_costs(file)).prefill_s(batch) == pytest.approx(expected, rel=1e-6)


def without(*keys: str) -> dict[str, object]:
    return {key: value for key, value in SAID.items() if key not in keys}


@pytest.mark.parametrize("kind", [Table, Fitted])
def test_what_a_file_lacks(kind: type[Table] | type[Fitted], file: Path) -> None:
    written(file, without("prefill", "transfer_across", "dispatch", "q_route"))
    cost = kind(read_costs(file))
    assert cost.decode(StepLoad.local(all_of(4, 2), all_of(40, 2))).moe.dispatch.tolist() == [0, 0]
    with pytest.raises(ConfigError, match=r"json: prefill: missing, and this scenario needs it"):
        cost.prefill_s([Work(1, 1)])
    with pytest.raises(ConfigError, match=r"json: transfer_across: missing"):
        cost.transfer_s(1)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("{", "is not JSON: .*line 1"),
        ("[]", "is not a JSON object"),
        ({**SAID, "atention": 1}, "atention: unknown field; did you mean 'attention'"),
        ({**SAID, "version": 2}, "version: 2 is not 1"),
        (without("other"), "other: missing; measure and add it"),
        ({**SAID, "moe_layers": 0, "dense_layers": 0}, "moe_layers: there is no layer"),
        ({**SAID, "moe_layers": -1}, "moe_layers: -1 is not allowed"),
        ({**SAID, "once_us": "1"}, "once_us: '1' is not allowed"),
        ({**SAID, "other": [1]}, "other: must be an object of batch, us"),
        ({**SAID, "other": {"batch": [1]}}, "other: must be an object of batch, us"),
        ({**SAID, "other": {"batch": [2, 1], "us": [1, 2]}}, "other.batch: does not ascend"),
        ({**SAID, "other": {"batch": [1, 2], "us": [1]}}, "other.us: 1 times for 2 values of batch"),
        ({**SAID, "other": {"batch": [1, 2], "us": [1, -2]}}, "other.us: -2 is not allowed"),
        ({**SAID, "other": {"batch": [], "us": []}}, "other.batch: must be a list of numbers"),
        (
            {**SAID, "attention": {"batch": [1, 2], "kv_tokens": [1], "us": [[1]]}},
            "attention.us: must have 2 rows, one for each batch",
        ),
        (
            {**SAID, "attention": {"batch": [1], "kv_tokens": [1, 2], "us": [[1]]}},
            r"attention.us\[0\]: 1 times for 2 values of kv_tokens",
        ),
    ],
)
def test_a_bad_file_is_named(said: object, says: str, file: Path) -> None:
    written(file, said)
    with pytest.raises(ConfigError, match=f"costs.json.*{says}"):
        read_costs(file)


def test_no_file(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"costs: .*nowhere can not be read"):
        read_costs(file.with_name("nowhere"))
