"""Tiny random models in the layout of Hugging Face folders, made in a fraction of a second."""

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from narrows.models.safetensors_writer import Entry, write_safetensors

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# 256 bytes, then the special tokens: token ids and tokenizer cover each other exactly.
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_TOKEN_ID = VOCAB_SIZE - 2

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": EOS_TOKEN_ID,
}
_VARIATIONS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 24},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "use_sliding_window": False, "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "use_sliding_window": False,
        "attention_bias": False,
        "head_dim": 32,  # not hidden / heads
    },
}
ARCHITECTURES = tuple(_VARIATIONS)


def tiny_model(folder: Path, architecture: str = "LlamaForCausalLM", *, seed: int = 0, **overrides: Any) -> Path:
    """Write config.json, model.safetensors, tokenizer files and generation_config.json; returns `folder`.

    `overrides` replace fields of config.json (Hugging Face's names); the weights follow them. The same arguments
    give the same bytes. Any text tokenizes: one token a byte.
    """
    config = {**_COMMON, **_VARIATIONS[architecture], "architectures": [architecture], **overrides}
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    write_weights(folder / "model.safetensors", tensor_shapes(config), config["torch_dtype"], seed)
    _write_tokenizer(folder, config)
    return folder


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model with this config.json, and its shape."""
    architecture = config["architectures"][0]
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    all_biases = bool(config.get("attention_bias"))
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    biased = []
    if all_biases or architecture == "Qwen2ForCausalLM":
        biased += [f"self_attn.{name}_proj" for name in "qkv"]
    if all_biases:
        biased += ["self_attn.o_proj"]
    if config.get("mlp_bias"):
        biased += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer |= {f"{name}.bias": layer[f"{name}.weight"][:1] for name in biased}
    if architecture == "Qwen3ForCausalLM":
        layer |= {f"self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def write_weights(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, seed: int) -> None:
    """Random tensors, scaled so that every part of the model matters to its logits."""
    rng = np.random.default_rng(seed)
    entries = [Entry(name, shape, partial(_random, rng, name, shape)) for name, shape in shapes.items()]
    write_safetensors(path, entries, dtype, None)


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    noise = rng.standard_normal(prod(shape), dtype=np.float32).reshape(shape)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.2 * noise
    return noise / np.float32(shape[-1] ** 0.5)


def _write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
