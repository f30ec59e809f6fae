"""Queries and keys of a real model on given prompts: what selection algorithms are calibrated and measured on.

Legend: T tokens of a prompt, S sampled rows, Hq query heads, Hkv KV heads, D head size, E = 2*D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from narrows.attention.base import PagedAttention
from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.reference import rotate
from narrows.kv.layout import pages_for
from narrows.models.layers.decoder import Model
from narrows.profile.measuring.steps import prefill_step

SKIPPED = 4  # first keys of a prompt, attention sinks: unlike all others, they would bend what is fitted
PAGE = 16
SHORTEST = 64  # tokens; below, a prompt says nothing about selection


@dataclass(frozen=True, slots=True)
class LayerSample:
    """What one layer computes in one prompt. All after RoPE, in the model's dtype."""

    query: Tensor  # [S, Hq, D]
    foreseen: Tensor  # [S, Hq, D] from the input of the layer before; the query itself in layer 0, or without foresight
    key: Tensor  # [T, Hkv, D]


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt: query row s stands at positions[s] and sees the keys up to its own."""

    positions: Tensor  # [S] int64, ascending
    layers: tuple[LayerSample, ...]


class _Recorder(PagedAttention):
    """Dense attention that remembers the queries at some positions of a single prompt, and all its keys."""

    def __init__(
        self, kernels: Kernels, positions: Tensor, num_tokens: int, foresight: bool, progress: Callable[[int], object]
    ) -> None:
        super().__init__(kernels)
        self.looks_ahead = foresight
        self._num_tokens = num_tokens
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
        key = entries[: self._num_tokens, :, : query.shape[2]].clone()
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
    foresight: bool = True,
    progress: Callable[[int, int], object] = lambda done, of: None,  # noqa: ARG005
) -> list[Sample]:
    """Run each prompt through the model and keep its keys and `num_rows` of its queries, spread over its second half.

    Later queries see more and are what decoding asks. `foresight` costs a projection more in each layer.
    Prompts are cut at the model's positions; those shorter than
    SHORTEST are left out. `progress` hears (done, of all), in layers.
    """
    kept = [list(prompt[: model.max_positions]) for prompt in prompts if len(prompt) >= SHORTEST]
    total = len(kept) * model.spec.num_layers
    samples: list[Sample] = []
    for tokens in kept:
        first = len(tokens) // 2
        positions = torch.linspace(first, len(tokens) - 1, min(num_rows, len(tokens) - first)).round().long()
        done = len(samples) * model.spec.num_layers
        recorder = _Recorder(kernels, positions, len(tokens), foresight, partial(_tell, progress, done, total))
        _run(model, tokens, positions, recorder)
        samples.append(Sample(positions, tuple(recorder.layers)))
    return samples


def _tell(progress: Callable[[int, int], object], before: int, total: int, layers: int) -> None:
    progress(before + layers, total)


def _run(model: Model, tokens: Sequence[int], positions: Tensor, attention: PagedAttention) -> None:
    """One prompt in one step; all layers share one pool, since the recorder keeps what it needs of each."""
    batch = prefill_step([(0, len(tokens))], PAGE)
    pages = pages_for(len(tokens), PAGE)
    entries = torch.empty(pages * PAGE, model.spec.num_kv_heads, model.spec.entry_dim, dtype=model.dtype)
    model.forward(
        torch.tensor(tokens, dtype=torch.int32),
        [entries] * model.spec.num_layers,
        batch,
        attention,
        logit_rows=positions,
    )


@dataclass(frozen=True, slots=True)
class View:
    """What one layer computes in one prompt that begins at some position of the context; heads first, float32.

    Query row s sees the first `seen[s]` keys, its own included. The prompt's first SKIPPED keys are left out.
    """

    query: Tensor  # [Hkv, S, G, D]
    key: Tensor  # [Hkv, N, D]
    seen: Tensor  # [S] int64

    def attention(self, scale: float) -> Tensor:
        """Softmax weights [Hkv, S, G, N]."""
        return self.scores(self.key, scale).softmax(-1)

    def scores(self, key: Tensor, scale: float) -> Tensor:
        """q.k [Hkv, S, G, N], -inf where a query does not see a key."""
        return self.hide(torch.einsum("hsgd,hnd->hsgn", self.query, key) * scale)

    def hide(self, scores: Tensor) -> Tensor:
        unseen = torch.arange(scores.shape[3]) >= self.seen[:, None]
        return scores.masked_fill(unseen[:, None], float("-inf"))


def views(samples: Sequence[Sample], layer: int, rope: tuple[Tensor, Tensor], count: int) -> list[View]:
    """Each sample as it is and `count - 1` times at later positions, spread over those that the rope tables have.

    Scores depend on distances alone, so a prompt further along the context has the same queries and keys, rotated: what
    is fitted to them also fits long prompts, at the price of short ones.
    """
    cos, sin = rope
    found = []
    for i, sample in enumerate(samples):
        part = sample.layers[layer]
        room = max(0, len(cos) - len(part.key))
        for n in range(count):
            # Samples take turns, so that together they are spread evenly; the first begins at 0.
            at = room * (n * len(samples) + i) // max(1, count * len(samples) - 1)
            query, key = (rotate(x.float(), cos[at], sin[at]) for x in (part.query, part.key[SKIPPED:]))
            found.append(
                View(
                    torch.unflatten(query, 1, (key.shape[1], -1)).transpose(0, 1).contiguous(),
                    key.transpose(0, 1).contiguous(),
                    sample.positions + 1 - SKIPPED,
                )
            )
    return found
