"""What a selection algorithm needs to know of the model it selects for."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SelectorShape:
    """`model` is the fingerprint of the model folder (models.fingerprint); None: not to be checked."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of queries and KV entries
    model: str | None = None

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads
