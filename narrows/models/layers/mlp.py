"""The dense feed-forward block: down(silu(gate(x)) * up(x))."""

from dataclasses import dataclass

import torch
from torch import Tensor

from narrows.kernels.base import Kernels, PackedLinear
from narrows.models.spec import ModelSpec
from narrows.models.weights import Weights


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Gate and up are one matrix, gate's rows first."""

    gate_up: PackedLinear
    down: PackedLinear

    def add_to(self, hidden: Tensor, x: Tensor, kernels: Kernels) -> Tensor:
        """Adds the block's result for x [T, H] to `hidden` [T, H] in place and returns it."""
        return kernels.linear(kernels.gated_linear(x, self.gate_up), self.down, residual=hidden)


def load_mlp(spec: ModelSpec, weights: Weights, kernels: Kernels, *, bias: bool) -> GatedMlp:
    """Takes gate_proj, up_proj and down_proj."""
    wide = ("gate_proj", "up_proj")
    weight = torch.cat([weights.take(f"{name}.weight", spec.intermediate, spec.hidden) for name in wide])
    wide_bias = torch.cat([weights.take(f"{name}.bias", spec.intermediate) for name in wide]) if bias else None
    return GatedMlp(
        gate_up=kernels.pack(weight, wide_bias),
        down=kernels.pack(
            weights.take("down_proj.weight", spec.hidden, spec.intermediate),
            weights.take("down_proj.bias", spec.hidden) if bias else None,
        ),
    )
