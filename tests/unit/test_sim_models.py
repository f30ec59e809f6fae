"""Built-in models and machines against published totals."""

import pytest

from narrows.errors import ConfigError
from narrows.sim.calibration import ALL, NANOCP_CP8, used
from narrows.sim.hardware import GBPS, H200, HARDWARE, L20, Hardware, hardware_named
from narrows.sim.model_shapes import (
    DEEPSEEK_V3,
    GEMMA_3_12B,
    KIMI_K2,
    LLAMA_3_1_8B,
    MODELS,
    QWEN3_8B,
    QWEN3_14B,
    QWEN3_235B_A22B,
    ModelShape,
    model_named,
)
from narrows.sim.roofline import Roofline


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [  # of the models' cards; Gemma's counts its vision tower's 0.4 too
        ("DeepSeek-V3", 671e9, 37e9),
        ("Kimi-K2", 1.04e12, 32.6e9),
        ("Qwen3-8B", 8.2e9, 8.2e9),
        ("Qwen3-14B", 14.8e9, 14.8e9),
        ("Qwen3-235B-A22B", 235e9, 22e9),
        ("Llama-3.1-8B", 8.03e9, 8.03e9),
        ("Gemma-3-12B", 12.2e9 - 0.42e9, 12.2e9 - 0.42e9),
        ("Phi-4", 14.7e9, 14.7e9),
    ],
)
def test_parameters_are_the_published_ones(name: str, total: float, active: float) -> None:
    model = model_named(name)
    assert model.params == pytest.approx(total, rel=0.02)
    assert model.active_params == pytest.approx(active, rel=0.02)


def test_all_built_ins_are_covered() -> None:
    assert len(MODELS) == 8 and {"H200", "H100", "A100", "L20", "L40S", "V100S"} < set(HARDWARE)


@pytest.mark.parametrize(
    ("model", "num_bytes"),
    [
        (DEEPSEEK_V3, 70_272),  # "Insights into DeepSeek-V3" (ISCA 2025), table 1: 70.272 KB in BF16
        (KIMI_K2, 70_272),  # the same latent and layers
        (LLAMA_3_1_8B, 128 * 1024),
        (QWEN3_8B, 144 * 1024),  # 36 layers x 8 heads x 2 x 128 x 2 bytes
        (QWEN3_14B, 160 * 1024),
    ],
)
def test_kv_of_a_token(model: ModelShape, num_bytes: int) -> None:
    assert model.kv_bytes_per_token() == num_bytes
    assert model.kv_bytes_per_token("fp8") == num_bytes / 2


def test_layers_and_tensors_named_in_the_papers() -> None:
    """SmartGen's figure 2 names 32, 36 and 40 layers; NanoCP's section 6.7 a query of 128 heads of 576."""
    assert [m.num_layers for m in (LLAMA_3_1_8B, QWEN3_8B, QWEN3_14B)] == [32, 36, 40]
    assert DEEPSEEK_V3.query_bytes() == 128 * 576 * 2
    assert DEEPSEEK_V3.result_bytes() == 128 * (512 * 2 + 4)
    assert (DEEPSEEK_V3.num_moe_layers, KIMI_K2.num_moe_layers, QWEN3_235B_A22B.num_moe_layers) == (58, 60, 94)
    assert GEMMA_3_12B.num_full_layers == 8


def test_arithmetic_of_a_token() -> None:
    """Absorbed MLA by hand; a dense model's two FLOP a parameter, its embedding (which is looked up) aside."""
    assert DEEPSEEK_V3.attention_flops() == 2 * 128 * (576 + 512)
    assert DEEPSEEK_V3.attention_flops(absorbed=False) == 2 * 128 * (192 + 128)
    assert LLAMA_3_1_8B.attention_flops() == 4 * 4096
    both = LLAMA_3_1_8B.flops_per_token() + LLAMA_3_1_8B.head_flops()
    assert both == 2 * (LLAMA_3_1_8B.params - 128256 * 4096)


def test_experts_are_sharded_and_all_else_is_not() -> None:
    """58 layers x 256 experts of 3 x 7168 x 2048 parameters, a byte each."""
    routed = 58 * 256 * 3 * 7168 * 2048
    assert DEEPSEEK_V3.weight_bytes_per_instance(1) - DEEPSEEK_V3.weight_bytes_per_instance(32) == routed * 31 / 32
    assert DEEPSEEK_V3.weight_bytes_per_instance(1) == pytest.approx(671e9 + 2 * 129280 * 7168, rel=0.01)
    assert KIMI_K2.weight_bytes_per_instance(33) == KIMI_K2.weight_bytes_per_instance(32)  # 12 experts, rounded up
    assert LLAMA_3_1_8B.weight_bytes_per_instance(8, "bf16") == 2 * LLAMA_3_1_8B.params


def test_kimi_leaves_a_million_tokens_on_32_h200() -> None:
    """NanoCP, section 1: "roughly 1M tokens"."""
    assert Roofline(H200, KIMI_K2).kv_tokens(32) == pytest.approx(1e6, rel=0.1)
    assert Roofline(L20, KIMI_K2).kv_tokens(32) == 0


def test_machines_of_the_papers() -> None:
    assert (H200.link_bytes_per_s, H200.fabric_bytes_per_s, H200.per_node) == (50e9, 900e9 / 2, 8)
    gbps = {name: hardware_named(name).link_bytes_per_s / GBPS * hardware_named(name).per_node for name in HARDWARE}
    assert [gbps[f"ecs.gn8is{size}"] for size in ("-2x.8xlarge", ".4xlarge", ".2xlarge")] == [32, 25, 15]
    assert hardware_named("ecs.gn8is.2xlarge").device == "L20"
    assert L20.linked(10).link_bytes_per_s == 1.25e9
    assert H200.flops("fp8") > H200.flops("bf16") == H200.flops("fp16")


def test_unknown_names_and_impossible_machines() -> None:
    with pytest.raises(ConfigError, match="model: 'DeepSeek-V2' is not known; did you mean 'DeepSeek-V3'"):
        model_named("DeepSeek-V2")
    with pytest.raises(ConfigError, match="hardware: 'TPU' is not known; known are A100, H100"):
        hardware_named("TPU")
    with pytest.raises(ConfigError, match=r"hardware.memory_bytes_per_s: 0.0 is not allowed"):
        Hardware("x", 1e12, 1e12, 1, 0.0, 1e9, 0.0, 1e9, 0.0)
    assert hardware_named("h200") is H200


def test_every_constant_says_where_it_is_from() -> None:
    for name, constant in ALL.items():
        assert constant.source and constant.value >= 0, name
    assert used(NANOCP_CP8) and not used("nanocp/6.6/uniform CP8 109.97 ms")
