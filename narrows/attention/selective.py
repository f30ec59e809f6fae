"""Attention over what a selector picked, where part of it may still be at prefill (SmartGen section 4.2).

    select ──▶ split by mask, remote first ──┬──▶ fetch the remote lane    ──┐
                (Algorithm 1)                └──▶ gather the local lane      ├──▶ attend ──▶ keep what came
                                                                          ──┘
A row of the workspace holds [remote | local | newest] entries; remote ones land there contiguously, so nothing is
scattered behind their arrival. Attention reads a row in the order of positions whatever its layout is, so the bits of
the result do not depend on what was remote. While nothing is remote it reads the pool itself, in the same order.

Legend: R requests, rows = R * Hkv, k selected entries of a row, E entry size. An entry's *id* is slot * Hkv + head.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrows.core.trace import GATHER, Tracer
from narrows.kernels.base import Kernels, PagedBatch
from narrows.kv.layout import DENSE_LAYERS, MASK_ABSENT, MASK_LOCAL, MASK_REMOTE
from narrows.select.base import KVIndex, Selector

Positions = npt.NDArray[np.int64]
Wanted = tuple[int, list[Positions]]  # a request's number in the batch, and what it lacks for each KV head


class Remote(Protocol):
    """The way to the KV that is not here. One step at a time; implemented by transfer.fetcher."""

    def rows(self, layer: int, num_bytes: int) -> memoryview:
        """Memory of so many bytes where answers of this layer may land; valid until the layer after the next."""
        ...

    def fetch(self, layer: int, wanted: Sequence[Wanted], row_bytes: int) -> int:
        """Ask for entries; request r's head h lands at byte (r * Hkv + h) * row_bytes of `rows`. Returns a ticket."""
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
class Split:
    """Algorithm 1: a KV index with its remote entries first. `order[i, c]` is the index's column at place c."""

    order: Tensor  # [rows, k] int64
    num_remote: Tensor  # [rows] int32
    num_local: Tensor  # [rows] int32


def split_index(mask: Tensor) -> Split:
    """Order each row of `mask` [rows, k] int8 (0 padding, 1 local, 2 remote) remote first, then local.

    Stable: positions stay ascending within each lane. Raises nothing; rows may be all of one kind.
    """
    order = mask.sort(dim=1, descending=True, stable=True).indices
    num_remote = (mask == MASK_REMOTE).sum(dim=1, dtype=torch.int32)
    num_local = (mask == MASK_LOCAL).sum(dim=1, dtype=torch.int32)
    return Split(order, num_remote, num_local)


@dataclass(slots=True)
class Reading:
    """What one layer's attention reads. `workspace` None: everything is in the pool."""

    ids: Tensor  # [rows, k] int32, in order of position
    counts: Tensor  # [rows] int32
    split: Split | None = None
    remote_ids: Tensor | None = None  # [rows, most remote] int32
    landing: Tensor | None = None  # [rows, k, E], where answers are written
    workspace: Tensor | None = None  # [rows, k, E], the same memory unless staged
    ticket: int | None = None


@dataclass(slots=True)
class Step:
    """What is known of the requests of the running step."""

    incomplete: Tensor | None = None  # [R] bool; None: all KV of all requests is here
    parallel_lanes: bool = True
    broken: set[int] = field(default_factory=set)
    counts: Counts | None = None


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
        """`staged`: answers can not land in the workspace itself (no GPUDirect); they are copied once more."""
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

    def begin(self, incomplete: Sequence[bool], *, parallel_lanes: bool = True) -> None:
        """The next step's requests, and which of them lack KV. `parallel_lanes` False fetches only when attention
        waits for it, and only after the local lane (the baseline of section 5.1)."""
        self._ahead.clear()
        zeros = torch.zeros(len(incomplete), dtype=torch.int64)
        self._step = Step(
            torch.tensor(incomplete) if any(incomplete) else None, parallel_lanes, set(), Counts(zeros, zeros.clone())
        )

    @property
    def broken(self) -> set[int]:
        """Requests of the step whose KV did not come: what was computed for them is to be thrown away."""
        return self._step.broken

    @property
    def counts(self) -> Counts:
        assert self._step.counts is not None
        return self._step.counts

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
        if self._step.incomplete is not None:
            self._remote.attention_starts(layer)
        if layer < DENSE_LAYERS:
            self._complete(layer, batch)
            return self._kernels.attend(query, entries, batch, scale=scale, window=window)
        self.describe(layer, batch.slots)
        ahead = self._ahead.pop(layer, None) or self._select(layer, query, batch, scale, window)
        reading = ahead if isinstance(ahead, Reading) else self._read(layer, ahead, batch)
        if reading.workspace is None:
            return self._kernels.attend_index(query, self._entries(layer), reading.ids, reading.counts, scale=scale)
        self._await(layer, reading)
        ids = self._places(layer, reading)
        memory = reading.workspace.view(-1, entries.shape[-1])
        result = self._kernels.attend_index(query, memory, ids, reading.counts, scale=scale)
        self._keep(layer, reading)
        return result

    # ---- selecting and splitting

    def _select(self, layer: int, query: Tensor, batch: PagedBatch, scale: float, window: int | None) -> KVIndex:
        index = self._selector.select(layer, query, self._metadata[layer], batch, scale=scale, window=window)
        if self._step.incomplete is not None:
            self.counts.selected += index.counts.view(len(batch.context_len), -1).sum(dim=1)
        return index

    def _read(self, layer: int, index: KVIndex, batch: PagedBatch) -> Reading:
        """Split the index and set both lanes going. The newest entry, last in each row, is in no lane: where the index
        is foreseen it is not computed yet."""
        ids = self._ids(index.positions, batch)
        reading = Reading(ids, index.counts)
        if self._step.incomplete is None:
            return reading
        in_lanes = torch.arange(ids.shape[1]) < index.counts[:, None] - 1
        mask = torch.where(in_lanes, self._states[layer][ids.long()], MASK_ABSENT)
        assert not bool((in_lanes & (mask == MASK_ABSENT)).any()), "a selected KV entry is neither here nor at prefill"
        if not bool((mask == MASK_REMOTE).any()):
            return reading
        split = reading.split = split_index(mask)
        most = int(split.num_remote.max())
        reading.remote_ids = ids.gather(1, split.order[:, :most])
        positions = index.positions.gather(1, split.order[:, :most])
        heads = len(ids) // len(batch.context_len)
        self.counts.fetched += split.num_remote.view(-1, heads).sum(dim=1)
        entries = self._pool[layer]
        row_bytes = ids.shape[1] * entries.shape[-1] * entries.element_size()
        landing = reading.landing = self._landing(layer, (*ids.shape, entries.shape[-1]))
        reading.workspace = torch.empty_like(landing) if self._staged else landing
        if not self._step.parallel_lanes:
            self._gather_local(layer, reading)
        wanted = self._wanted(positions, split.num_remote, heads)
        reading.ticket = self._remote.fetch(layer, wanted, row_bytes)
        if self._step.parallel_lanes:
            self._gather_local(layer, reading)
        return reading

    def _landing(self, layer: int, shape: tuple[int, ...]) -> Tensor:
        """Where answers of this layer land, as entries."""
        dtype = self._pool[layer].dtype
        count = math.prod(shape)
        return torch.frombuffer(self._remote.rows(layer, count * dtype.itemsize), dtype=dtype, count=count).view(shape)

    def _ids(self, positions: Tensor, batch: PagedBatch) -> Tensor:
        """Pool ids [rows, k] int32 of positions [rows, k]; padding gives some valid id."""
        requests = len(batch.context_len)
        heads = len(positions) // requests
        at = positions.clamp(min=0).view(requests, -1)
        pages = batch.page_table.gather(1, (at // batch.page_size).long())
        slots = (pages * batch.page_size + at % batch.page_size).view(requests, heads, -1)
        return (slots * heads + torch.arange(heads, dtype=torch.int32)[:, None]).view(positions.shape)

    @staticmethod
    def _wanted(positions: Tensor, num_remote: Tensor, heads: int) -> list[Wanted]:
        rows, counts = positions.numpy(), num_remote.view(-1, heads).tolist()
        return [
            (r, [rows[r * heads + h, :n].astype(np.int64) for h, n in enumerate(line)])
            for r, line in enumerate(counts)
            if any(line)
        ]

    # ---- the two lanes

    def _gather_local(self, layer: int, reading: Reading) -> None:
        """The local lane: entries that are here, behind the place of those that are not."""
        split = reading.split
        assert split is not None and reading.workspace is not None
        began_s = 0.0 if self._tracer is None else self._tracer.clock()
        columns = torch.arange(reading.ids.shape[1]) + split.num_remote[:, None]
        ids = reading.ids.gather(1, split.order.gather(1, columns.clamp(max=reading.ids.shape[1] - 1)))
        self._kernels.gather(self._entries(layer), ids, split.num_local, reading.workspace, split.num_remote)
        if self._tracer is not None:
            self._tracer.add(GATHER, f"layer {layer}", began_s, layer=layer)

    def _await(self, layer: int, reading: Reading) -> None:
        """Both lanes are complete afterwards, but for requests that are broken."""
        split, workspace, ids = reading.split, reading.workspace, reading.remote_ids
        assert split is not None and workspace is not None and ids is not None and reading.ticket is not None
        broken, delivered = self._remote.wait(reading.ticket)
        if self._staged:
            remote = torch.arange(ids.shape[1]) < split.num_remote[:, None]
            assert reading.landing is not None
            workspace[:, : ids.shape[1]][remote] = reading.landing[:, : ids.shape[1]][remote]
        heads = len(ids) // len(self.counts.selected)
        for request in sorted(delivered):
            rows = slice(request * heads, (request + 1) * heads)
            counts = split.num_remote[rows]
            remote = torch.arange(ids.shape[1]) < counts[:, None]
            if bool((self._states[layer][ids[rows][remote].long()] == MASK_LOCAL).all()):
                self._kernels.gather(self._entries(layer), ids[rows], counts, workspace[rows])
            else:
                self._step.broken.add(request)
        self._step.broken |= broken
        for request in self._step.broken:  # nothing of it is kept
            split.num_remote[request * heads : (request + 1) * heads] = 0

    def _places(self, layer: int, reading: Reading) -> Tensor:
        """Where in the workspace each entry of the index is, the newest entry put there first: ids [rows, k] int32."""
        assert reading.split is not None and reading.workspace is not None
        rows, k = reading.ids.shape
        place = torch.empty_like(reading.split.order)
        place.scatter_(1, reading.split.order, torch.arange(k).expand(rows, k))
        newest = reading.counts.long()[:, None] - 1
        ones, start = torch.ones(rows, dtype=torch.int32), place.gather(1, newest).view(-1).to(torch.int32)
        self._kernels.gather(self._entries(layer), reading.ids.gather(1, newest), ones, reading.workspace, start)
        return (place + torch.arange(rows)[:, None] * k).to(torch.int32)

    def _keep(self, layer: int, reading: Reading) -> None:
        """What was fetched stays: it is in the pool from now on, and never fetched again."""
        split, ids, workspace = reading.split, reading.remote_ids, reading.workspace
        assert split is not None and ids is not None and workspace is not None
        self._kernels.scatter(self._entries(layer), ids, split.num_remote, workspace)
        remote = torch.arange(ids.shape[1]) < split.num_remote[:, None]
        self._states[layer][ids[remote].long()] = MASK_LOCAL

    def _entries(self, layer: int) -> Tensor:
        """The pool of a layer as entries of single KV heads [num_slots * Hkv, E]."""
        return self._pool[layer].view(-1, self._pool[layer].shape[-1])

    def _complete(self, layer: int, batch: PagedBatch) -> None:
        """Fetch all that is missing of a layer which is read whole."""
        if self._step.incomplete is None:
            return
        pool = self._pool[layer]
        heads, lengths = pool.shape[1], batch.context_len
        positions = torch.arange(int(lengths.max()), dtype=torch.int32).expand(len(lengths) * heads, -1)
        counts = lengths.repeat_interleave(heads).to(torch.int32)
        reading = self._read(layer, KVIndex(positions, counts), batch)
        if reading.workspace is not None:
            self._await(layer, reading)
            self._keep(layer, reading)
