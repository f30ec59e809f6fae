"""Rotary position embedding: the tables that kernels look angles up in."""

import math

import torch
from torch import Tensor

from narrows.models.spec import RopeSpec


def rope_tables(rope: RopeSpec, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, both [num_positions, head_dim / 2] float32.

    Angles are formed in float32, as other implementations do: at late positions the rounding of this product is
    part of what a model was trained with.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return angles.cos(), angles.sin()


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of dims, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    """Keep short waves, slow long ones down by `factor`, blend in between.

    `turns` is how often a pair rotates within the context the model was first trained on.
    """
    turns = rope.original_max_positions * plain / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain
