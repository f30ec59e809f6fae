"""Measure which KV entries decode selects: real texts through the real model, the selector asked at every decode step.

Legend: L layers, R decode rows, Hkv KV heads, D head size, n prompt tokens.

A text is computed once, and on its way measured at each length n: its tokens n, n + 1, ... are decoded as if they had
been generated, with the attention that the selector leaves (SmartGen, section 4.1). Then prefill goes on at n over the
same tokens, densely, to the next length.

    text    |--------- n1 ---------|== R ==|
            |--------- n1 ---------|------------ n2 ------------|== R ==|
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from narrows.attention.base import PagedAttention
from narrows.errors import ConfigError
from narrows.kernels.base import Kernels, PagedBatch
from narrows.kv.blocks import NUM_BLOCKS
from narrows.kv.layout import DENSE_LAYERS, pages_for
from narrows.models.layers.decoder import Model
from narrows.profile.importance import VERSION, Group, ImportanceProfile, IntArray
from narrows.profile.measuring.steps import decode_rows, prefill_step
from narrows.profile.smoothing import smooth
from narrows.select.base import Selector

GROUPS = (512, 1024, 2048, 4096, 8192)
NUM_ROWS = 64  # decode steps measured behind each prompt
_CHUNK = 512
_PAGE = 32
_TOKENS_A_GROUP = 8192  # short prompts are measured more often than long ones
_MOST_PROMPTS = 8

Progress = Callable[[int, int], None]  # tokens computed so far, tokens in all


class TextRun:
    """One text on its way through the model; the attention of its steps is `self`.

    While prefilling it is dense and the selector describes each layer's keys; in decode rows it selects, counts which
    prompt tokens were selected, and attends to those alone. The first two layers are dense and count nothing.
    Page-wise algorithms see each page as it is after all rows.
    """

    def __init__(self, model: Model, kernels: Kernels, selector: Selector, num_tokens: int) -> None:
        self._model, self._kernels, self._selector = model, kernels, selector
        self._dense = PagedAttention(kernels)
        self.looks_ahead = selector.looks_ahead
        layout, spec = selector.metadata, model.spec
        self._page_size = layout.tokens_per_row if layout.tokens_per_row > 1 else _PAGE
        slots = pages_for(num_tokens, self._page_size) * self._page_size
        self._entries = [
            torch.zeros(slots, spec.num_kv_heads, spec.entry_dim, dtype=model.dtype) for _ in range(spec.num_layers)
        ]
        rows = slots // layout.tokens_per_row
        self._metadata = [
            torch.zeros(rows, spec.num_kv_heads, layout.row_bytes, dtype=torch.uint8) for _ in range(spec.num_layers)
        ]
        self._computed = 0
        self._foreseen: dict[int, Tensor] = {}
        self._counts: Tensor | None = None  # [L, n] int64 while rows are decoded

    def prefill(self, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
        """Go on until all of `tokens` have their KV; they begin with those that have it already."""
        # From the start of a page: what lay behind it belonged to decode rows.
        start = self._computed // self._page_size * self._page_size
        while start < len(tokens):
            stop = min(start + _CHUNK, len(tokens))
            batch = prefill_step([(start, stop)], self._page_size)
            self._step(tokens[start:stop], batch, logit_rows=torch.empty(0, dtype=torch.int32))
            if progress is not None:
                progress(stop - max(start, self._computed))
            start = self._computed = stop

    def decode(self, tokens: Sequence[int]) -> IntArray:
        """Decode the given tokens behind what is prefilled. Returns how often each prompt token was selected in each
        layer, [L, n], over rows and KV heads. What was prefilled stays as it was."""
        start, spec = self._computed, self._model.spec
        self._counts = torch.zeros(spec.num_layers, start, dtype=torch.int64)
        batch = decode_rows(start, start + len(tokens), self._page_size)
        self._step(tokens, batch, logit_rows=None)
        counts, self._counts = self._counts, None
        return counts.numpy()

    def _step(self, tokens: Sequence[int], batch: PagedBatch, *, logit_rows: Tensor | None) -> None:
        def describe(layer: int) -> None:
            if layer < DENSE_LAYERS:
                return
            self._selector.describe(layer, self._entries[layer], batch.slots, self._metadata[layer])

        ids = torch.tensor(tokens, dtype=torch.int32)
        self._model.forward(ids, self._entries, batch, self, logit_rows=logit_rows, on_layer=describe)

    def foresee(self, layer: int, query: Tensor, batch: PagedBatch, *, scale: float, window: int | None) -> None:
        # Selected from later, in `attend`: by then the keys of the rows before each row are described.
        if self._counts is not None:
            self._foreseen[layer] = query

    def attend(
        self, layer: int, query: Tensor, entries: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        if self._counts is None or layer < DENSE_LAYERS:
            return self._dense.attend(layer, query, entries, batch, scale=scale, window=window)
        by = self._foreseen.pop(layer, query)
        index = self._selector.select(layer, by, self._metadata[layer], batch, scale=scale, window=window)
        valid = torch.arange(index.positions.shape[1]) < index.counts[:, None]
        chosen = index.positions[valid]
        num_tokens = self._counts.shape[1]
        self._counts[layer] += torch.bincount(chosen[chosen < num_tokens], minlength=num_tokens)
        # Slots are positions here: pages lie in order.
        num_heads = entries.shape[1]
        heads = torch.arange(num_heads, dtype=torch.int32).repeat(len(query))
        ids = torch.where(valid, index.positions * num_heads + heads[:, None], 0)
        memory = entries.view(-1, entries.shape[-1])
        return self._kernels.attend_index(query, memory, ids, index.counts, scale=scale)


def fit_groups(groups: Sequence[int], max_positions: int, num_tokens: int | None = None) -> list[int]:
    """Lengths to measure, ascending: those asked for, cut to what the model's context (and the text) allow."""
    room = max_positions if num_tokens is None else min(max_positions, num_tokens)
    if room <= NUM_ROWS:
        raise ConfigError(f"text: {room} tokens are too few; give at least {NUM_ROWS + 1}, better some thousands")
    if min(groups) < 1:
        raise ConfigError(f"groups: {min(groups)} is no length of a prompt; use lengths of at least 1")
    return sorted({min(n, room - NUM_ROWS) for n in groups})


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """How often each of n prompt tokens was selected in each layer."""

    counts: IntArray  # [L, n]
    num_queries: int  # rows that could have selected it: decode steps times KV heads times prompts


def measure_importance(
    model: Model,
    kernels: Kernels,
    selector: Selector,
    text: Sequence[int],  # tokens
    *,
    fingerprint: str,  # of the model
    groups: Sequence[int] = GROUPS,
    num_blocks: int = NUM_BLOCKS,
    num_prompts: int | None = None,
    prefix: Sequence[int] = (),
    progress: Progress | None = None,
    limit_s: float | None = None,
) -> ImportanceProfile:
    """Importance by prompt length, smoothed along positions; for the arguments see `count_selections`."""
    counted = count_selections(
        model,
        kernels,
        selector,
        text,
        groups=groups,
        num_prompts=num_prompts,
        prefix=prefix,
        progress=progress,
        limit_s=limit_s,
    )
    made = [Group.from_counts(smooth(counted[n].counts), counted[n].num_queries, num_blocks) for n in sorted(counted)]
    return ImportanceProfile(fingerprint, selector.fingerprint, VERSION, tuple(made))


def count_selections(
    model: Model,
    kernels: Kernels,
    selector: Selector,
    text: Sequence[int],
    *,
    groups: Sequence[int],
    num_prompts: int | None = None,  # of each length; None: more of short ones
    prefix: Sequence[int] = (),  # what every prompt begins with, such as BOS
    progress: Progress | None = None,
    limit_s: float | None = None,
) -> dict[int, Counted]:
    """Selections by prompt length, over prompts spread evenly over `text`.

    Lengths beyond the model's context are cut to it. After `limit_s` seconds no further length or prompt is begun,
    but the shortest length is always measured. Raises ConfigError when the text is too short.
    """
    lengths = fit_groups(groups, model.max_positions)
    room = len(text) + len(prefix)
    if lengths[-1] + NUM_ROWS > room:
        raise ConfigError(
            f"text: {room} tokens are too few for prompts of {lengths[-1]} and the {NUM_ROWS} that follow; "
            + (f"give more text, or groups of at most {room - NUM_ROWS}" if room > NUM_ROWS else "give more text")
        )
    wanted = {n: num_prompts or min(max(_TOKENS_A_GROUP // n, 1), _MOST_PROMPTS) for n in lengths}
    runs = [[n for n in lengths if wanted[n] > i] for i in range(max(wanted.values()))]
    total = sum(run[-1] for run in runs)
    queries = NUM_ROWS * model.spec.num_kv_heads
    counted: dict[int, Counted] = {}
    done = 0

    def advance(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        if progress is not None:
            progress(done, total)

    began = time.monotonic()
    for i, run in enumerate(runs):
        length = run[-1] + NUM_ROWS
        own = length - len(prefix)
        first = (len(text) - own) * i // max(1, len(runs) - 1)
        tokens = [*prefix, *text[first : first + own]]
        one = TextRun(model, kernels, selector, length)
        for n in run:
            if counted and limit_s is not None and time.monotonic() - began > limit_s:
                break
            one.prefill(tokens[:n], advance)
            found = one.decode(tokens[n : n + NUM_ROWS])
            before = counted.get(n, Counted(np.zeros_like(found), 0))
            counted[n] = Counted(before.counts + found, before.num_queries + queries)
    if progress is not None:
        progress(total, total)
    return counted
