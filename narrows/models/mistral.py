"""Mistral: no biases; in its first versions every layer sees a sliding window only (spec.windows)."""

from narrows.kernels.base import Kernels
from narrows.models.layers.attention import load_attention
from narrows.models.layers.decoder import DecoderLayer, Model, load_decoder, load_layer
from narrows.models.layers.mlp import load_mlp
from narrows.models.spec import ModelSpec
from narrows.models.weights import Weights


def build(spec: ModelSpec, weights: Weights, kernels: Kernels, max_positions: int) -> Model:
    def layer(part: Weights, index: int) -> DecoderLayer:
        attention = load_attention(spec, part.under("self_attn."), kernels, qkv_bias=False, o_bias=False)
        mlp = load_mlp(spec, part.under("mlp."), kernels, bias=False)
        return load_layer(spec, part, index, attention=attention, mlp=mlp)

    return load_decoder(spec, weights, kernels, layer, max_positions)
