"""Scores in C against the same in torch, over layouts, lengths, threads and instruction sets."""

import math

import pytest
import torch

from narrows.errors import KernelError
from narrows.kernels.base import PagedBatch
from narrows.kernels.build import build, load_library, native_flag
from narrows.kernels.native import NativeKernels
from narrows.kernels.reference import ReferenceKernels
from narrows.kernels.scores import ALWAYS, CodeLayout, NativeScores, PlainScores, open_scores

BASELINE = ["-march=x86-64"] if native_flag() == "-march=native" else []
FLAGS = {"native": [], "generic": [*BASELINE, "-DNARROWS_GENERIC", "-O1"]}


@pytest.fixture(scope="module", params=[(name, threads) for name in FLAGS for threads in (1, 3)], ids=str)
def native(request: pytest.FixtureRequest) -> NativeScores:
    flags, threads = request.param
    return NativeScores(NativeKernels(threads, load_library(build(FLAGS[flags]))))


def paged(lengths: list[int], page_size: int) -> tuple[PagedBatch, int]:
    """Requests in pages of a shuffled order, and the number of pages."""
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    start = 0
    for line, count in zip(table, pages, strict=True):
        line[:count] = order[start : start + count]
        start += count
    length = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    return PagedBatch(starts, length, table, length - 1, length - 1, page_size, 1, max(lengths)), sum(pages)


CASES = {
    # lengths, page size, nibbles, layout, KV heads, group
    "tokens": ([1, 2, 5, 6, 700, 5000], 32, 12, CodeLayout(), 3, 3),
    "one head": ([33, 1, 1030], 16, 32, CodeLayout(), 1, 1),
    "odd bytes": ([600, 7], 16, 10, CodeLayout(), 2, 2),
    "runs of a page": ([33, 1, 2000, 8], 32, 64, CodeLayout(32, 8), 3, 3),
    "whole pages": ([1000, 1, 9], 8, 4, CodeLayout(8, 8), 1, 9),
}


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("alpha", [5.0, math.inf])
@pytest.mark.parametrize("case", CASES)
def test_codes(native: NativeScores, case: str, alpha: float, window: int | None) -> None:
    lengths, page_size, nibbles, layout, num_kv_heads, group = CASES[case]
    batch, pages = paged(lengths, page_size)
    random = torch.Generator().manual_seed(2)
    rows = pages * page_size // layout.tokens_per_row
    row_bytes = layout.tokens_per_row // layout.tokens_per_code * nibbles // 2
    metadata = torch.randint(0, 256, (rows, num_kv_heads, row_bytes), dtype=torch.uint8, generator=random)
    tables = torch.randn(len(lengths), num_kv_heads * group, nibbles, 16, generator=random)
    begin = torch.zeros_like(batch.context_len) if window is None else (batch.context_len - window).clamp(min=0)
    ours, close = native.codes(tables, metadata, layout, batch, begin, sinks=4, alpha=alpha)
    wanted, counts = PlainScores().codes(tables, metadata, layout, batch, begin, sinks=4, alpha=alpha)
    assert torch.equal(ours.isinf(), wanted.isinf()) and torch.equal(ours == ALWAYS, wanted == ALWAYS)
    # A score is off by at most J / 2 steps at either end of a ratio of weights.
    span = float((tables.amax(3) - tables.amin(3)).sum(2).max())
    finite = ~wanted.isinf()
    torch.testing.assert_close(ours[finite], wanted[finite], rtol=1.01 * nibbles * span / 65000 + 1e-5, atol=1e-7)
    near = layout.tokens_per_code * 2  # that lie where rounding may move them over the bound
    assert (close - counts).abs().max() <= (0 if alpha == math.inf else near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_keys(native: NativeScores, dtype: torch.dtype, head_dim: int) -> None:
    batch, pages = paged([1, 2, 33, 1500], 16)
    random = torch.Generator().manual_seed(3)
    query = torch.randn(4, 6, head_dim, generator=random).to(dtype)
    key = torch.randn(pages * 16, 2, head_dim, generator=random).to(dtype)
    begin = torch.tensor([0, 0, 3, 700], dtype=torch.int32)
    ours = native.keys(query, key.view(torch.uint8), batch, begin, scale=0.2)
    wanted = PlainScores().keys(query, key.view(torch.uint8), batch, begin, scale=0.2)
    assert torch.equal(ours.isinf(), wanted.isinf())
    finite = ~wanted.isinf()
    torch.testing.assert_close(ours[finite], wanted[finite], rtol=1e-4, atol=1e-7)


def test_scores_are_softmax_weights_by_hand() -> None:
    """Two queries of one KV head, three scored positions: weights 1/4, 1/4, 1/2 and 1/3, 1/3, 1/3."""
    batch, _ = paged([8], 8)
    tables = torch.zeros(1, 2, 2, 16)
    tables[0, 0, 1, 3] = math.log(2.0)
    metadata = torch.zeros(8, 1, 1, dtype=torch.uint8)
    metadata[6] = 3 << 4
    begin = torch.zeros(1, dtype=torch.int32)
    wanted = [ALWAYS] * 4 + [1 / 4 + 1 / 3, 1 / 4 + 1 / 3, 1 / 2 + 1 / 3, math.inf]
    for scores in (PlainScores(), NativeScores(NativeKernels(1))):
        found, close = scores.codes(tables, metadata, CodeLayout(), batch, begin, sinks=4, alpha=0.5)
        torch.testing.assert_close(found, torch.tensor([wanted]), rtol=1e-4, atol=0)
        assert close.tolist() == [[1, 3]]


def test_broken_numbers_do_not_become_nan(native: NativeScores) -> None:
    """A model that computes NaN is told so by its logits; selection goes on."""
    batch, pages = paged([100], 16)
    tables = torch.full((1, 2, 4, 16), math.nan)
    metadata = torch.zeros(pages * 16, 1, 2, dtype=torch.uint8)
    begin = torch.zeros(1, dtype=torch.int32)
    scores, _ = native.codes(tables, metadata, CodeLayout(), batch, begin, sinks=4, alpha=5.0)
    assert not scores.isnan().any()


def test_what_does_not_fit_is_refused(native: NativeScores) -> None:
    batch, pages = paged([100], 16)
    begin = torch.zeros(1, dtype=torch.int32)
    tables, metadata = torch.zeros(1, 2, 4, 16), torch.zeros(pages * 16, 1, 2, dtype=torch.uint8)

    def refused(what: str, **other: object) -> None:
        given = {"tables": tables, "metadata": metadata, "layout": CodeLayout(), "batch": batch, "begin": begin}
        with pytest.raises(KernelError, match=what):
            native.codes(**(given | other), sinks=4, alpha=5.0)  # type: ignore[arg-type]

    refused("tables", tables=tables.double())
    refused("tables", tables=tables[..., :8])
    refused("nibbles", tables=torch.zeros(1, 2, 3, 16))
    refused("metadata", tables=torch.zeros(1, 2, 6, 16))
    refused("metadata", metadata=metadata.int())
    refused("layout", layout=CodeLayout(8, 8), tables=torch.zeros(1, 2, 4, 16))
    refused("begin", begin=begin.long())
    with pytest.raises(KernelError, match="metadata"):
        native.keys(torch.zeros(1, 2, 16), metadata, batch, begin, scale=1.0)


def test_scores_go_with_the_kernels() -> None:
    assert isinstance(open_scores(ReferenceKernels()), PlainScores)
    assert isinstance(open_scores(NativeKernels(1)), NativeScores)
