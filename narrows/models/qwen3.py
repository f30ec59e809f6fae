"""Qwen3 (dense): queries and keys are normed per head before the rotation."""

from narrows.kernels.base import Kernels
from narrows.models.layers.attention import load_attention
from narrows.models.layers.decoder import DecoderLayer, Model, load_decoder, load_layer
from narrows.models.layers.mlp import load_mlp
from narrows.models.spec import ModelSpec
from narrows.models.weights import Weights


def build(spec: ModelSpec, weights: Weights, kernels: Kernels, max_positions: int) -> Model:
    def layer(part: Weights, index: int) -> DecoderLayer:
        bias = spec.attention_bias
        attention = load_attention(spec, part.under("self_attn."), kernels, qkv_bias=bias, o_bias=bias, qk_norm=True)
        mlp = load_mlp(spec, part.under("mlp."), kernels, bias=False)
        return load_layer(spec, part, index, attention=attention, mlp=mlp)

    return load_decoder(spec, weights, kernels, layer, max_positions)
