"""Runs the model on one step: rows of requests in, logits out. The same for prefill chunks and decode tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from narrows.attention.base import AttentionBackend
from narrows.core.trace import COMPUTE, Tracer
from narrows.kernels.base import PagedBatch
from narrows.kv.pool import KVPool
from narrows.kv.table import BlockTable
from narrows.models.layers.decoder import Model


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive tokens of one request: `tokens` stand at positions start.., whose slots the table has."""

    table: BlockTable
    start: int
    tokens: Sequence[int]
    wants_logits: bool = True  # of the last row

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class _LayerSpans:
    """Records each layer's computation, from the KV of one to the KV of the next, waiting included."""

    def __init__(self, tracer: Tracer, on_layer: Callable[[int], None] | None) -> None:
        self._tracer = tracer
        self._on_layer = on_layer
        self._layer = -1
        self._since_s = tracer.clock()

    def on_layer(self, layer: int) -> None:
        self.finish()
        self._layer = layer
        if self._on_layer is not None:
            self._on_layer(layer)

    def finish(self) -> None:
        name = f"layer {self._layer}" if self._layer >= 0 else "embedding"
        self._since_s = self._tracer.add(COMPUTE, name, self._since_s, layer=self._layer)


class Runner:
    """Holds what a step needs and no request's state. Every row's KV is stored in the pool."""

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        attention: AttentionBackend,
        page_size: int,
        *,
        is_decode: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self.model = model
        self._pool = pool
        self._attention = attention
        self._page_size = page_size
        self._is_decode = is_decode

    def run(self, rows: Sequence[Rows], on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Logits [n, V] float32 of the n requests that want them, in order."""
        wanted = [r.wants_logits for r in rows]
        ends = np.cumsum([len(r.tokens) for r in rows], dtype=np.int32)
        every_row = len(rows) == ends[-1] and all(wanted)
        layers = None if self._tracer is None else _LayerSpans(self._tracer, on_layer)
        logits = self.model.forward(
            torch.tensor([token for r in rows for token in r.tokens], dtype=torch.int32),
            self._pool.layers,
            self._batch(rows, ends),
            self._attention,
            logit_rows=None if every_row else torch.from_numpy(ends[wanted] - 1),
            on_layer=on_layer if layers is None else layers.on_layer,
        )
        if layers is not None:
            layers.finish()
        return logits

    def _batch(self, rows: Sequence[Rows], ends: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> PagedBatch:
        lengths = [r.stop for r in rows]
        page_table = np.zeros((len(rows), -(-max(lengths) // self._page_size)), dtype=np.int32)
        for line, r in zip(page_table, rows, strict=True):
            used = -(-r.stop // self._page_size)
            line[:used] = r.table.pages[:used]
        if len(rows) == ends[-1]:  # one token each, as in every decode step
            slots = torch.tensor([r.table.slot(r.start) for r in rows], dtype=torch.int32)
            positions = torch.tensor([r.start for r in rows], dtype=torch.int32)
        else:
            slots = torch.from_numpy(np.concatenate([r.table.slots(r.start, r.stop) for r in rows]))
            positions = torch.from_numpy(np.concatenate([np.arange(r.start, r.stop, dtype=np.int32) for r in rows]))
        return PagedBatch(
            query_start=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            context_len=torch.tensor(lengths, dtype=torch.int32),
            page_table=torch.from_numpy(page_table),
            slots=slots,
            positions=positions,
            page_size=self._page_size,
            max_query=max(len(r.tokens) for r in rows),
            max_context=max(lengths),
            is_decode=self._is_decode,
        )
