"""How much attention mass an algorithm's selection keeps, on samples of a real model.

Legend: S sampled queries, Hkv KV heads, D head size, T tokens of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrows.kernels.base import PagedBatch
from narrows.profile.measuring.samples import LayerSample, Sample
from narrows.select.base import Selector

FIRST_LAYER = 2  # the layers before are always read whole


@dataclass(frozen=True, slots=True)
class Kept:
    """Means over prompts, layers, queries and KV heads."""

    mass: float  # part of the softmax over all positions that was selected, mean over the heads of a group
    best: float  # the most that any selection of the same ratio keeps
    selected: float  # part of the entries that was selected

    @property
    def recall(self) -> float:
        return self.mass / self.best


@torch.inference_mode()
def measure_recall(selector: Selector, samples: Sequence[Sample], *, page_size: int, scale: float) -> Kept:
    """Select for every sampled query as decoding does: when all keys before it are described, and it is foreseen where
    the algorithm looks ahead. The best is by brute force, from attention itself."""
    found: list[Tensor] = []
    for sample in samples:
        for layer in range(FIRST_LAYER, len(sample.layers)):
            found.append(_layer(selector, sample, layer, page_size, scale))
    mass, best, selected = torch.cat(found).mean(0).tolist()
    return Kept(mass, best, selected)


def _layer(selector: Selector, sample: Sample, layer: int, page_size: int, scale: float) -> Tensor:
    """[S * Hkv, 3]: mass, best and part selected."""
    part = sample.layers[layer]
    tokens, num_kv_heads, head_dim = part.key.shape
    pages = -(-tokens // page_size)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    at = torch.arange(tokens)
    slots = table[at // page_size] * page_size + (at % page_size).to(torch.int32)
    entries = part.key.new_zeros(pages * page_size, num_kv_heads, 2 * head_dim)
    entries[slots.long(), :, :head_dim] = part.key
    layout = selector.metadata
    metadata = torch.zeros(len(entries) // layout.tokens_per_row, num_kv_heads, layout.row_bytes, dtype=torch.uint8)
    query = part.foreseen if selector.looks_ahead else part.query
    described, rows = 0, []
    for s, position in enumerate(sample.positions.tolist()):
        selector.describe(layer, entries, slots[described:position], metadata)
        described = position
        length = torch.tensor([position + 1], dtype=torch.int32)
        batch = PagedBatch(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_len=length,
            page_table=table[None],
            slots=slots[position : position + 1],
            positions=length - 1,
            page_size=page_size,
            max_query=1,
            max_context=position + 1,
        )
        index = selector.select(layer, query[s : s + 1], metadata, batch, scale=scale, window=None)
        weights = attention(part, s, position, scale)
        chosen = index.positions.long()
        kept = weights.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0.0).sum(1)
        most = max(1, -int(-selector.ratio * (position + 1) // 1))
        best = weights.topk(most, dim=1).values.sum(1)
        rows.append(torch.stack([kept, best, index.counts / (position + 1)], dim=1))
    return torch.cat(rows)


def attention(part: LayerSample, row: int, position: int, scale: float) -> Tensor:
    """[Hkv, position + 1]: softmax weights of one query, the mean over each group of heads."""
    key = part.key[: position + 1].float()
    query = part.query[row].float().view(key.shape[1], -1, key.shape[2])
    return (torch.einsum("hgd,thd->hgt", query, key) * scale).softmax(-1).mean(1)
