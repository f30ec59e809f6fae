"""Scores of paged metadata: what selection algorithms rank positions by.

Legend: R requests (one query each), Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size, n = batch.max_context,
J nibbles of a code, B = J / 2 bytes of a code.

All results are scores [R * Hkv, n] float32 of the positions each row may read: -inf outside begin .. context_len - 1,
+inf at the newest position context_len - 1, whose metadata is not read, and ALWAYS at the first `sinks` positions of
a request. The G queries of a KV head are one score: the sum of their softmax weights over what is scored, which is the
attention mass that a selected entry keeps.
"""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from narrows.errors import KernelError
from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.native import (
    NativeKernels,
    check_head_dim,
    check_like,
    declare,
    describe,
    indices,
    is_bf16,
)

MAX_NIBBLES = 512  # as in csrc/scores.c
ALWAYS = 1e38  # above every softmax weight, below the newest token


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """Codes of so many tokens each, `tokens_per_row / tokens_per_code` of them in a row of one KV head."""

    tokens_per_row: int = 1
    tokens_per_code: int = 1


TOKENS = CodeLayout()


class Scores(Protocol):
    """The contract; a twin in torch and one in C."""

    def keys(
        self,
        query: Tensor,  # [R, Hq, D]
        metadata: Tensor,  # [num_slots, Hkv, D * itemsize] uint8: the keys themselves, of the query's dtype
        batch: PagedBatch,
        begin: Tensor,  # [R] int32
        *,
        scale: float,
    ) -> Tensor:
        """By q.k, without sinks."""
        ...

    def codes(
        self,
        tables: Tensor,  # [R, Hq, J, 16] float32: what a nibble of a code adds to its score (scale included)
        metadata: Tensor,  # [num_rows, Hkv, codes of a row * B] uint8; nibble 2b is the low half of byte b
        layout: CodeLayout,
        batch: PagedBatch,
        begin: Tensor,  # [R] int32
        *,
        sinks: int,
        alpha: float,
    ) -> tuple[Tensor, Tensor]:
        """By the sum of table entries that a code's nibbles name. Also counts [R, Hq] int32: scored positions whose
        own sum is at most alpha below the query's largest."""
        ...


def locate(batch: PagedBatch) -> Tensor:
    """[R, n] int64: the slot of every position; meaningless past a request's end."""
    at = torch.arange(batch.max_context)
    pages = batch.page_table.long()[:, (at // batch.page_size).clamp(max=batch.page_table.shape[1] - 1)]
    return pages * batch.page_size + at % batch.page_size


def rank(scores: Tensor, batch: PagedBatch, begin: Tensor, sinks: int) -> tuple[Tensor, Tensor]:
    """Scores per query [R, Hkv, G, n] to scores per row [R * Hkv, n]. Also the former, -inf where nothing is scored."""
    at = torch.arange(scores.shape[3])
    seen = (at >= begin[:, None]) & (at < batch.context_len[:, None] - 1)  # [R, n]
    scored = seen & (at >= sinks)
    scores = scores.masked_fill(~scored[:, None, None], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(peak.isinf(), 0.0, peak))
    total = weights.sum(-1, keepdim=True)
    mass = (weights / torch.where(total == 0, 1.0, total)).sum(2)  # [R, Hkv, n]
    mass = torch.where(scored[:, None], mass, torch.where(seen, ALWAYS, float("-inf"))[:, None])
    newest = (batch.context_len.long() - 1)[:, None, None].expand(-1, mass.shape[1], 1)
    return mass.scatter(2, newest, float("inf")).flatten(0, 1), scores


class PlainScores:
    """In torch."""

    def keys(self, query: Tensor, metadata: Tensor, batch: PagedBatch, begin: Tensor, *, scale: float) -> Tensor:
        requests, _, head_dim = query.shape
        key = metadata.view(query.dtype)[locate(batch)].float()  # [R, n, Hkv, D]
        grouped = query.float().view(requests, metadata.shape[1], -1, head_dim)
        return rank(torch.einsum("rhgd,rnhd->rhgn", grouped, key) * scale, batch, begin, 0)[0]

    def codes(
        self,
        tables: Tensor,
        metadata: Tensor,
        layout: CodeLayout,
        batch: PagedBatch,
        begin: Tensor,
        *,
        sinks: int,
        alpha: float,
    ) -> tuple[Tensor, Tensor]:
        requests, _, nibbles, _ = tables.shape
        num_kv_heads = metadata.shape[1]
        grouped = tables.view(requests, num_kv_heads, -1, nibbles, 16)
        slots = locate(batch)
        row, within = slots // layout.tokens_per_row, slots % layout.tokens_per_row // layout.tokens_per_code
        code = torch.unflatten(metadata, 2, (-1, nibbles // 2)).transpose(1, 2)[row, within].long()  # [R, n, Hkv, B]
        scores = torch.zeros(*grouped.shape[:3], batch.max_context)
        for nibble in range(nibbles):
            value = code[..., nibble // 2] >> nibble % 2 * 4 & 15  # [R, n, Hkv]
            value = value.permute(0, 2, 1)[:, :, None].expand_as(scores)
            scores += grouped[:, :, :, nibble].gather(3, value)
        mass, scores = rank(scores, batch, begin, sinks)
        close = (scores >= scores.amax(-1, keepdim=True) - alpha) & ~scores.isinf()
        return mass, close.sum(-1).to(torch.int32).flatten(1)


class NativeScores:
    """In C (csrc/scores.c), with the threads of the kernels. Keeps its scratch, so not for two threads at once.

    Tables are rounded to 16 bits: a score is off by at most J / 131070 of what its query's scores can span.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        self._call = declare(kernels.library, "narrows_scores", "p" * 5 + "l" + "ppp" + "l" * 10 + "ffi" + "plp")
        self._call.restype = ctypes.c_long
        self._crew = kernels.crew
        self._kernels = kernels  # the crew lives as long
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def keys(self, query: Tensor, metadata: Tensor, batch: PagedBatch, begin: Tensor, *, scale: float) -> Tensor:
        check_like("query", query, query)
        head_dim = query.shape[2]
        check_head_dim(head_dim)
        if metadata.shape[2] != head_dim * query.element_size():
            raise KernelError(f"metadata: want keys of {head_dim} {query.dtype}, got {describe(metadata)}")
        return self._run(None, query, head_dim, metadata, TOKENS, batch, begin, 0, 0.0, scale)[0]

    def codes(
        self,
        tables: Tensor,
        metadata: Tensor,
        layout: CodeLayout,
        batch: PagedBatch,
        begin: Tensor,
        *,
        sinks: int,
        alpha: float,
    ) -> tuple[Tensor, Tensor]:
        nibbles = tables.shape[2]
        if tables.dtype is not torch.float32 or not tables.is_contiguous() or tables.shape[3] != 16:
            raise KernelError(f"tables: want contiguous float32 [requests, heads, nibbles, 16], got {describe(tables)}")
        if nibbles % 2 or not 0 < nibbles <= MAX_NIBBLES:
            raise KernelError(f"tables: {nibbles} nibbles of a code; native kernels know even numbers to {MAX_NIBBLES}")
        if metadata.shape[2] * layout.tokens_per_code != layout.tokens_per_row * nibbles // 2:
            raise KernelError(f"metadata: no rows of codes of {nibbles} nibbles in {layout}: {describe(metadata)}")
        if layout.tokens_per_row not in (1, batch.page_size):
            raise KernelError(f"layout: rows are of one token or of a page of {batch.page_size}, not as {layout}")
        return self._run(tables, tables, nibbles, metadata, layout, batch, begin, sinks, alpha, 1.0)

    def _run(
        self,
        tables: Tensor | None,
        query: Tensor,
        size: int,
        metadata: Tensor,
        layout: CodeLayout,
        batch: PagedBatch,
        begin: Tensor,
        sinks: int,
        alpha: float,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        (requests, num_heads), num_kv_heads = query.shape[:2], metadata.shape[1]
        if metadata.dtype is not torch.uint8 or not metadata.is_contiguous() or num_heads % num_kv_heads:
            raise KernelError(f"metadata: want contiguous uint8 [rows, KV heads, bytes], got {describe(metadata)}")
        scores = torch.empty((requests * num_kv_heads, batch.max_context), dtype=torch.float32)
        close = torch.empty((requests, num_heads), dtype=torch.int32)
        context_len = indices("context_len", batch.context_len, requests)
        page_table = indices("page_table", batch.page_table, batch.page_table.numel())
        begins = indices("begin", begin, requests)
        while needed := self._call(
            scores.data_ptr(),
            close.data_ptr(),
            0 if tables is None else tables.data_ptr(),
            query.data_ptr(),
            metadata.data_ptr(),
            metadata.numel(),
            context_len,
            page_table,
            begins,
            requests,
            batch.page_table.shape[1],
            batch.page_size,
            num_heads // num_kv_heads,
            num_kv_heads,
            size,
            layout.tokens_per_row,
            layout.tokens_per_code,
            batch.max_context,
            sinks,
            alpha,
            scale,
            is_bf16(query),
            self._scratch.data_ptr(),
            self._scratch.numel(),
            self._crew,
        ):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return scores, close


def open_scores(kernels: Kernels) -> Scores:
    """Scores that go with these kernels: in C where they are."""
    return NativeScores(kernels) if isinstance(kernels, NativeKernels) else PlainScores()
