"""What a model calls between storing a layer's K and V and using the result.

The plain backend reads everything from the local pool. Selection, on-demand fetch and context parallelism are other
backends behind the same call, so a model never knows where its KV is.
"""

from typing import Protocol

from torch import Tensor

from narrows.kernels.base import Kernels, PagedBatch


class AttentionBackend(Protocol):
    """Attention of one step's rows over the KV of their requests."""

    looks_ahead: bool  # whether `foresee` is to be called

    def foresee(self, layer: int, query: Tensor, batch: PagedBatch, *, scale: float, window: int | None) -> None:
        """What layer `layer`'s query [T, Hq, D] will be about: computed from the input of the layer before it, and
        told before that layer's own attention, so that what it needs can be on its way meanwhile."""
        ...

    def attend(
        self,
        layer: int,
        query: Tensor,  # [T, Hq, D]
        entries: Tensor,  # [num_slots, Hkv, E] of this layer, the step's own tokens already stored
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns out [T, Hq, D] in the query's dtype and lse [T, Hq] float32, natural log; empty rows 0 and -inf."""
        ...


class PagedAttention:
    """Dense causal attention over the local pool."""

    looks_ahead = False

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def foresee(self, layer: int, query: Tensor, batch: PagedBatch, *, scale: float, window: int | None) -> None:
        raise AssertionError("dense attention needs no foresight")

    def attend(
        self, layer: int, query: Tensor, entries: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        return self.kernels.attend(query, entries, batch, scale=scale, window=window)
