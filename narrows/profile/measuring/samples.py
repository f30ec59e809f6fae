"""Queries and keys of a real model on given prompts: what selection algorithms are calibrated and measured on.

Legend: T tokens of a prompt, S sampled rows, Hq query heads, Hkv KV heads, D head size, E = 2*D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrows.attention.base import PagedAttention
from narrows.kernels.base import Kernels, PagedBatch
from narrows.models.layers.decoder import Model

PAGE = 16
SHORTEST = 64  # tokens; below, a prompt says nothing about selection


@dataclass(frozen=True, slots=True)
class LayerSample:
    """What one layer computes in one prompt. All after RoPE, in the model's dtype."""

    query: Tensor  # [S, Hq, D]
    foreseen: Tensor  # [S, Hq, D] from the input of the layer before; the query itself in layer 0
    key: Tensor  # [T, Hkv, D]


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt: query row s stands at positions[s] and sees the keys up to its own."""

    positions: Tensor  # [S] int64, ascending
    layers: tuple[LayerSample, ...]


class _Recorder(PagedAttention):
    """Dense attention that remembers the queries at some positions of a single prompt, and all its keys."""

    looks_ahead = True

    def __init__(self, kernels: Kernels, positions: Tensor, progress: Callable[[int], None]) -> None:
        super().__init__(kernels)
        self._positions = positions
        self._foreseen: dict[int, Tensor] = {}
        self._progress = progress
        self.layers: list[LayerSample] = []

    def foresee(self, layer: int, query: Tensor, batch: PagedBatch, *, scale: float, window: int | None) -> None:
        self._foreseen[layer] = self._sampled(query, batch)

    def attend(
        self, layer: int, query: Tensor, entries: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        own = self._sampled(query, batch)
        key = entries[..., : query.shape[2]].clone()
        self.layers.append(LayerSample(own, self._foreseen.pop(layer, own), key))
        self._progress(len(self.layers))
        return super().attend(layer, query, entries, batch, scale=scale, window=window)

    def _sampled(self, query: Tensor, batch: PagedBatch) -> Tensor:
        """The last layer's step is already narrowed to the sampled rows."""
        return query[torch.searchsorted(batch.positions.long(), self._positions)].clone()


def collect(
    model: Model,
    kernels: Kernels,
    prompts: Sequence[Sequence[int]],
    *,
    num_rows: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Run each prompt through the model and keep its keys and `num_rows` of its queries, spread over its second half.

    Later queries see more and are what decoding asks. Prompts are cut at the model's positions; those shorter than
    SHORTEST are left out. `progress` hears (done, of all), in layers.
    """
    kept = [list(prompt[: model.max_positions]) for prompt in prompts if len(prompt) >= SHORTEST]
    total = len(kept) * model.spec.num_layers
    samples: list[Sample] = []
    for tokens in kept:
        first = len(tokens) // 2
        positions = torch.linspace(first, len(tokens) - 1, min(num_rows, len(tokens) - first)).round().long()
        done = len(samples) * model.spec.num_layers
        recorder = _Recorder(kernels, positions, lambda n, done=done: progress(done + n, total) if progress else None)
        _run(model, tokens, positions, recorder)
        samples.append(Sample(positions, tuple(recorder.layers)))
    return samples


def _run(model: Model, tokens: Sequence[int], positions: Tensor, attention: PagedAttention) -> None:
    """One prompt in one step; its page p is the pool's page p, and all layers share one pool."""
    length = len(tokens)
    pages = -(-length // PAGE)
    at = torch.arange(length, dtype=torch.int32)
    batch = PagedBatch(
        query_start=torch.tensor([0, length], dtype=torch.int32),
        context_len=torch.tensor([length], dtype=torch.int32),
        page_table=torch.arange(pages, dtype=torch.int32)[None],
        slots=at,
        positions=at,
        page_size=PAGE,
        max_query=length,
        max_context=length,
        is_decode=False,
    )
    entries = torch.empty(length, model.spec.num_kv_heads, model.spec.entry_dim, dtype=model.dtype)
    model.forward(
        torch.tensor(tokens, dtype=torch.int32),
        [entries] * model.spec.num_layers,
        batch,
        attention,
        logit_rows=positions,
    )
