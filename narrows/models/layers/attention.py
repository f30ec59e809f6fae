"""The attention block of a decoder layer, up to where the attention backend takes over and after it.

Legend: T rows, H model width, Hq query heads, Hkv KV heads, D head size, E = 2*D.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from narrows.kernels.base import Kernels, PackedLinear
from narrows.models.spec import ModelSpec
from narrows.models.weights import Weights


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Q, K and V are one matrix [(Hq + 2*Hkv) * D, H]; the norms are per head, or absent."""

    qkv: PackedLinear
    q: PackedLinear  # the first part of it
    o: PackedLinear
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None


def load_attention(
    spec: ModelSpec, weights: Weights, kernels: Kernels, *, qkv_bias: bool, o_bias: bool, qk_norm: bool = False
) -> AttentionWeights:
    """Takes q_proj, k_proj, v_proj and o_proj, and q_norm and k_norm where asked."""
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_kv_heads, "v_proj": spec.num_kv_heads}
    sizes = {name: count * spec.head_dim for name, count in heads.items()}
    weight = torch.cat([weights.take(f"{name}.weight", size, spec.hidden) for name, size in sizes.items()])
    bias = torch.cat([weights.take(f"{name}.bias", size) for name, size in sizes.items()]) if qkv_bias else None
    qkv = kernels.pack(weight, bias)
    return AttentionWeights(
        qkv=qkv,
        q=kernels.narrow(qkv, sizes["q_proj"]),
        o=kernels.pack(
            weights.take("o_proj.weight", spec.hidden, sizes["q_proj"]),
            weights.take("o_proj.bias", spec.hidden) if o_bias else None,
        ),
        q_norm=weights.take("q_norm.weight", spec.head_dim) if qk_norm else None,
        k_norm=weights.take("k_norm.weight", spec.head_dim) if qk_norm else None,
    )
