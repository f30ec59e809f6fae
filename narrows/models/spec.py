"""What a model is, as plain values. The only reader of Hugging Face's config names; no torch.

config.json, generation_config.json ──read_spec──▶ ModelSpec ──▶ registry, layers, runtime, server
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from narrows.models.fields import Fields, read_fields

RopeKind = Literal["default", "linear", "llama3"]
DTYPES = ("float32", "bfloat16", "float16")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. linear uses `factor`, llama3 all the rest too; default none of them."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the engine needs to know of a decoder before it opens its weights."""

    architecture: str  # as Hugging Face names it: LlamaForCausalLM, ...
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec
    tied: bool  # the head is the embedding
    windows: tuple[int | None, ...]  # per layer: how many positions a token sees, its own included; None: all
    attention_bias: bool  # as the config asks; what an architecture always or never has stands in its own file
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]  # any of them ends an answer; may be empty
    bos_token_id: int | None
    dtype: str  # of the weights as stored, one of DTYPES

    @property
    def entry_dim(self) -> int:
        """Numbers in one KV entry: K, then V."""
        return 2 * self.head_dim


def read_spec(folder: Path) -> ModelSpec:
    """Read a model folder's config.json and generation_config.json.

    Raises ModelError naming the file and field that is missing, of a wrong type or asks for what is not supported.
    """
    config = read_fields(folder / "config.json")
    architecture = _architecture(config)
    _refuse_unsupported(config)
    spec = _common(config, architecture)
    spec = ARCHITECTURES[architecture](config, spec)
    generation_path = folder / "generation_config.json"
    generation = read_fields(generation_path) if generation_path.exists() else Fields(generation_path, {})
    eos = generation.token_ids("eos_token_id") + config.token_ids("eos_token_id")
    _check(spec, config)
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(eos)))


def _architecture(config: Fields) -> str:
    names = config.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", f"{names!r} is not a list of one name")
    if names[0] not in ARCHITECTURES:
        raise config.error("architectures", f"{names[0]} is not supported; supported are {', '.join(ARCHITECTURES)}")
    return names[0]


def _refuse_unsupported(config: Fields) -> None:
    if (quantization := config.raw("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise config.error(
            "quantization_config", f"{method!r} weights are not supported; use a bf16, fp16 or fp32 folder, or a GGUF"
        )
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise config.error("hidden_act", f"{activation!r} is not supported; supported is silu")


def _common(config: Fields, architecture: str) -> ModelSpec:
    """The fields that all architectures share, with every variation off."""
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_layers, max_positions = config.integer("num_hidden_layers"), config.integer("max_position_embeddings")
    dtype = config.text("dtype", "") or config.text("torch_dtype", "float32")
    if dtype not in DTYPES:
        raise config.error("dtype", f"{dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    bos = config.token_ids("bos_token_id")
    return ModelSpec(
        architecture=architecture,
        hidden=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", hidden // num_heads),
        intermediate=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_positions=max_positions,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config, max_positions),
        tied=config.flag("tie_word_embeddings", False),
        windows=(None,) * num_layers,
        attention_bias=False,
        mlp_bias=False,
        eos_token_ids=(),
        bos_token_id=bos[0] if bos else None,
        dtype=dtype,
    )


def _rope(config: Fields, max_positions: int) -> RopeSpec:
    """Accepts both spellings: `rope_parameters` (one object) and `rope_theta` with an optional `rope_scaling`."""
    name = "rope_parameters" if config.raw("rope_parameters") is not None else "rope_scaling"
    rope = config.nested(name)
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    kind = rope.text("rope_type", "") or rope.text("type", "default")
    if rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise config.error("partial_rotary_factor", "only 1.0 is supported")
    match kind:
        case "default":
            return RopeSpec(theta)
        case "linear":
            return RopeSpec(theta, "linear", factor=rope.number("factor"))
        case "llama3":
            return RopeSpec(
                theta,
                "llama3",
                factor=rope.number("factor"),
                low_freq_factor=rope.number("low_freq_factor"),
                high_freq_factor=rope.number("high_freq_factor"),
                original_max_positions=rope.integer("original_max_position_embeddings", max_positions),
            )
        case _:
            raise rope.error("rope_type", f"{kind!r} is not supported; supported are {', '.join(get_args(RopeKind))}")


def _llama(config: Fields, spec: ModelSpec) -> ModelSpec:
    return replace(spec, attention_bias=config.flag("attention_bias", False), mlp_bias=config.flag("mlp_bias", False))


def _mistral(config: Fields, spec: ModelSpec) -> ModelSpec:
    return replace(spec, windows=(_window(config),) * spec.num_layers)


def _qwen2(config: Fields, spec: ModelSpec) -> ModelSpec:
    return replace(spec, windows=_qwen_windows(config, spec.num_layers))


def _qwen3(config: Fields, spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        head_dim=config.integer("head_dim", 128),
        attention_bias=config.flag("attention_bias", False),
        windows=_qwen_windows(config, spec.num_layers),
    )


def _window(config: Fields) -> int | None:
    """An absent field means 4096, an explicit null no window: that is how Hugging Face reads such folders."""
    return config.optional_integer("sliding_window") if config.has("sliding_window") else 4096


def _qwen_windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Full attention in the first max_window_layers layers, a window in the rest, unless layer_types says otherwise."""
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = _window(config)
    first = config.integer("max_window_layers", 28, least=0)
    types = config.raw("layer_types")
    if types is None:
        types = [_LAYER_TYPES[layer >= first] for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise config.error("layer_types", f"needs {num_layers} names, one a layer")
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise config.error("layer_types", f"{kind!r} is not supported; supported are {', '.join(_LAYER_TYPES)}")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _check(spec: ModelSpec, config: Fields) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"{spec.num_kv_heads} does not divide num_attention_heads ({spec.num_heads})"
        )
    if spec.head_dim % 2:
        raise config.error("head_dim", f"{spec.head_dim} is odd; rotary embeddings need an even one")


ARCHITECTURES: dict[str, Callable[[Fields, ModelSpec], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
