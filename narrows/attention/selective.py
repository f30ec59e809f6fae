"""Attention over what a selector picked, where part of it may still be at prefill (SmartGen section 4.2).

    select ──▶ split by mask, remote first ──┬──▶ fetch the remote lane ──▶ keep what came ──┐
                (Algorithm 1)                └──▶ (the local lane stays where it lies)      ──┴──▶ attend

The paper gathers the local lane into the rows where the remote one lands, since its attention kernels want contiguous
rows. Ours read the pool by index, so there is nothing to gather: what was fetched is put in its place, which has to be
done anyhow, and then the pool is read in the order of positions, the same bits whatever was remote.

Legend: R requests, rows = R * Hkv, k selected entries of a row, E entry size. An entry's *id* is slot * Hkv + head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrows.core.trace import KEEP, Tracer
from narrows.kernels.base import Kernels, Located, PagedBatch
from narrows.kv.layout import DENSE_LAYERS, MASK_LOCAL
from narrows.select.base import KVIndex, Selector

Positions = npt.NDArray[np.int64]
Wanted = tuple[int, list[Positions]]  # a request's number in the batch, and what it lacks for each KV head


class Remote(Protocol):
    """The way to the KV that is not here. One step at a time; implemented by transfer.fetcher."""

    def rows(self, layer: int, num_bytes: int) -> memoryview:
        """Memory of so many bytes where answers of this layer may land; valid until the layer after the next."""
        ...

    def fetch(self, layer: int, wanted: Sequence[Wanted], row_bytes: int, *, packed: bool) -> int:
        """Ask for entries; request r's head h lands at byte (r * Hkv + h) * row_bytes of `rows`, raw or as
        Kernels.pack_entries makes it. Returns a ticket."""
        ...

    def wait(self, ticket: int) -> tuple[set[int], set[int]]:
        """Return when all of it has landed or will not: the requests of the batch whose entries did not come, and
        those that were not answered since all their KV had arrived meanwhile."""
        ...

    def attention_starts(self, layer: int) -> None:
        """The network is idle from now on, until the next fetch."""
        ...


@dataclass(slots=True)
class Counts:
    """Entries of layers that select, by request of the step."""

    selected: Tensor  # [R] int64
    fetched: Tensor


@dataclass(slots=True)
class Reading:
    """What one layer's attention reads. `ticket` None: everything is in the pool."""

    located: Located
    counts: Tensor  # [rows] int32
    ticket: int | None = None
    landing: Tensor | None = None  # [rows, bytes] uint8, where answers are written


@dataclass(slots=True)
class Step:
    """What is known of the requests of the running step."""

    requests: int = 0
    incomplete: bool = False  # some KV of some request is not here
    parallel_lanes: bool = True
    packed: bool = False  # what is fetched
    broken: set[int] = field(default_factory=set)
    selected: list[Tensor] = field(default_factory=list)  # of each layer that selects, [rows] int32
    fetched: list[Tensor] = field(default_factory=list)


class SelectiveAttention:
    """An AttentionBackend for decode steps; `begin` before each, `broken` and `counts` after it."""

    def __init__(
        self,
        kernels: Kernels,
        selector: Selector,
        pool: Sequence[Tensor],  # per layer [num_slots, Hkv, E]
        states: Tensor,  # the KV mask [L, num_slots, Hkv] int8, written by peers too
        metadata: Sequence[Tensor],  # per layer [num_slots / tokens_per_row, Hkv, row_bytes] uint8
        remote: Remote,
        *,
        staged: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        """`staged`: answers can not land in compute memory (no GPUDirect) and are copied once more."""
        self.looks_ahead = selector.looks_ahead
        self._kernels = kernels
        self._selector = selector
        self._pool = pool
        self._states = [layer.view(-1) for layer in states]
        self._metadata = metadata
        self._remote = remote
        self._staged = staged
        self._tracer = tracer
        self._step = Step()
        self._ahead: dict[int, KVIndex | Reading] = {}

    # ---- the step

    def begin(self, incomplete: Sequence[bool], *, parallel_lanes: bool = True, packed: bool = False) -> None:
        """The next step's requests, and which of them lack KV. `parallel_lanes` False fetches only when attention
        waits for it (the baseline of section 5.1); `packed` asks for fewer bytes where the dtype allows it."""
        self._ahead.clear()
        self._step = Step(
            len(incomplete), any(incomplete), parallel_lanes, packed and self._pool[0].dtype is torch.bfloat16
        )

    @property
    def broken(self) -> set[int]:
        """Requests of the step whose KV did not come: what was computed for them is to be thrown away."""
        return self._step.broken

    @property
    def counts(self) -> Counts:
        """Of steps that lacked something; all zeros otherwise."""

        def by_request(layers: list[Tensor]) -> Tensor:
            if not layers:
                return torch.zeros(self._step.requests, dtype=torch.int64)
            return torch.stack(layers).sum(dim=0).view(self._step.requests, -1).sum(dim=1)

        return Counts(by_request(self._step.selected), by_request(self._step.fetched))

    def describe(self, layer: int, slots: Tensor) -> None:
        """Derive the metadata of these slots [T] int32 from their keys, which are in the pool."""
        if layer >= DENSE_LAYERS and self._selector.metadata.row_bytes:
            self._selector.describe(layer, self._pool[layer], slots, self._metadata[layer])

    # ---- AttentionBackend

    def foresee(self, layer: int, query: Tensor, batch: PagedBatch, *, scale: float, window: int | None) -> None:
        if layer < DENSE_LAYERS:
            return
        index = self._select(layer, query, batch, scale, window)
        self._ahead[layer] = self._read(layer, index, batch) if self._step.parallel_lanes else index

    def attend(
        self, layer: int, query: Tensor, entries: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        if self._step.incomplete:
            self._remote.attention_starts(layer)
        if layer < DENSE_LAYERS:
            self._complete(layer, batch)
            return self._kernels.attend(query, entries, batch, scale=scale, window=window)
        self.describe(layer, batch.slots)
        ahead = self._ahead.pop(layer, None) or self._select(layer, query, batch, scale, window)
        reading = ahead if isinstance(ahead, Reading) else self._read(layer, ahead, batch)
        self._await(layer, reading)
        return self._kernels.attend_index(query, self._entries(layer), reading.located.ids, reading.counts, scale=scale)

    # ---- selecting and splitting

    def _select(self, layer: int, query: Tensor, batch: PagedBatch, scale: float, window: int | None) -> KVIndex:
        index = self._selector.select(layer, query, self._metadata[layer], batch, scale=scale, window=window)
        if self._step.incomplete:
            self._step.selected.append(index.counts)
        return index

    def _read(self, layer: int, index: KVIndex, batch: PagedBatch) -> Reading:
        """Split the index and ask for what is remote. The newest entry, last in each row, is never remote; where the
        index is foreseen it is not computed yet."""
        states = self._states[layer] if self._step.incomplete else None
        located = self._kernels.locate(index.positions, index.counts, batch, states)
        reading = Reading(located, index.counts)
        if not located.any_remote:
            return reading
        num_remote = located.num_remote.view(self._step.requests, -1).tolist()
        packed, pool = self._step.packed, self._pool[layer]
        row_bytes = max(map(max, num_remote)) * (pool.shape[-1] * pool.element_size() + packed)
        memory = self._remote.rows(layer, len(index.counts) * row_bytes)
        reading.landing = torch.frombuffer(memory, dtype=torch.uint8).view(-1, row_bytes)
        self._step.fetched.append(located.num_remote)
        wanted = self._wanted(located.remote_positions, num_remote)
        reading.ticket = self._remote.fetch(layer, wanted, row_bytes, packed=packed)
        return reading

    @staticmethod
    def _wanted(positions: Tensor, num_remote: list[list[int]]) -> list[Wanted]:
        rows, heads = positions.numpy(), len(num_remote[0])
        return [
            (r, [rows[r * heads + h, :n].astype(np.int64) for h, n in enumerate(line)])
            for r, line in enumerate(num_remote)
            if any(line)
        ]

    # ---- what was remote

    def _await(self, layer: int, reading: Reading) -> None:
        """All that the reading needs is in the pool afterwards, but for requests that are broken."""
        if reading.ticket is None or reading.landing is None:
            return
        broken, delivered = self._remote.wait(reading.ticket)
        began_s = 0.0 if self._tracer is None else self._tracer.clock()
        for request in delivered:
            if not bool((self._states[layer][self._remote_ids(reading, request)] == MASK_LOCAL).all()):
                broken.add(request)
        # Nothing is kept of what did not come, nor of a damaged answer.
        num_remote = reading.located.num_remote.clone()
        by_request = num_remote.view(self._step.requests, -1)
        by_request[sorted(broken | delivered)] = 0
        while (row := self._keep(layer, reading, num_remote)) is not None:
            broken.add(row // by_request.shape[1])
            by_request[sorted(broken)] = 0
        self._step.broken |= broken
        if self._tracer is not None:
            self._tracer.add(KEEP, f"layer {layer}", began_s, layer=layer)

    def _keep(self, layer: int, reading: Reading, counts: Tensor) -> int | None:
        """What was fetched is in the pool from now on, and never fetched again. Returns a row that is damaged."""
        assert reading.landing is not None
        pool, ids = self._entries(layer), reading.located.remote_ids
        landed = reading.landing.clone() if self._staged else reading.landing
        if self._step.packed:
            return self._kernels.keep_packed(pool, self._states[layer], ids, counts, landed)
        rows = landed.view(pool.dtype).view(len(ids), -1, pool.shape[1])
        self._kernels.keep(pool, self._states[layer], ids, counts, rows)
        return None

    def _remote_ids(self, reading: Reading, request: int) -> Tensor:
        """Ids of what a request lacked, of all its heads."""
        heads = len(reading.counts) // self._step.requests
        counts = reading.located.num_remote.tolist()
        rows = range(request * heads, (request + 1) * heads)
        return torch.cat([reading.located.remote_ids[row, : counts[row]] for row in rows]).long()

    def _entries(self, layer: int) -> Tensor:
        """The pool of a layer as entries of single KV heads [num_slots * Hkv, E]."""
        return self._pool[layer].view(-1, self._pool[layer].shape[-1])

    def _complete(self, layer: int, batch: PagedBatch) -> None:
        """Fetch all that is missing of a layer which is read whole."""
        if not self._step.incomplete:
            return
        lengths, heads = batch.context_len, self._pool[layer].shape[1]
        positions = torch.arange(batch.max_context, dtype=torch.int32).repeat(len(lengths) * heads, 1)
        self._await(layer, self._read(layer, KVIndex(positions, lengths.repeat_interleave(heads)), batch))
