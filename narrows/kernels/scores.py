"""Metadata of paged keys and scores by it: what selection algorithms are made of.

Legend: R requests (one query each), Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size, E = 2*D, T tokens,
n = batch.max_context, J nibbles of a code, m projections of a key.
"""

import ctypes
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from narrows.errors import KernelError
from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.native import NativeKernels, check_head_dim, check_like, declare, describe, indices, is_bf16

MAX_NIBBLES = 512  # as in csrc/scores.c
ALWAYS = 1e38  # above every softmax weight, below the newest token
ROUNDING = 1e-9  # 0.7 * 10 is a little more than 7 in binary, and must not become 8


@dataclass(frozen=True, slots=True)
class CodeLayout:
    """Codes of so many tokens each, `tokens_per_row / tokens_per_code` of them in a row of one KV head."""

    tokens_per_row: int = 1  # or a page
    tokens_per_code: int = 1


@dataclass(frozen=True, slots=True)
class Budget:
    """How many of its n positions a request may read: ceil(ratio * n), at least 1, none before the last `window`."""

    ratio: float
    window: int | None = None
    sinks: int = 0  # first positions that are read whatever they score
    # With a ratio below 1, no more than the newest, the sinks, and those whose score is at most alpha below their
    # query's largest: their number, the mean over a KV head's queries, the most of any KV head, rounded up.
    alpha: float = float("inf")


TOKENS = CodeLayout()


class Scores(Protocol):
    """The contract; a twin in torch and one in C.

    Scores are [R * Hkv, n] float32: of a row's positions, -inf outside the window and past the request, +inf at the
    newest position, whose metadata is not read, and ALWAYS at sinks. The G queries of a KV head are one score: the sum
    of their softmax weights over what is scored, which is the attention mass that a selected entry keeps. With them
    comes how many each row may read, [R * Hkv] int32. Results of a request do not depend on the others.
    """

    def keys(
        self,
        query: Tensor,  # [R, Hq, D]
        metadata: Tensor,  # [num_slots, Hkv, D * itemsize] uint8: the keys themselves, of the query's dtype
        batch: PagedBatch,
        budget: Budget,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Scores by q.k. There are no sinks and no alpha."""
        ...

    def codes(
        self,
        query: Tensor,  # [R, Hq, D]
        decode: Tensor,  # [Hkv, D, J * 16] or [Hkv, 2, D, 16], float32
        metadata: Tensor,  # [num_rows, Hkv, codes of a row * J / 2] uint8; nibble 2b is the low half of byte b
        layout: CodeLayout,
        batch: PagedBatch,
        budget: Budget,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Scores by what a code's nibbles add up to: `query @ decode` says it for each nibble and value; or each
        nibble is of one coordinate, and it is q * decode[:, 0] + |q| * decode[:, 1]."""
        ...

    def encode(
        self,
        entries: Tensor,  # [num_slots, Hkv, E]
        slots: Tensor,  # [T] int32
        encode: Tensor,  # [Hkv, D, m] float32
        bias: Tensor,  # [Hkv, 1, m] float32
        metadata: Tensor,  # [num_slots, Hkv, bytes of a code] uint8, written
        *,
        signs: bool,
    ) -> None:
        """Codes of keys by key @ encode + bias: the signs of m projections are bits, or the largest of every 16
        is a nibble."""
        ...

    def bounds(
        self,
        entries: Tensor,
        slots: Tensor,  # [T] int32, those of a page in order
        edges: Tensor,  # [Hkv, 2, 3, D] float32, ascending
        metadata: Tensor,  # [num_pages, Hkv, runs of a page * D / 2] uint8, written
        *,
        page_size: int,
        span: int,  # tokens of a run; divides page_size
    ) -> None:
        """Bounds of runs of keys, a nibble for each coordinate: how many of the three lower edges the run's smallest
        value is above (low two bits), and of the upper ones its largest. A run begins anew with its first slot."""
        ...


def open_scores(kernels: Kernels) -> Scores:
    """Scores that go with these kernels: in C where they are."""
    return NativeScores(kernels) if isinstance(kernels, NativeKernels) else PlainScores()


# ---- in torch


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """[..., J] of 0..15 to [..., J / 2] uint8."""
    packed: Tensor = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return packed.byte()


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., J / 2] uint8 to [..., J] of 0..15."""
    return (packed[..., None] >> packed.new_tensor([0, 4]) & 15).flatten(-2)


def locate(batch: PagedBatch) -> Tensor:
    """[R, n] int64: the slot of every position; meaningless past a request's end."""
    at = torch.arange(batch.max_context)
    pages = batch.page_table.long()[:, (at // batch.page_size).clamp(max=batch.page_table.shape[1] - 1)]
    return pages * batch.page_size + at % batch.page_size


def rank(scores: Tensor, batch: PagedBatch, budget: Budget) -> tuple[Tensor, Tensor]:
    """Scores per query [R, Hkv, G, n] to scores and numbers per row."""
    at, length = torch.arange(scores.shape[3]), batch.context_len
    begin = torch.zeros_like(length) if budget.window is None else (length - budget.window).clamp(min=0)
    seen = (at >= begin[:, None]) & (at < length[:, None] - 1)  # [R, n]
    scored = seen & (at >= budget.sinks)
    scores = scores.masked_fill(~scored[:, None, None], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(peak.isinf(), 0.0, peak))
    total = weights.sum(-1, keepdim=True)
    mass = (weights / torch.where(total == 0, 1.0, total)).sum(2)  # [R, Hkv, n]
    mass = torch.where(scored[:, None], mass, torch.where(seen, ALWAYS, float("-inf"))[:, None])
    newest = (length.long() - 1)[:, None, None].expand(-1, mass.shape[1], 1)
    num = (length.double() * budget.ratio - ROUNDING).ceil().int().clamp(min=1).minimum(length - begin)
    if budget.ratio < 1.0 and budget.alpha < float("inf"):
        close = ((scores >= peak - budget.alpha) & ~scores.isinf()).sum(-1)  # [R, Hkv, G]
        num = num.minimum(1 + budget.sinks + close.double().mean(2).amax(1).ceil().int())
    return mass.scatter(2, newest, float("inf")).flatten(0, 1), num.repeat_interleave(mass.shape[1])


class PlainScores:
    """In torch."""

    def keys(
        self, query: Tensor, metadata: Tensor, batch: PagedBatch, budget: Budget, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        key = metadata.view(query.dtype)[locate(batch)].float()  # [R, n, Hkv, D]
        grouped = torch.unflatten(query.float(), 1, (metadata.shape[1], -1))
        return rank(torch.einsum("rhgd,rnhd->rhgn", grouped, key) * scale, batch, budget)

    def codes(
        self,
        query: Tensor,
        decode: Tensor,
        metadata: Tensor,
        layout: CodeLayout,
        batch: PagedBatch,
        budget: Budget,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        grouped = torch.unflatten(query.float(), 1, (metadata.shape[1], -1)) * scale  # [R, Hkv, G, D]
        if decode.dim() == 3:
            tables = torch.unflatten(grouped @ decode, 3, (-1, 16))  # [R, Hkv, G, J, 16]
        else:
            value, magnitude = decode[:, None].unbind(2)
            tables = grouped[..., None] * value + grouped.abs()[..., None] * magnitude
        slots = locate(batch)
        row, within = slots // layout.tokens_per_row, slots % layout.tokens_per_row // layout.tokens_per_code
        code = torch.unflatten(metadata, 2, (-1, tables.shape[3] // 2)).transpose(1, 2)[row, within]
        nibbles = unpack_nibbles(code).long().permute(0, 2, 3, 1)[:, :, None]  # [R, Hkv, 1, J, n]
        scores = torch.zeros(*grouped.shape[:3], batch.max_context)
        for nibble in range(tables.shape[3]):
            scores += tables[:, :, :, nibble].gather(3, nibbles[:, :, :, nibble].expand_as(scores))
        return rank(scores, batch, budget)

    def encode(
        self, entries: Tensor, slots: Tensor, encode: Tensor, bias: Tensor, metadata: Tensor, *, signs: bool
    ) -> None:
        at = slots.long()
        key = entries[at, :, : entries.shape[2] // 2].float().transpose(0, 1)  # [Hkv, T, D]
        projected = key @ encode + bias
        if signs:
            nibbles = (torch.unflatten((projected > 0).long(), 2, (-1, 4)) << torch.arange(4)).sum(3)
        else:
            nibbles = torch.unflatten(projected, 2, (-1, 16)).argmax(3)
        metadata[at] = pack_nibbles(nibbles).transpose(0, 1)

    def bounds(
        self, entries: Tensor, slots: Tensor, edges: Tensor, metadata: Tensor, *, page_size: int, span: int
    ) -> None:
        if not len(slots):
            return
        at = slots.long()
        key = entries[at, :, : entries.shape[2] // 2].float()  # [T, Hkv, D]
        levels = (key[:, :, None, None] > edges).sum(3)  # [T, Hkv, 2, D]
        runs, which = torch.unique(at // span, return_inverse=True)
        page, within = runs // (page_size // span), runs % (page_size // span)
        codes = torch.unflatten(metadata, 2, (page_size // span, -1)).transpose(1, 2)  # [pages, runs, Hkv, D / 2]
        old = unpack_nibbles(codes[page, within]).long()
        fresh = torch.zeros(len(runs), dtype=torch.bool).index_fill_(0, which[at % span == 0], True)
        old = torch.where(fresh[:, None, None], 3, old)  # the empty run: lowest of all, and highest of none
        where = which[:, None, None].expand(-1, *old.shape[1:])
        low = (old & 3).scatter_reduce(0, where, levels[:, :, 0], "amin")
        high = (old >> 2).scatter_reduce(0, where, levels[:, :, 1], "amax")
        codes[page, within] = pack_nibbles(low | high << 2)


# ---- in C


class NativeScores:
    """In C (csrc/scores.c, csrc/describe.c), with the threads of the kernels. Keeps its scratch, so not for two threads
    at once.

    What nibbles add is rounded to 16 bits: a score is off by at most J / 131070 of what its query's scores can span.
    """

    def __init__(self, kernels: NativeKernels) -> None:
        library = kernels.library
        self._scores = declare(library, "narrows_scores", "ppppi" + "plpp" + "l" * 12 + "dff" + "ipl" + "p")
        self._scores.restype = ctypes.c_long
        self._encode = declare(library, "narrows_encode", "ppppp" + "llll" + "iip")
        self._bounds = declare(library, "narrows_bounds", "pppp" + "lllll" + "ip")
        self._crew = kernels.crew
        self._kernels = kernels  # the crew lives as long
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def keys(
        self, query: Tensor, metadata: Tensor, batch: PagedBatch, budget: Budget, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        head_dim = query.shape[2]
        check_head_dim(head_dim)
        if metadata.shape[2] != head_dim * query.element_size():
            raise KernelError(f"metadata: want keys of {head_dim} {query.dtype}, got {describe(metadata)}")
        return self._run(query, None, head_dim, metadata, TOKENS, batch, budget, scale)

    def codes(
        self,
        query: Tensor,
        decode: Tensor,
        metadata: Tensor,
        layout: CodeLayout,
        batch: PagedBatch,
        budget: Budget,
        *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        nibbles = decode.shape[2] // (16 if decode.dim() == 3 else 1)
        wanted: tuple[int, ...] = (metadata.shape[1], query.shape[2], nibbles * 16)
        if decode.dim() == 4:
            wanted = (metadata.shape[1], 2, query.shape[2], 16)
        check_float("decode", decode, wanted)
        if nibbles % 2 or not 0 < nibbles <= MAX_NIBBLES:
            raise KernelError(f"decode: {nibbles} nibbles of a code; native kernels know even numbers to {MAX_NIBBLES}")
        if metadata.shape[2] * layout.tokens_per_code != layout.tokens_per_row * nibbles // 2:
            raise KernelError(f"metadata: no rows of codes of {nibbles} nibbles in {layout}: {describe(metadata)}")
        if layout.tokens_per_row not in (1, batch.page_size):
            raise KernelError(f"layout: rows are of one token or of a page of {batch.page_size}, not as {layout}")
        return self._run(query, decode, nibbles, metadata, layout, batch, budget, scale)

    def _run(
        self,
        query: Tensor,
        decode: Tensor | None,
        size: int,
        metadata: Tensor,
        layout: CodeLayout,
        batch: PagedBatch,
        budget: Budget,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        check_like("query", query, query)
        (requests, num_heads, head_dim), num_kv_heads = query.shape, metadata.shape[1]
        check_metadata(metadata)
        if num_heads % num_kv_heads:
            raise KernelError(f"query: {num_heads} heads are no multiple of the {num_kv_heads} KV heads of metadata")
        scores = torch.empty((requests * num_kv_heads, batch.max_context), dtype=torch.float32)
        num = torch.empty(requests * num_kv_heads, dtype=torch.int32)
        arguments = (
            scores.data_ptr(),
            num.data_ptr(),
            query.data_ptr(),
            0 if decode is None else decode.data_ptr(),
            decode is not None and decode.dim() == 4,
            metadata.data_ptr(),
            metadata.numel(),
            indices("context_len", batch.context_len, requests),
            indices("page_table", batch.page_table, batch.page_table.numel()),
            requests,
            batch.page_table.shape[1],
            batch.page_size,
            num_heads // num_kv_heads,
            num_kv_heads,
            head_dim,
            size,
            layout.tokens_per_row,
            layout.tokens_per_code,
            batch.max_context,
            budget.sinks,
            budget.window or 0,
            budget.ratio,
            budget.alpha,
            scale,
            is_bf16(query),
        )
        while needed := self._scores(*arguments, self._scratch.data_ptr(), self._scratch.numel(), self._crew):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return scores, num

    def encode(
        self, entries: Tensor, slots: Tensor, encode: Tensor, bias: Tensor, metadata: Tensor, *, signs: bool
    ) -> None:
        num_slots, num_kv_heads, head_dim = check_entries(entries)
        width = encode.shape[2]
        check_float("encode", encode, (num_kv_heads, head_dim, width))
        check_float("bias", bias, (num_kv_heads, 1, width))
        check_metadata(metadata, (num_slots, num_kv_heads, width // (8 if signs else 32)))
        if width % (16 if signs else 32):
            raise KernelError(f"encode: {width} projections do not fill bytes of a code")
        self._encode(
            metadata.data_ptr(),
            entries.data_ptr(),
            indices("slots", slots, len(slots)),
            encode.data_ptr(),
            bias.data_ptr(),
            len(slots),
            num_kv_heads,
            head_dim,
            width,
            is_bf16(entries),
            signs,
            self._crew,
        )

    def bounds(
        self, entries: Tensor, slots: Tensor, edges: Tensor, metadata: Tensor, *, page_size: int, span: int
    ) -> None:
        num_slots, num_kv_heads, head_dim = check_entries(entries)
        check_float("edges", edges, (num_kv_heads, 2, 3, head_dim))
        check_metadata(metadata, (num_slots // page_size, num_kv_heads, page_size // span * head_dim // 2))
        self._bounds(
            metadata.data_ptr(),
            entries.data_ptr(),
            indices("slots", slots, len(slots)),
            edges.data_ptr(),
            len(slots),
            num_kv_heads,
            head_dim,
            page_size,
            span,
            is_bf16(entries),
            self._crew,
        )


def check_float(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if x.dtype is not torch.float32 or x.shape != shape or not x.is_contiguous():
        raise KernelError(f"{name}: want contiguous float32 {list(shape)}, got {describe(x)}")


def check_metadata(x: Tensor, shape: tuple[int, ...] | None = None) -> None:
    if x.dtype is not torch.uint8 or not x.is_contiguous() or (shape is not None and x.shape != shape):
        raise KernelError(f"metadata: want contiguous uint8 {list(shape or x.shape)}, got {describe(x)}")


def check_entries(entries: Tensor) -> tuple[int, int, int]:
    """Slots, KV heads and head size."""
    check_like("entries", entries, entries)
    num_slots, num_kv_heads, entry_dim = entries.shape
    check_head_dim(entry_dim // 2)
    return num_slots, num_kv_heads, entry_dim // 2
