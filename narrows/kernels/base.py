"""The contract of the kernels a decoder layer is made of.

Legend: T rows (tokens of all requests of a step), H model width, Hq query heads, Hkv KV heads, D head size,
E = 2*D entry size (K then V), R requests, I feed-forward width.

All tensors are contiguous on the CPU and of the model's dtype (bfloat16 or float32) unless said otherwise. Sums,
softmax and norms run in float32. Nothing here keeps state between calls; weights packed by `pack` belong to the caller.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Which rows of a step belong to which request, and where that request's KV is. All tensors int32.

    Request r owns rows query_start[r]:query_start[r+1]; they are its last tokens, so row i of its n rows has position
    context_len[r] - n + i and sees the positions up to its own. Position p lives in slot
    page_table[r, p // page_size] * page_size + p % page_size.
    """

    query_start: Tensor  # [R + 1]
    context_len: Tensor  # [R], the step's own tokens included
    page_table: Tensor  # [R, most pages of a request]
    slots: Tensor  # [T], where each row's KV is stored
    positions: Tensor  # [T]
    page_size: int
    max_query: int  # most rows of one request: 1 in a decode step
    max_context: int
    # Few rows of much context may be summed in another order than many. A prefill step says False, so that a row gets
    # the same result whether a prompt is computed whole, in chunks or behind a cached prefix.
    is_decode: bool = True


@dataclass(frozen=True, slots=True)
class Located:
    """A KV index as rows of the pool's entries, and its remote part in the same order."""

    ids: Tensor  # [R * Hkv, k] int32, valid as the index is
    num_remote: Tensor  # [R * Hkv] int32
    remote_ids: Tensor  # [R * Hkv, >= most remote] int32, the first num_remote[i] of a row valid
    remote_positions: Tensor  # the same entries' positions
    any_remote: bool


class PackedLinear(Protocol):
    """A weight in the layout its kernels want. Made by Kernels.pack, valid for that object only."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...


class Kernels(Protocol):
    """Each call returns new tensors unless `out` or "in place" is said, and blocks until done."""

    name: str

    def relies_on_torch(self, dtype: torch.dtype) -> bool:
        """Whether products of that type are torch's, so that they need torch's threads. Where they are not, torch is
        better off with one thread: its others spin while they wait, on cores that the kernels' own threads need."""
        ...

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Take over a weight [out, in] and its bias [out]. The result may share the weight's storage."""
        ...

    def narrow(self, weight: PackedLinear, outputs: int) -> PackedLinear:
        """The part of a packed weight that gives its first outputs; shares its memory."""
        ...

    def linear(self, x: Tensor, weight: PackedLinear, *, residual: Tensor | None = None) -> Tensor:
        """x [T, in] times weight, plus bias, to [T, out]. With `residual` [T, out] the sum is added to it in place
        and `residual` is returned."""
        ...

    def gated_linear(self, x: Tensor, gate_up: PackedLinear) -> Tensor:
        """silu(gate) * up to [T, I], where gate_up packs the rows [gate; up], [2*I, in]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dim, times weight."""
        ...

    def rope_store(
        self,
        qkv: Tensor,  # [T, (Hq + 2*Hkv) * D]
        entries: Tensor,  # [num_slots, Hkv, E], written at batch.slots; Hkv 0: there are queries alone
        batch: PagedBatch,
        cos: Tensor,  # [max positions, D / 2] float32
        sin: Tensor,
        *,
        num_heads: int,
        q_norm: Tensor | None,  # [D]: RMS norm per head before the rotation (Qwen3)
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Rotate queries and keys (halves, as Hugging Face lays heads out), store K and V. Returns queries
        [T, Hq, D]."""
        ...

    def attend(
        self,
        query: Tensor,  # [T, Hq, D]
        entries: Tensor,  # [num_slots, Hkv, E]
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None,  # a row sees only the last `window` positions, its own included
    ) -> tuple[Tensor, Tensor]:
        """Causal attention over paged KV. Returns out [T, Hq, D] and lse [T, Hq] float32, natural log.
        A row that sees nothing gives zeros and -inf."""
        ...

    # ---- selected entries

    def top_k(
        self,
        scores: Tensor,  # [rows, n] float32, contiguous; what is not to be chosen is -inf
        num: Tensor,  # [rows] int32: how many of each row, 0 to n
    ) -> Tensor:
        """Positions [rows, max(num)] int32 of each row's largest scores, ascending, then -1. Ties go to the earlier
        position; NaN is not allowed. -inf is chosen only when nothing else is left."""
        ...

    def attend_index(
        self,
        query: Tensor,  # [R, Hq, D]: one row a request
        memory: Tensor,  # [n, E] entries of single KV heads; a pool's entries [num_slots, Hkv, E] viewed as [-1, E]
        ids: Tensor,  # [R * Hkv, k] int32: rows of memory that row r * Hkv + h attends to
        counts: Tensor,  # [R * Hkv] int32: the first counts[i] ids are valid
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attention over selected entries. Returns out [R, Hq, D] in the query's dtype and lse [R, Hq] float32,
        natural log; a row without entries gives zeros and -inf. Sums run in the order of ids, so the same entries in
        the same order give the same bits wherever in memory they lie."""
        ...

    def locate(
        self,
        positions: Tensor,  # [R * Hkv, k] int32: a KV index, ascending in each row, then anything
        counts: Tensor,  # [R * Hkv] int32: the first counts[i] of a row are valid; the last of these is the newest
        batch: PagedBatch,
        states: Tensor | None = None,  # [num_slots * Hkv] int8: 1 what is here, 2 what is remote, 0 what is nowhere
    ) -> Located:
        """Where the entries of a KV index are: SmartGen's Algorithm 1, on entries that stay where they lie. Without
        `states` everything is here. The newest entry is here whatever its state says: it may not be stored yet.
        Raises KernelError when a valid entry is nowhere."""
        ...

    def keep(
        self,
        memory: Tensor,  # [n, E] of any dtype, written
        states: Tensor,  # [n] int8, written
        ids: Tensor,  # [rows, k] int32, no id twice
        counts: Tensor,  # [rows] int32: the first counts[r] ids are valid
        rows: Tensor,  # [rows, K, E] of the same dtype, K at least the largest count
    ) -> None:
        """Copy rows to where they belong, rows[r, i] to memory[ids[r, i]], and then set their states to 1."""
        ...

    def pack_entries(
        self,
        memory: Tensor,  # [n, E] bfloat16, E even
        ids: Tensor,  # [k] int32
        out: Tensor,  # [>= k * (2 * E + 1)] uint8, written
    ) -> int:
        """The entries memory[ids], losslessly in about three quarters of their bytes (csrc/pack.c says how). Returns
        how many bytes of `out` they take."""
        ...

    def keep_packed(
        self,
        memory: Tensor,  # [n, E] bfloat16, written
        states: Tensor,  # [n] int8, written
        ids: Tensor,  # [rows, k] int32, no id twice
        counts: Tensor,  # [rows] int32: the first counts[r] ids are valid
        packed: Tensor,  # [rows, bytes] uint8: of each row what pack_entries made, then anything
    ) -> int | None:
        """As `keep`, of packed entries. Returns the first row that is damaged (its entries end beyond it); of that one
        and of those behind it some entries may not be kept."""
        ...
