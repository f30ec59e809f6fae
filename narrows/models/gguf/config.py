"""What a GGUF file's metadata says, in the words of a Hugging Face config."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor

from narrows.errors import ModelError
from narrows.models.fields import Fields

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Llama 3's own: the file stores their effect per pair of dims, a config stores them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class FileTensors:
    """What of a file's tensors decides over its config."""

    def __init__(self, tensors: dict[str, ReaderTensor]) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def vocab_size(self) -> int | None:
        embedding = self._tensors.get("token_embd.weight")
        return None if embedding is None else int(embedding.shape[1])

    @property
    def stored_dtype(self) -> str:
        types = {tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) > 1}
        exact = {"F32": "float32", "F16": "float16"}
        return exact.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"

    @property
    def rope_factors(self) -> npt.NDArray[np.float32] | None:
        factors = self._tensors.get("rope_freqs.weight")
        return None if factors is None else np.asarray(factors.data, dtype=np.float32)


def gguf_config(metadata: Fields, tensors: FileTensors) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json. Raises ModelError naming the metadata that is not supported."""
    arch = metadata.text("general.architecture", "")
    if arch not in _ARCHITECTURES:
        raise metadata.error(
            "general.architecture", f"{arch!r} is not supported; supported are {', '.join(_ARCHITECTURES)}"
        )
    _refuse_unsupported(metadata, arch)
    hidden, heads = metadata.integer(f"{arch}.embedding_length"), metadata.integer(f"{arch}.attention.head_count")
    head_dim = metadata.integer(f"{arch}.attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (size := metadata.integer(f"{arch}.{name}", head_dim)) != head_dim:
            raise metadata.error(f"{arch}.{name}", f"{size} differs from the head size {head_dim}; not supported")
    tokens = _special_tokens(metadata)
    theta = _shortest(metadata.number(f"{arch}.rope.freq_base", 10_000.0))
    config = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": metadata.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer(f"{arch}.context_length"),
        "rms_norm_eps": _shortest(metadata.number(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(metadata, arch, theta, head_dim, tensors.rope_factors),
        "vocab_size": tensors.vocab_size,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in tensors,
        "torch_dtype": tensors.stored_dtype,
        **tokens,
    }
    window = metadata.optional_integer(f"{arch}.attention.sliding_window")
    if window is not None and arch == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config, tokens


def _refuse_unsupported(metadata: Fields, arch: str) -> None:
    if metadata.integer(f"{arch}.expert_count", 0, least=0):
        raise metadata.error(f"{arch}.expert_count", "mixture-of-experts files are not supported")
    if (count := metadata.integer("split.count", 1, least=0)) > 1:
        raise metadata.error("split.count", f"the model is split over {count} files; merge them into one first")


def _special_tokens(metadata: Fields) -> dict[str, Any]:
    """Ids under the config's names. A turn's end (eot) ends an answer as the text's end (eos) does."""
    ends = [metadata.token_ids(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    bos, pad = (metadata.token_ids(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
    return {
        "bos_token_id": bos[0] if bos else None,
        "eos_token_id": list(dict.fromkeys(ends[0] + ends[1])) or None,
        "pad_token_id": pad[0] if pad else None,
    }


def _rope_scaling(
    metadata: Fields, arch: str, theta: float, head_dim: int, factors: npt.NDArray[np.float32] | None
) -> dict[str, Any] | None:
    kind = metadata.text(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise metadata.error(f"{arch}.rope.scaling.type", f"{kind!r} is not supported; supported are none, linear")
    if factors is not None:
        factor = float(factors.max())
        expected = _llama3_factors(factor, theta, head_dim)
        if kind != "none" or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
            raise metadata.error("rope_freqs.weight", "these rope factors are not those of Llama 3; not supported")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number(f"{arch}.rope.scaling.factor")}
    return None


def _llama3_factors(factor: float, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """By how much Llama 3 slows each pair of dims down: 1 for short waves, `factor` for long ones."""
    frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequency / (2 * np.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / factor + blend)


def _shortest(value: float) -> float:
    """A float32 as the shortest decimal that names it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def hf_name(path: Path, name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises ModelError for one that Narrows does not know."""
    stem, _, kind = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if kind in ("weight", "bias"):
        if stem in _OUTSIDE:
            return f"{_OUTSIDE[stem]}.{kind}"
        if block and block[2] in _INSIDE:
            return f"model.layers.{block[1]}.{_INSIDE[block[2]]}.{kind}"
    raise ModelError(f"{path}: tensor {name} is not one Narrows knows")


def undo_permutation(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of a query or key matrix from GGUF's order for Llama (a rotated pair side by side) to Hugging Face's
    (first halves of all pairs, then second halves)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
