"""The largest scores, and attention to chosen entries: native kernels against the torch twin and dense attention."""

import random

import pytest
import torch
from torch import Tensor

from narrows.errors import KernelError
from narrows.kernels import build
from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.native import NativeKernels
from narrows.kernels.reference import ReferenceKernels

# Largest error, relative to the largest value: one rounding of the result.
TOLERANCE = {torch.bfloat16: 2**-8, torch.float32: 1e-5}
DTYPES = [torch.bfloat16, torch.float32]
REFERENCE = ReferenceKernels()
# As on a processor of twenty years ago: no vector instructions of ours. Little optimized, so that it compiles quickly.
PLAIN = [*(["-march=x86-64"] if build.native_flag() == "-march=native" else []), "-DNARROWS_GENERIC", "-O1"]


@pytest.fixture(scope="module", params=["native", "plain"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    library = build.build() if request.param == "native" else build.build(PLAIN, tmp_path_factory.mktemp("kernels"))
    return NativeKernels(2, build.load_library(library))


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert torch.equal(got.isfinite(), want.isfinite())
    assert not got.isnan().any()
    got, want = got.double().nan_to_num(neginf=0.0), want.double().nan_to_num(neginf=0.0)
    if want.numel():
        error = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
        assert error <= tolerance, f"error {error:.2e}"


# ---- top_k


def by_hand(scores: list[float], num: int) -> list[int]:
    """Python's own sort is stable, so ties stay in order of position."""
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:num])


def check_top_k(kernels: Kernels, scores: Tensor, num: list[int]) -> None:
    got = kernels.top_k(scores, torch.tensor(num, dtype=torch.int32))
    assert got.dtype == torch.int32
    assert got.shape == (len(num), max(num, default=0))
    for row, (values, count) in enumerate(zip(scores.tolist(), num, strict=True)):
        assert got[row].tolist() == by_hand(values, count) + [-1] * (got.shape[1] - count)


SCORES = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "heavy tails": lambda n, g: torch.randn(n, generator=g).pow(9),
    "few values": lambda n, g: torch.randint(-3, 4, (n,), generator=g).float(),
    "one value": lambda n, g: torch.full((n,), 2.5),
    "both zeros": lambda n, g: torch.zeros(n).mul(torch.randn(n, generator=g)),
    "mostly hidden": lambda n, g: torch.randn(n, generator=g).masked_fill(
        torch.rand(n, generator=g) < 0.9, float("-inf")
    ),
    "all hidden": lambda n, g: torch.full((n,), float("-inf")),
    "infinite": lambda n, g: torch.randn(n, generator=g).mul(3e38).mul(2),
    "ascending": lambda n, g: torch.arange(float(n)),
    "descending": lambda n, g: -torch.arange(float(n)),
    "peaks where the sample looks": lambda n, g: (
        (torch.arange(n) % max(1, n // 64) == 0).float() + torch.rand(n, generator=g) / 2
    ),
    "tiny": lambda n, g: torch.randn(n, generator=g) * 1e-41,
}


@pytest.mark.parametrize("values", SCORES)
def test_top_k(kernels: Kernels, values: str) -> None:
    generator = torch.Generator().manual_seed(len(values))
    for n in (1, 2, 7, 8, 9, 63, 64, 65, 100, 1000, 5003):
        num = sorted({0, 1, min(2, n), n // 5, n // 2, n - n // 10, n - 1, n})
        check_top_k(kernels, torch.stack([SCORES[values](n, generator) for _ in num]), num)


def test_top_k_of_nothing(kernels: Kernels) -> None:
    check_top_k(kernels, torch.empty(0, 10), [])
    check_top_k(kernels, torch.empty(2, 0), [0, 0])
    check_top_k(kernels, torch.randn(3, 10), [0, 0, 0])


def test_top_k_of_many_long_rows(kernels: Kernels) -> None:
    """Enough for several threads; the twin agrees, whose test is `by_hand` on smaller ones."""
    scores = torch.randn(48, 8192, generator=torch.Generator().manual_seed(0)).bfloat16().float()  # with ties
    num = torch.arange(48, dtype=torch.int32) * 174
    assert torch.equal(kernels.top_k(scores, num), REFERENCE.top_k(scores, num))


@pytest.mark.parametrize("num", [1, 3, 100, 199])
@pytest.mark.parametrize("nans", [[0], [150], list(range(200))], ids=["first", "later", "all"])
def test_nan_ends_in_an_error_or_in_positions(kernels: Kernels, nans: list[int], num: int) -> None:
    """It is not allowed, but must neither hang nor lead outside the row."""
    scores = torch.randn(1, 200, generator=torch.Generator().manual_seed(num))
    scores[0, nans] = torch.nan
    try:
        positions = kernels.top_k(scores, torch.tensor([num], dtype=torch.int32))[0].tolist()
    except KernelError as error:
        assert "NaN" in str(error)  # noqa: PT017 - either is fine
    else:
        assert positions == sorted(set(positions))
        assert 0 <= positions[0] <= positions[-1] < 200


# ---- attend_index


def drawn(
    counts: list[int], num_entries: int, generator: torch.Generator, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of different ids in random order, -1 behind them, and the counts."""
    ids = torch.full((len(counts), width or max([1, *counts])), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        ids[row, :count] = torch.randperm(num_entries, generator=generator, dtype=torch.int32)[:count]
    return ids, torch.tensor(counts, dtype=torch.int32)


# counts of each row, KV heads, query heads of each, head size
CASES = {
    "one head": ([300], 1, 1, 64),
    "the model's own": ([410, 700, 699], 3, 3, 64),
    "many requests, very different counts": (
        [1, 700, 0, 32, 33, 31, 256, 257, 512, 3, 64, 5, 2, 600, 4, 100],
        1,
        4,
        64,
    ),
    "nothing at all": ([0, 0], 2, 2, 32),
    "smallest heads": ([70, 90], 2, 2, 16),
    "odd size": ([70, 290], 1, 5, 48),
    "largest heads": ([70, 290], 2, 2, 256),
    "many queries to a head": ([140], 1, 71, 16),
    "seven queries": ([65, 130, 40, 1], 2, 7, 128),
    "eight queries": ([65, 130], 2, 8, 80),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_attend_index(kernels: Kernels, case: str, dtype: torch.dtype) -> None:
    counts, num_kv_heads, group, head_dim = CASES[case]
    generator = torch.Generator().manual_seed(len(case))
    memory = torch.randn(900, 2 * head_dim, generator=generator).to(dtype)
    ids, num = drawn(counts, len(memory), generator, width=max([1, *counts]) + 3)
    unused = torch.ones(len(memory), dtype=torch.bool)
    unused[ids[ids >= 0].long()] = False
    memory[unused] = torch.nan  # what no id names must not be looked at
    shape = len(counts) // num_kv_heads, num_kv_heads * group, head_dim
    query = torch.randn(shape, generator=generator).to(dtype)
    out, lse = kernels.attend_index(query, memory, ids, num, scale=0.3)
    want, want_lse = REFERENCE.attend_index(query.double(), memory.double().nan_to_num(0.0), ids, num, scale=0.3)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    close(out, want, TOLERANCE[dtype])
    close(lse, want_lse, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_entries_are_dense_attention(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    lengths, num_kv_heads, group, head_dim, page = [650, 1, 77], 3, 3, 64, 16
    pages = [-(-length // page) for length in lengths]
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for r, part in enumerate(torch.randperm(sum(pages), generator=generator, dtype=torch.int32).split(pages)):
        table[r, : len(part)] = part
    entries = torch.randn(sum(pages) * page, num_kv_heads, 2 * head_dim, generator=generator).to(dtype)
    query = torch.randn(len(lengths), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    newest = torch.tensor(lengths, dtype=torch.int32) - 1
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    batch = PagedBatch(starts, newest + 1, table, newest, newest, page, 1, max(lengths))
    at = torch.arange(max(lengths))
    slots = table[:, at // page].long() * page + at % page
    ids = slots[:, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None]  # [R, Hkv, n]
    memory, counts = entries.view(-1, 2 * head_dim), torch.tensor(lengths, dtype=torch.int32)
    out, lse = kernels.attend_index(
        query, memory, ids.flatten(0, 1).int(), counts.repeat_interleave(num_kv_heads), scale=0.125
    )
    want, want_lse = REFERENCE.attend(query.double(), entries.double(), batch, scale=0.125, window=None)
    close(out, want, TOLERANCE[dtype])
    close(lse, want_lse, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_follow_from_the_entries_and_their_order(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Wherever they lie, whatever else is in the call, and with any number of threads."""
    generator = torch.Generator().manual_seed(4)
    memory = torch.randn(4000, 128, generator=generator).to(dtype)
    counts = [700, 1639, 3, 257, 64, 0]
    ids, num = drawn(counts, len(memory), generator)
    query = torch.randn(3, 6, 64, generator=generator).to(dtype)
    out, lse = kernels.attend_index(query, memory, ids, num, scale=0.125)
    gathered = memory[ids.clamp(min=0).long()].flatten(0, 1)
    behind = torch.arange(gathered.shape[0], dtype=torch.int32).view_as(ids)
    for threads in (1, 2, 5):
        crew = NativeKernels(threads, kernels.library)
        for where, which in ((memory, ids), (gathered, behind)):
            again, again_lse = crew.attend_index(query, where, which, num, scale=0.125)
            assert torch.equal(again, out)
            assert torch.equal(again_lse, lse)
        for r in range(3):
            rows = slice(2 * r, 2 * r + 2)
            alone, alone_lse = crew.attend_index(query[r : r + 1], memory, ids[rows], num[rows], scale=0.125)
            assert torch.equal(alone, out[r : r + 1])
            assert torch.equal(alone_lse, lse[r : r + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", [3e38, -3e38, 1e9])
def test_extreme_scores(kernels: Kernels, dtype: torch.dtype, score: float) -> None:
    """Equal scores weigh equally, however large: the mean of the values."""
    memory = torch.randn(300, 32, generator=torch.Generator().manual_seed(5)).to(dtype)
    memory[:, :16] = 0.0
    memory[:, 0] = 1.0
    query = torch.zeros(1, 1, 16, dtype=dtype)
    query[..., 0] = score
    ids, num = torch.arange(300, dtype=torch.int32)[None], torch.tensor([300], dtype=torch.int32)
    out, lse = kernels.attend_index(query, memory, ids, num, scale=1.0)
    assert float(lse) == float(query[0, 0, 0])  # log(300) is below its rounding
    close(out[0], memory[:, 16:].double().mean(0, keepdim=True), TOLERANCE[dtype])


def test_scores_that_grow_and_fall(kernels: Kernels) -> None:
    """The greatest score comes last, first or in between, and outweighs all others: the value there."""
    for peak in (0, 37, 255, 256, 599):
        memory = torch.zeros(600, 32)
        memory[:, 0] = -(torch.arange(600) - peak).abs().float() * 100.0
        memory[:, 16] = torch.arange(600.0) + 1.0
        query = torch.ones(1, 1, 16)
        ids, num = torch.arange(600, dtype=torch.int32)[None], torch.tensor([600], dtype=torch.int32)
        out, lse = kernels.attend_index(query, memory, ids, num, scale=1.0)
        assert float(out[0, 0, 0]) == peak + 1.0
        assert float(lse) == 0.0


# ---- locate, keep


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("lengths", [[], [1], [5, 40, 1, 200]], ids=str)
def test_locate(kernels: Kernels, lengths: list[int], heads: int) -> None:
    """Against one entry after the other. The newest of a row counts as here though its state says nowhere."""
    draw = random.Random(len(lengths) + heads)
    page_size, most_pages = 8, 30
    table = [draw.sample(range(400), most_pages) for _ in lengths]
    batch = paged_batch(lengths, table, page_size)
    states = torch.tensor([draw.choice([1, 1, 2]) for _ in range(400 * page_size * heads)], dtype=torch.int8)
    rows = []
    for r, length in enumerate(lengths):
        for head in range(heads):
            row = [*sorted(draw.sample(range(length - 1), draw.randrange(length))), length - 1]
            ids = [(table[r][p // page_size] * page_size + p % page_size) * heads + head for p in row]
            states[ids[-1]] = draw.choice([0, 1, 2])
            rows.append((row, ids))
    counts = torch.tensor([len(row) for row, _ in rows], dtype=torch.int32)
    positions = torch.full((len(rows), max([len(row) for row, _ in rows], default=0) + 3), -1, dtype=torch.int32)
    for i, (row, _) in enumerate(rows):
        positions[i, : len(row)] = torch.tensor(row)
    for each in (kernels, REFERENCE):
        got = each.locate(positions, counts, batch, states)
        here = each.locate(positions, counts, batch)
        assert not here.any_remote and not here.num_remote.any()
        assert torch.equal(here.ids, got.ids)
        far_any = False
        for i, (row, ids) in enumerate(rows):
            far = [j for j in range(len(row) - 1) if states[ids[j]] == 2]
            far_any |= bool(far)
            assert got.ids[i, : len(row)].tolist() == ids
            assert int(got.num_remote[i]) == len(far)
            assert got.remote_ids[i, : len(far)].tolist() == [ids[j] for j in far]
            assert got.remote_positions[i, : len(far)].tolist() == [row[j] for j in far]
        assert got.any_remote == far_any
        if len(rows) and len(rows[-1][0]) > 1:
            states[rows[-1][1][0]] = 0
            with pytest.raises(KernelError, match="neither here nor at prefill"):
                each.locate(positions, counts, batch, states)
            states[rows[-1][1][0]] = 1 if 0 not in far else 2


def paged_batch(lengths: list[int], table: list[list[int]], page_size: int) -> PagedBatch:
    """A decode step of requests of these lengths; only what says where entries are is filled in."""
    context = torch.tensor(lengths, dtype=torch.int32)
    nothing = torch.zeros(len(lengths), dtype=torch.int32)
    pages = torch.tensor(table, dtype=torch.int32).view(len(lengths), len(table[0]) if table else 1)
    start = torch.arange(len(lengths) + 1, dtype=torch.int32)
    return PagedBatch(start, context, pages, nothing, context - 1, page_size, 1, max(lengths, default=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("entry_dim", [1, 24, 128])
@pytest.mark.parametrize("counts", [[], [0, 0], [1], [400, 0, 17, 399, 1, 250]], ids=str)
def test_keep(kernels: Kernels, counts: list[int], entry_dim: int, dtype: torch.dtype) -> None:
    """Everything but the rows' own places stays as it was."""
    generator = torch.Generator().manual_seed(len(counts) + entry_dim)
    memory = torch.randint(0, 250, (1500, entry_dim), generator=generator).to(dtype)
    every, num = torch.randperm(1500, generator=generator, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
    ids = torch.full((len(counts), max([1, *counts]) + 2), -1, dtype=torch.int32)
    rows = torch.full((len(counts), max([0, *counts]) + 7, entry_dim), 251).to(dtype)
    want, states = memory.clone(), torch.full((1500,), 2, dtype=torch.int8)
    for row, part in enumerate(every[: sum(counts)].split(counts)):
        ids[row, : len(part)] = part
        rows[row, : len(part)] = (torch.arange(len(part)) % 200)[:, None].to(dtype)
        for i, id in enumerate(part.tolist()):
            want[id] = rows[row, i]
            states[id] = 1
    for each in (kernels, REFERENCE):
        got, marked = memory.clone(), torch.full((1500,), 2, dtype=torch.int8)
        each.keep(got, marked, ids, num, rows)
        assert torch.equal(got, want)
        assert torch.equal(marked, states)


# ---- packed entries


def awkward_entries(entry_dim: int) -> dict[str, Tensor]:
    """Rows of bfloat16 that exponents make easy, hard or impossible to pack."""
    generator = torch.Generator().manual_seed(entry_dim)
    bits = torch.randint(-(1 << 15), 1 << 15, (40, entry_dim), generator=generator, dtype=torch.int32)
    wide = torch.randn(40, entry_dim, generator=generator)
    wide[:, ::5] *= 2.0 ** -torch.randint(10, 30, wide[:, ::5].shape, generator=generator).float()
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-39, -3e-39, 3e38])
    return {
        "normal": torch.randn(40, entry_dim, generator=generator).bfloat16(),
        "far apart": wide.bfloat16(),
        "any bits": bits.to(torch.int16).view(torch.bfloat16),
        "zeros": torch.zeros(40, entry_dim).bfloat16(),
        "special": special[torch.randint(0, 8, (40, entry_dim), generator=generator)].bfloat16(),
    }


@pytest.mark.parametrize("entry_dim", [2, 24, 128, 256])
def test_packed_entries_come_back_to_the_bit(kernels: Kernels, entry_dim: int) -> None:
    for name, memory in awkward_entries(entry_dim).items():
        ids = torch.randperm(40, generator=torch.Generator().manual_seed(1), dtype=torch.int32)[:31]
        for packs, keeps in ((kernels, REFERENCE), (REFERENCE, kernels), (kernels, kernels)):
            packed = torch.full((2, 20 * (2 * entry_dim + 1)), 77, dtype=torch.uint8)
            sizes = [packs.pack_entries(memory, part, row) for part, row in zip(ids.split(20), packed, strict=True)]
            for size, part in zip(sizes, ids.split(20), strict=True):
                assert size <= len(part) * (2 * entry_dim + 1), name
                if name == "normal" and entry_dim >= 24:  # a byte, and 12 bits a value, few of them too far apart
                    assert size <= len(part) * (1 + 1.5 * entry_dim) + 3
            emptied, states = torch.full_like(memory, 5.0), torch.full((40,), 2, dtype=torch.int8)
            rows = torch.zeros(2, 20, dtype=torch.int32)
            rows[0], rows[1, :11] = ids[:20], ids[20:]
            num = torch.tensor([20, 11], dtype=torch.int32)
            assert keeps.keep_packed(emptied, states, rows, num, packed) is None
            there = torch.zeros(40, dtype=torch.bool)
            there[ids.long()] = True
            assert torch.equal(emptied.view(torch.int16)[there], memory.view(torch.int16)[there]), name
            assert bool((emptied[~there] == 5.0).all())
            assert torch.equal(states == 1, there)


def test_packed_entry_by_hand(kernels: Kernels) -> None:
    """1.5 is 0x3fc0, -0.25 is 0xbe80, 2^-30 is 0x3080, 2.0 is 0x4000: exponents 127, 125, 97, 128."""
    memory = torch.tensor([[1.5, -0.25, 2.0**-30, 2.0] * 2]).bfloat16()
    out = torch.zeros(17, dtype=torch.uint8)
    for each in (kernels, REFERENCE):
        size = each.pack_entries(memory, torch.zeros(1, dtype=torch.int32), out)
        assert bytes(out[:size].tolist()).hex() == "80" + "1133ff00" + "40800000" * 2 + "6161"


def test_packed_rows_that_end_too_early(kernels: Kernels) -> None:
    memory, states = torch.randn(6, 32).bfloat16(), torch.zeros(6, dtype=torch.int8)
    memory[:, 3] = 2.0**-40
    ids, num = torch.arange(6, dtype=torch.int32).view(2, 3), torch.tensor([3, 3], dtype=torch.int32)
    packed = torch.zeros(2, 3 * 65, dtype=torch.uint8)
    size = [kernels.pack_entries(memory, row, out) for row, out in zip(ids, packed, strict=True)]
    assert size[0] == size[1] == 3 * (1 + 16 + 32 + 1)
    for each in (kernels, REFERENCE):
        for cut in range(size[1]):
            assert each.keep_packed(memory.clone(), states, ids, num, packed[:, :cut].contiguous()) == 0
        assert each.keep_packed(memory.clone(), states, ids, num, packed[:, : size[1]].contiguous()) is None
        damaged = packed[:, : size[1]].clone()
        damaged[1, 0] = 0  # "as it is", which is longer
        assert each.keep_packed(memory.clone(), states, ids, num, damaged) == 1
        assert each.keep_packed(memory.clone(), states, ids, num - 3, damaged) is None


# ---- arguments


def test_wrong_arguments(kernels: Kernels) -> None:
    num = torch.tensor([2, 2], dtype=torch.int32)
    with pytest.raises(KernelError, match=r"num: want 0 to 5, .* got \[2, 6\]"):
        kernels.top_k(torch.randn(2, 5), torch.tensor([2, 6], dtype=torch.int32))
    with pytest.raises(KernelError, match="num: want 0 to 5"):
        kernels.top_k(torch.randn(2, 5), torch.tensor([2, -1], dtype=torch.int32))
    with pytest.raises(KernelError, match="num: want 2 contiguous int32"):
        kernels.top_k(torch.randn(2, 5), num.long())
    with pytest.raises(KernelError, match="scores: want contiguous float32"):
        kernels.top_k(torch.randn(2, 5).bfloat16(), num)
    with pytest.raises(KernelError, match="not contiguous"):
        kernels.top_k(torch.randn(5, 2).T, num)

    query, memory = torch.randn(1, 4, 32), torch.randn(9, 64)
    ids = torch.zeros(2, 3, dtype=torch.int32)

    def attend(query: Tensor = query, memory: Tensor = memory, ids: Tensor = ids, counts: Tensor = num) -> None:
        kernels.attend_index(query, memory, ids, counts, scale=1.0)

    attend()
    with pytest.raises(KernelError, match=r"memory: want contiguous torch.float32 \[9, 64\]"):
        attend(memory=memory.bfloat16())
    with pytest.raises(KernelError, match="memory: want"):
        attend(memory=torch.randn(9, 32))
    with pytest.raises(KernelError, match="head size 24"):
        attend(query=torch.randn(1, 4, 24), memory=torch.randn(9, 48))
    with pytest.raises(KernelError, match="float16"):
        attend(query=query.half(), memory=memory.half())
    with pytest.raises(KernelError, match="ids: want 6 contiguous int32"):
        attend(ids=ids.long())
    with pytest.raises(KernelError, match="counts: want 2 contiguous int32"):
        attend(counts=num[:1])
    with pytest.raises(KernelError, match="ids: 3 rows are no KV heads of 1 requests with 4 query heads"):
        attend(ids=torch.zeros(3, 3, dtype=torch.int32), counts=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(KernelError, match="scale must be above 0"):
        kernels.attend_index(query, memory, ids, num, scale=0.0)

    entries, rows, states = torch.randn(9, 8), torch.randn(2, 4, 8), torch.zeros(9, dtype=torch.int8)
    kernels.keep(entries, states, ids, num, rows)
    with pytest.raises(KernelError, match=r"rows: want contiguous torch.float32 \[2, 4, 8\]"):
        kernels.keep(entries, states, ids, num, rows.bfloat16())
    with pytest.raises(KernelError, match="rows: want"):
        kernels.keep(entries, states, ids, num, torch.randn(3, 4, 8))
    with pytest.raises(KernelError, match="rows: want"):
        kernels.keep(entries, states, ids, num, torch.randn(2, 4, 7))
    with pytest.raises(KernelError, match=r"memory: want .* not contiguous"):
        kernels.keep(torch.randn(8, 9).T, states, ids, num, rows)
    with pytest.raises(KernelError, match="states: want contiguous int8"):
        kernels.keep(entries, states.int(), ids, num, rows)

    batch = paged_batch([4], [[1]], 8)
    kernels.locate(ids, num, batch)
    with pytest.raises(KernelError, match="positions: want 6 contiguous int32"):
        kernels.locate(ids.long(), num, batch)
    with pytest.raises(KernelError, match="counts: want 2 contiguous int32"):
        kernels.locate(ids, num[:1], batch)
    with pytest.raises(KernelError, match="states: want contiguous int8"):
        kernels.locate(ids, num, batch, states.bool())
    with pytest.raises(KernelError, match="positions: 2 rows are no KV heads of 3 requests"):
        kernels.locate(ids, num, paged_batch([4, 4, 4], [[1], [1], [1]], 8))

    halves, out = torch.randn(9, 8).bfloat16(), torch.zeros(34, dtype=torch.uint8)
    kernels.pack_entries(halves, num, out)
    with pytest.raises(KernelError, match="out: want 34 contiguous uint8"):
        kernels.pack_entries(halves, num, out[:33])
    with pytest.raises(KernelError, match="memory: want contiguous bfloat16 entries"):
        kernels.pack_entries(entries, num, out)
    with pytest.raises(KernelError, match=r"packed: want contiguous uint8 \[2, bytes\]"):
        kernels.keep_packed(halves, states, ids, num, out)
