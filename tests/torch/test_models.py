"""Every architecture against transformers, on tiny random models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from narrows.attention.base import PagedAttention
from narrows.kernels import load as load_kernels
from narrows.kernels.base import Kernels
from narrows.kernels.reference import ReferenceKernels
from narrows.models.load import load_model
from narrows.testing.driver import Driver, make_batch
from narrows.testing.models import VOCAB_SIZE, tiny_model

LINEAR_ROPE = {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
NEW_ROPE = {"rope_scaling": None, "rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": ("LlamaForCausalLM", LINEAR_ROPE),
    "llama-new-rope-names": ("LlamaForCausalLM", NEW_ROPE),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "mistral-window": ("MistralForCausalLM", {}),
    "mistral-full": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": ("Qwen2ForCausalLM", QWEN_WINDOW),
    "qwen2-null-window": ("Qwen2ForCausalLM", QWEN_WINDOW | {"sliding_window": None}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-tied-biases": ("Qwen3ForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
}
TOKENS = torch.randint(0, VOCAB_SIZE, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    architecture, overrides = CASES[request.param]
    return tiny_model(tmp_path / "model", architecture, **overrides)


def expected_logits(folder: Path, tokens: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].float()


def driver(folder: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None, **options: Any) -> Driver:
    kernels = kernels or ReferenceKernels()
    return Driver(load_model(folder, dtype, kernels), kernels, **options)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("name", ["reference", "native"])
def test_logits_equal_transformers(folder: Path, name: str) -> None:
    kernels = load_kernels(name)
    expected = expected_logits(folder, TOKENS)
    assert expected.std() > 0.5  # logits that say something
    assert_close(driver(folder, kernels=kernels).step({0: TOKENS}), expected)

    chunked = driver(folder, kernels=kernels, page_size=8)
    parts = [chunked.step({0: TOKENS[start : start + 33]}) for start in range(0, len(TOKENS), 33)]
    assert_close(torch.cat(parts), expected)

    decoding = driver(folder, kernels=kernels, page_size=4)
    rows = [decoding.step({0: TOKENS[:60]})] + [decoding.step({0: [token]}) for token in TOKENS[60:]]
    assert_close(torch.cat(rows), expected)


def test_requests_of_one_step_do_not_see_each_other(folder: Path) -> None:
    other = TOKENS[::-1]
    both = driver(folder, num_requests=2)
    first = both.step({0: TOKENS[:50], 1: other[:7]})
    mixed = both.step({1: other[7:70], 0: TOKENS[50:51]})  # a prefill chunk beside a decode step
    expected, expected_other = expected_logits(folder, TOKENS[:51]), expected_logits(folder, other[:70])
    assert_close(first, torch.cat([expected[:50], expected_other[:7]]))
    assert_close(mixed, torch.cat([expected_other[7:70], expected[50:]]))


def test_wanted_rows_only(folder: Path) -> None:
    """Leaving rows out of the last layer changes neither the others' logits nor any stored KV."""
    full, narrow = (driver(folder, num_requests=2) for _ in range(2))
    step = {1: TOKENS[:40], 0: TOKENS[30:63]}
    rows = full.step(step)
    assert_close(narrow.step(step, all_rows=False), rows[[39, 72]])
    for theirs, ours in zip(full.entries, narrow.entries, strict=True):
        assert_close(ours, theirs)


def test_no_wanted_rows_stores_kv_and_reports_layers(tmp_path: Path) -> None:
    """What a prefill chunk in the middle of a prompt asks for."""
    kernels = ReferenceKernels()
    model = load_model(tiny_model(tmp_path), torch.float32, kernels)
    entries = [torch.zeros(32, 2, 32) for _ in range(2)]
    batch = make_batch([[1]], [16], [16], 16)
    seen: list[tuple[int, bool, bool]] = []

    def on_layer(layer: int) -> None:
        seen.append((layer, bool(entries[layer][16:].any(-1).all()), bool(entries[layer][:16].any())))

    logits = model.forward(
        torch.tensor(TOKENS[:16]),
        entries,
        batch,
        PagedAttention(kernels),
        logit_rows=torch.empty(0, dtype=torch.int64),
        on_layer=on_layer,
    )
    assert logits.shape == (0, VOCAB_SIZE)
    assert logits.dtype == torch.float32
    assert seen == [(0, True, False), (1, True, False)]  # all rows of the page stored, and nothing else


@pytest.mark.parametrize("name", ["reference", "native"])
def test_bfloat16_is_near_float32(folder: Path, name: str) -> None:
    """Two bfloat16 computations differ by their order of rounding; ours must not be further off than theirs."""
    exact = expected_logits(folder, TOKENS)
    theirs = expected_logits(folder, TOKENS, torch.bfloat16)
    ours = driver(folder, torch.bfloat16, load_kernels(name)).step({0: TOKENS})
    assert ours.dtype == torch.float32
    assert (ours - exact).square().mean() <= 2 * (theirs - exact).square().mean()
    assert (ours - exact).abs().max() < 0.3


def test_greedy_equals_transformers(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([TOKENS[:40]])
    expected = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=24,
        eos_token_id=-1,
        pad_token_id=0,
    )
    assert driver(folder).greedy(TOKENS[:40], 24, chunk=16) == expected[0, 40:].tolist()
