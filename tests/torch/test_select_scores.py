"""Scores in C against the same in torch, over layouts, lengths, threads and instruction sets."""

import math

import pytest
import torch
from torch import Tensor

from narrows.errors import KernelError
from narrows.kernels.base import PagedBatch
from narrows.kernels.build import build, load_library, native_flag
from narrows.kernels.native import NativeKernels
from narrows.kernels.reference import ReferenceKernels
from narrows.kernels.scores import ALWAYS, Budget, CodeLayout, NativeScores, PlainScores, open_scores

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
@pytest.mark.parametrize("by_coordinate", [False, True])
def test_codes(native: NativeScores, case: str, alpha: float, window: int | None, by_coordinate: bool) -> None:
    lengths, page_size, nibbles, layout, num_kv_heads, group = CASES[case]
    batch, pages = paged(lengths, page_size)
    random = torch.Generator().manual_seed(2)
    rows = pages * page_size // layout.tokens_per_row
    row_bytes = layout.tokens_per_row // layout.tokens_per_code * nibbles // 2
    metadata = torch.randint(0, 256, (rows, num_kv_heads, row_bytes), dtype=torch.uint8, generator=random)
    head_dim = nibbles if by_coordinate else 16
    size = (num_kv_heads, 2, head_dim, 16) if by_coordinate else (num_kv_heads, head_dim, nibbles * 16)
    decode = torch.randn(size, generator=random)
    query = torch.randn(len(lengths), num_kv_heads * group, head_dim, generator=random)
    scale = 1.0 if by_coordinate else 0.25
    budget = Budget(0.3, window, 4, alpha)
    ours, num = native.codes(query, decode, metadata, layout, batch, budget, scale=scale)
    wanted, wanted_num = PlainScores().codes(query, decode, metadata, layout, batch, budget, scale=scale)
    assert torch.equal(ours.isinf(), wanted.isinf()) and torch.equal(ours == ALWAYS, wanted == ALWAYS)
    # Scores span less than 10 of their standard deviations for each nibble; they are off by J / 2 of 65535 steps.
    finite = ~wanted.isinf()
    torch.testing.assert_close(ours[finite], wanted[finite], rtol=10 * nibbles**2 / 65000 + 1e-5, atol=1e-7)
    near = 2 * layout.tokens_per_code  # that lie where rounding may move them over the bound
    assert (num - wanted_num).abs().max() <= (0 if alpha == math.inf else near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_keys(native: NativeScores, dtype: torch.dtype, head_dim: int) -> None:
    batch, pages = paged([1, 2, 33, 1500], 16)
    random = torch.Generator().manual_seed(3)
    query = torch.randn(4, 6, head_dim, generator=random).to(dtype)
    key = torch.randn(pages * 16, 2, head_dim, generator=random).to(dtype)
    for budget in (Budget(0.2), Budget(1.0, 800)):
        ours, num = native.keys(query, key.view(torch.uint8), batch, budget, scale=0.2)
        wanted, wanted_num = PlainScores().keys(query, key.view(torch.uint8), batch, budget, scale=0.2)
        assert torch.equal(ours.isinf(), wanted.isinf()) and torch.equal(num, wanted_num)
        finite = ~wanted.isinf()
        torch.testing.assert_close(ours[finite], wanted[finite], rtol=1e-4, atol=1e-7)


def test_scores_are_softmax_weights_by_hand() -> None:
    """Two queries of one KV head, three scored positions: weights 1/4, 1/4, 1/2 and 1/3, 1/3, 1/3. One of the first
    and all of the second are within 0.5 of the largest: two on average, beside four sinks and the newest."""
    batch, _ = paged([8], 8)
    decode = torch.zeros(1, 2, 32)
    decode[0, 0, 16 + 3] = math.log(2.0)
    query = torch.tensor([[[2.0, 0.0], [0.0, 9.0]]])
    metadata = torch.zeros(8, 1, 1, dtype=torch.uint8)
    metadata[6] = 3 << 4
    wanted = [ALWAYS] * 4 + [1 / 4 + 1 / 3, 1 / 4 + 1 / 3, 1 / 2 + 1 / 3, math.inf]
    for scores in (PlainScores(), NativeScores(NativeKernels(1))):
        for ratio, expected in ((0.99, 7), (0.5, 4), (1.0, 8)):
            budget = Budget(ratio, None, 4, 0.5)
            found, num = scores.codes(query, decode, metadata, CodeLayout(), batch, budget, scale=0.5)
            torch.testing.assert_close(found, torch.tensor([wanted]), rtol=1e-4, atol=0)
            assert num.tolist() == [expected]


def test_a_part_is_rounded_up_but_for_what_binary_adds() -> None:
    batch, pages = paged([10, 11, 1, 30], 16)
    metadata = torch.zeros(pages * 16, 1, 64, dtype=torch.uint8)
    for scores in (PlainScores(), NativeScores(NativeKernels(1))):
        for ratio, expected in ((0.7, [7, 8, 1, 21]), (0.1, [1, 2, 1, 3])):
            assert scores.keys(torch.zeros(4, 1, 16), metadata, batch, Budget(ratio), scale=1.0)[1].tolist() == expected


def test_broken_numbers_do_not_become_nan(native: NativeScores) -> None:
    """A model that computes NaN is told so by its logits; selection goes on."""
    batch, pages = paged([100], 16)
    metadata = torch.zeros(pages * 16, 1, 2, dtype=torch.uint8)
    query = torch.full((1, 2, 16), math.nan)
    budget = Budget(0.2, None, 4, 5.0)
    scores, _ = native.codes(query, torch.ones(1, 16, 64), metadata, CodeLayout(), batch, budget, scale=1.0)
    assert not scores.isnan().any()


def noise(*size: int) -> Tensor:
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 700])
def test_encode(native: NativeScores, dtype: torch.dtype, signs: bool, num_tokens: int) -> None:
    """The same bytes as torch's, but for ties that sums in another order decide; what is not named stays."""
    random = torch.Generator().manual_seed(5)
    entries = torch.randn(1000, 3, 128, generator=random).to(dtype)
    slots = torch.randperm(1000, generator=random)[:num_tokens].int()
    encode, bias = torch.randn(3, 64, 96, generator=random), torch.randn(3, 1, 96, generator=random)
    ours, wanted = noise(1000, 3, 12 if signs else 3), noise(1000, 3, 12 if signs else 3)
    native.encode(entries, slots, encode, bias, ours, signs=signs)
    PlainScores().encode(entries, slots, encode, bias, wanted, signs=signs)
    assert (ours != wanted).sum() <= 2
    one = noise(1000, 3, ours.shape[2])
    for slot in slots[:50]:
        native.encode(entries, slot[None], encode, bias, one, signs=signs)
    assert torch.equal(one[slots[:50].long()], ours[slots[:50].long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "span"), [(32, 8), (16, 16), (4, 4), (8, 1)])
@pytest.mark.parametrize("num_tokens", [0, 1, 70, 128])
def test_bounds(native: NativeScores, dtype: torch.dtype, page_size: int, span: int, num_tokens: int) -> None:
    random = torch.Generator().manual_seed(6)
    entries = torch.randn(128, 2, 64, generator=random).to(dtype)
    edges = torch.randn(2, 2, 3, 32, generator=random).sort(2).values
    size = (128 // page_size, 2, page_size // span * 16)
    ours, wanted = noise(*size), noise(*size)
    for first, end in ((0, num_tokens // 3), (num_tokens // 3, num_tokens)):
        slots = torch.arange(first, end, dtype=torch.int32)
        native.bounds(entries, slots, edges, ours, page_size=page_size, span=span)
        PlainScores().bounds(entries, slots, edges, wanted, page_size=page_size, span=span)
    assert torch.equal(ours, wanted)


def test_what_does_not_fit_is_refused(native: NativeScores) -> None:
    batch, pages = paged([100], 16)
    query, decode = torch.zeros(1, 2, 16), torch.zeros(1, 16, 64)
    metadata = torch.zeros(pages * 16, 1, 2, dtype=torch.uint8)

    def refused(what: str, **other: object) -> None:
        given = {"query": query, "decode": decode, "metadata": metadata, "layout": CodeLayout(), "batch": batch}
        with pytest.raises(KernelError, match=what):
            native.codes(**(given | other), budget=Budget(0.2), scale=1.0)  # type: ignore[arg-type]

    refused("decode", decode=decode.double())
    refused("decode", decode=decode[:, :8])
    refused("decode", query=torch.zeros(1, 2, 32))
    refused("nibbles", decode=torch.zeros(1, 16, 48))
    refused("metadata", decode=torch.zeros(1, 16, 96))
    refused("metadata", metadata=metadata.int())
    refused("layout", layout=CodeLayout(8, 8))
    refused("query", query=torch.zeros(1, 16, 2).transpose(1, 2))
    with pytest.raises(KernelError, match="metadata"):
        native.keys(query, metadata, batch, Budget(0.2), scale=1.0)
    entries, slots, bias = torch.zeros(96, 1, 32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, 64)
    with pytest.raises(KernelError, match="bias"):
        native.encode(entries, slots, decode, bias[..., :32], metadata, signs=False)
    with pytest.raises(KernelError, match="metadata"):
        native.encode(entries, slots, decode, bias, metadata, signs=True)
    with pytest.raises(KernelError, match="slots"):
        native.encode(entries, slots.long(), decode, bias, metadata[:96], signs=False)
    with pytest.raises(KernelError, match="edges"):
        native.bounds(entries, slots, torch.zeros(1, 2, 3, 8), metadata, page_size=16, span=8)


def test_scores_go_with_the_kernels() -> None:
    assert isinstance(open_scores(ReferenceKernels()), PlainScores)
    assert isinstance(open_scores(NativeKernels(1)), NativeScores)
