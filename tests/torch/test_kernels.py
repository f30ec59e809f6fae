"""Native kernels against the reference, computed in float32 or float64 from the same inputs."""

import itertools
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from narrows.errors import ConfigError, KernelError
from narrows.kernels import build, load
from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.native import NativeKernels
from narrows.kernels.reference import ReferenceKernels

# Largest error, relative to the largest value: one rounding of the result, and for attention one of the weights too.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
DTYPES = [torch.bfloat16, torch.float32]
REFERENCE = ReferenceKernels()


@pytest.fixture(scope="module")
def library_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=["native", "generic"])
def kernels(request: pytest.FixtureRequest, library_cache: Path) -> NativeKernels:
    """For this processor, and as on one without AVX-512."""
    flags = [] if request.param == "native" else [*BASELINE, "-DNARROWS_GENERIC"]
    return NativeKernels(2, build.load_library(build.build(flags, library_cache / "kernels")))


BASELINE = ["-march=x86-64-v3"] if build.native_flag() == "-march=native" else []


def close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    assert got.shape == want.shape
    assert torch.equal(got.isfinite(), want.isfinite())
    got, want = got.double().nan_to_num(neginf=0.0), want.double().nan_to_num(neginf=0.0)
    if want.numel():
        error = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
        assert error <= TOLERANCE[dtype] * factor, f"error {error:.2e}"


def paged(
    lengths: list[int], rows: list[int], page_size: int, generator: torch.Generator, spare: int = 3
) -> tuple[PagedBatch, int]:
    """A batch over pages in random order, and how many slots its pool needs."""
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages) + spare, generator=generator, dtype=torch.int32)
    table = torch.zeros(len(lengths), max([1, *pages]), dtype=torch.int32)
    taken, positions, slots = 0, [], []
    for r, (length, count, new) in enumerate(zip(lengths, pages, rows, strict=True)):
        table[r, :count] = order[taken : taken + count]
        taken += count
        at = torch.arange(length - new, length)
        positions.append(at)
        slots.append(table[r, at // page_size] * page_size + at % page_size)
    starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    batch = PagedBatch(
        query_start=starts,
        context_len=torch.tensor(lengths, dtype=torch.int32),
        page_table=table,
        slots=torch.cat(slots).int(),
        positions=torch.cat(positions).int(),
        page_size=page_size,
        max_query=max(rows),
        max_context=max(lengths),
    )
    return batch, (sum(pages) + spare) * page_size


ATTENTION = {
    # name: (lengths, rows, page size, query heads, KV heads, head size, window)
    "one token": ([1], [1], 16, 4, 2, 64, None),
    "decode": ([1, 63, 64, 65, 300, 1030], [1] * 6, 16, 9, 3, 64, None),
    "decode, window": ([5, 100, 700], [1, 1, 1], 16, 4, 4, 32, 70),
    "few rows each": ([50, 300, 2], [2, 4, 1], 16, 6, 2, 64, None),
    "few rows, window": ([50, 600, 300], [2, 4, 1], 16, 6, 2, 64, 33),
    "prefill": ([200], [200], 16, 9, 3, 64, None),
    "prefill, prefix": ([517], [130], 32, 4, 1, 64, None),
    "prefill, window": ([400], [300], 16, 4, 2, 96, 100),
    "window of one": ([70, 9], [70, 1], 16, 2, 2, 32, 1),
    "ragged": ([33, 1, 257, 80, 500], [33, 1, 100, 1, 5], 16, 6, 2, 80, None),
    "odd page size": ([100, 37], [20, 1], 7, 4, 2, 128, None),
    "pages of one": ([70], [70], 1, 2, 1, 48, None),
    "large pages": ([300, 90], [1, 90], 256, 2, 1, 256, None),
    "one KV head, many query heads": ([90, 140], [1, 30], 16, 71, 1, 16, None),
    "no rows": ([20, 40], [0, 3], 16, 2, 1, 32, None),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_attend(kernels: Kernels, case: str, dtype: torch.dtype) -> None:
    lengths, rows, page_size, num_heads, num_kv_heads, head_dim, window = ATTENTION[case]
    generator = torch.Generator().manual_seed(len(case))
    batch, num_slots = paged(lengths, rows, page_size, generator)
    query = torch.randn(sum(rows), num_heads, head_dim, generator=generator).to(dtype)
    entries = torch.randn(num_slots, num_kv_heads, 2 * head_dim, generator=generator).to(dtype)
    used = torch.zeros(num_slots, dtype=torch.bool)
    for r, length in enumerate(lengths):
        at = torch.arange(length)
        used[batch.page_table[r, at // page_size].long() * page_size + at % page_size] = True
    entries[~used] = torch.nan  # what no request owns must not be looked at
    want, want_lse = REFERENCE.attend(query.float(), entries.float(), batch, scale=0.3, window=window)
    out, lse = kernels.attend(query, entries, batch, scale=0.3, window=window)
    assert out.dtype == dtype
    close(out, want, dtype)
    close(lse, want_lse, torch.float32, factor=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    rows = [1, 1, 6]
    batch = PagedBatch(
        query_start=torch.tensor([0, 1, 2, 8], dtype=torch.int32),
        context_len=torch.tensor([0, 10, 0], dtype=torch.int32),
        page_table=torch.zeros(3, 1, dtype=torch.int32),
        slots=torch.zeros(8, dtype=torch.int32),
        positions=torch.zeros(8, dtype=torch.int32),
        page_size=16,
        max_query=6,
        max_context=10,
    )
    query, entries = torch.randn(sum(rows), 2, 32).to(dtype), torch.randn(16, 1, 64).to(dtype)
    out, lse = kernels.attend(query, entries, batch, scale=1.0, window=None)
    seen = torch.tensor([False, True] + [False] * 6)
    assert torch.equal(lse.isinf().all(1), ~seen)
    assert torch.equal(out.eq(0).all(2).all(1), ~seen)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("score", [3e38, -3e38, 1e9])
def test_extreme_scores(kernels: Kernels, dtype: torch.dtype, score: float) -> None:
    """Equal scores weigh equally, however large: each row is the mean of the values it sees."""
    batch, num_slots = paged([70, 70], [1, 20], 16, torch.Generator().manual_seed(0))
    entries = torch.zeros(num_slots, 1, 32)
    entries[..., 16:] = torch.randn(num_slots, 1, 16)
    entries[:, :, 0] = 1.0
    query = torch.zeros(21, 1, 16)
    query[..., 0] = score
    out, lse = kernels.attend(query.to(dtype), entries.to(dtype), batch, scale=1.0, window=None)
    assert torch.equal(lse, torch.full_like(lse, float(query[0, 0, 0].to(dtype))))  # log(70) is below its rounding
    for row in range(21):
        seen = int(batch.positions[row]) + 1
        at = torch.arange(seen)
        slots = batch.page_table[min(row, 1), at // 16].long() * 16 + at % 16
        close(out[row], entries[slots, :, 16:].to(dtype).double().mean(0), dtype)


def test_a_row_does_not_depend_on_the_others(kernels: NativeKernels) -> None:
    """Bit for bit: decode alone or in a batch; prefill whole or in chunks; any number of threads."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(800, 6, 64, generator=generator).bfloat16()
    batch, num_slots = paged([800], [800], 16, generator)
    entries = torch.randn(num_slots, 2, 128, generator=generator).bfloat16()
    whole, whole_lse = kernels.attend(query, entries, batch, scale=0.125, window=None)

    def part(first: int, end: int) -> tuple[Tensor, Tensor]:
        chunk = PagedBatch(
            query_start=torch.tensor([0, end - first], dtype=torch.int32),
            context_len=torch.tensor([end], dtype=torch.int32),
            page_table=batch.page_table,
            slots=batch.slots[first:end],
            positions=batch.positions[first:end],
            page_size=16,
            max_query=end - first,
            max_context=end,
        )
        return kernels.attend(query[first:end].contiguous(), entries, chunk, scale=0.125, window=None)

    for first, end in ((0, 100), (100, 357), (795, 800)):
        out, lse = part(first, end)
        assert torch.equal(out, whole[first:end])
        assert torch.equal(lse, whole_lse[first:end])

    one, _ = part(799, 800)
    many = PagedBatch(
        query_start=torch.arange(4, dtype=torch.int32),
        context_len=torch.tensor([300, 800, 17], dtype=torch.int32),
        page_table=batch.page_table.expand(3, -1).contiguous(),
        slots=torch.zeros(3, dtype=torch.int32),
        positions=torch.tensor([299, 799, 16], dtype=torch.int32),
        page_size=16,
        max_query=1,
        max_context=800,
    )
    together, _ = kernels.attend(query[[299, 799, 16]], entries, many, scale=0.125, window=None)
    assert torch.equal(together[1:2], one)

    x, weight = (
        torch.randn(100, 70, generator=generator).bfloat16(),
        torch.randn(96, 70, generator=generator).bfloat16(),
    )
    packed = kernels.pack(weight)
    product = kernels.linear(x, packed)
    for count in (1, 3):
        others = NativeKernels(count, kernels.library)
        again, _ = others.attend(query, entries, batch, scale=0.125, window=None)
        assert torch.equal(again, whole)
        for first, end in ((0, 1), (3, 19), (0, 100)):
            assert torch.equal(others.linear(x[first:end], packed), product[first:end])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (1, 1), (70, 33), (17, 50), (576, 64), (300, 1000)])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 14, 15, 33, 300])
def test_linear(kernels: Kernels, rows: int, inputs: int, outputs: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows + inputs)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    offset = torch.randn(outputs, generator=generator).bfloat16() * 5 if bias else None
    packed = kernels.pack(weight, offset)
    assert (packed.in_features, packed.out_features) == (inputs, outputs)
    want = REFERENCE.linear(x.double(), REFERENCE.pack(weight.double(), None if offset is None else offset.double()))
    close(kernels.linear(x, packed), want, torch.bfloat16)
    residual = torch.randn(rows, outputs, generator=generator).bfloat16()
    want = want + residual.double()
    result = kernels.linear(x, packed, residual=residual)
    assert result is residual
    close(residual, want, torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "width"), [(64, 96), (71, 32), (40, 50), (576, 160)])
@pytest.mark.parametrize("rows", [0, 1, 4, 29, 200])
def test_gated_linear(kernels: Kernels, rows: int, inputs: int, width: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows + inputs)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    weight = torch.randn(2 * width, inputs, generator=generator).bfloat16()
    offset = torch.randn(2 * width, generator=generator).bfloat16() if bias else None
    want = REFERENCE.gated_linear(
        x.double(), REFERENCE.pack(weight.double(), None if offset is None else offset.double())
    )
    close(kernels.gated_linear(x, kernels.pack(weight, offset)), want, torch.bfloat16)


def test_float32_products_are_torch_s(kernels: Kernels) -> None:
    x, weight = torch.randn(5, 30), torch.randn(44, 30)
    assert torch.equal(kernels.linear(x, kernels.pack(weight)), torch.nn.functional.linear(x, weight))
    close(kernels.gated_linear(x, kernels.pack(weight)), REFERENCE.gated_linear(x, REFERENCE.pack(weight)), x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 64, 576, 1000])
@pytest.mark.parametrize("rows", [0, 1, 130])
def test_rms_norm(kernels: Kernels, rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (torch.randn(rows, width, generator=generator) * 3).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    close(kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.double(), weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("rows", "num_heads", "num_kv_heads", "head_dim"), [(1, 9, 3, 64), (7, 2, 2, 80), (150, 8, 1, 128), (0, 2, 1, 32)]
)
def test_rope_store(
    kernels: Kernels, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, norms: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    batch, num_slots = paged([rows + 20], [rows], 16, generator)
    qkv = torch.randn(rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    angles = torch.rand(rows + 20, head_dim // 2, generator=generator) * 7
    weights = torch.randn(2, head_dim, generator=generator).to(dtype)
    q_norm, k_norm = (weights[0], weights[1]) if norms else (None, None)
    before = torch.randn(num_slots, num_kv_heads, 2 * head_dim, generator=generator).to(dtype)
    stored, want_stored = before.clone(), before.double()
    query = kernels.rope_store(
        qkv, stored, batch, angles.cos(), angles.sin(), num_heads=num_heads, q_norm=q_norm, k_norm=k_norm, eps=1e-6
    )
    want = REFERENCE.rope_store(
        qkv.double(),
        want_stored,
        batch,
        angles.cos(),
        angles.sin(),
        num_heads=num_heads,
        q_norm=None if q_norm is None else q_norm.double(),
        k_norm=None if k_norm is None else k_norm.double(),
        eps=1e-6,
    )
    close(query, want, dtype)
    close(stored, want_stored, dtype)
    untouched = torch.ones(num_slots, dtype=torch.bool)
    untouched[batch.slots.long()] = False
    assert torch.equal(stored[untouched], before[untouched])


def test_wrong_arguments(kernels: Kernels) -> None:
    packed = kernels.pack(torch.randn(8, 6).bfloat16())
    with pytest.raises(KernelError, match=r"x: want contiguous bfloat16 \[rows, 6\]"):
        kernels.linear(torch.randn(2, 7).bfloat16(), packed)
    with pytest.raises(KernelError, match="x: want"):
        kernels.linear(torch.randn(2, 6), packed)
    with pytest.raises(KernelError, match="not contiguous"):
        kernels.linear(torch.randn(6, 2).bfloat16().T, packed)
    with pytest.raises(KernelError, match="residual: want"):
        kernels.linear(torch.randn(2, 6).bfloat16(), packed, residual=torch.randn(2, 8))
    with pytest.raises(KernelError, match="float16"):
        kernels.rms_norm(torch.randn(2, 6).half(), torch.randn(6).half(), 1e-5)
    batch, num_slots = paged([20], [1], 16, torch.Generator().manual_seed(0))
    with pytest.raises(KernelError, match="head size 24"):
        kernels.attend(torch.randn(1, 2, 24), torch.randn(num_slots, 1, 48), batch, scale=1.0, window=None)
    with pytest.raises(KernelError, match="no multiple of the 2 KV heads"):
        kernels.attend(torch.randn(1, 3, 32), torch.randn(num_slots, 2, 64), batch, scale=1.0, window=None)
    with pytest.raises(KernelError, match="entries: want"):
        kernels.attend(torch.randn(1, 2, 32), torch.randn(num_slots, 2, 64).half(), batch, scale=1.0, window=None)


@pytest.mark.parametrize(
    ("compiler", "said"), [("no-such-compiler", "not found in PATH"), ("true", "wrote no library")]
)
@pytest.mark.parametrize("folder", ["", "/dev/null"], ids=["cache", "no cache"])
def test_auto_falls_back_where_nothing_can_be_built(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    compiler: str,
    said: str,
    folder: str,
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("NARROWS_CACHE", folder or str(tmp_path))
    with pytest.raises(KernelError, match=f"{said}.*install a C compiler"):
        load("native")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert load("auto").name == "reference"
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert said in caplog.records[-1].message


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match=r"(?s)failed with \d+: .*no-such-flag"):
        build.build(["-fno-such-flag"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_calls_from_several_threads(kernels: NativeKernels) -> None:
    """One object may be shared: calls take turns."""
    x, weight = torch.randn(300, 128).bfloat16(), torch.randn(512, 128).bfloat16()
    packed = kernels.pack(weight)
    want = kernels.linear(x, packed)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: kernels.linear(x, packed), range(40)))
    assert all(torch.equal(result, want) for result in results)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_works_alone(kernels: NativeKernels) -> None:
    """The threads stay with the parent."""
    x, weight = torch.randn(300, 128).bfloat16(), torch.randn(512, 128).bfloat16()
    packed = kernels.pack(weight)
    want = kernels.linear(x, packed).view(torch.int16).numpy().tobytes()
    child = os.fork()
    if child == 0:  # nothing of torch's that would use its threads
        os._exit(kernels.linear(x, packed).view(torch.int16).numpy().tobytes() != want)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_end_with_their_object(kernels: NativeKernels) -> None:
    def count() -> int:
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    before = count()
    more = NativeKernels(5, kernels.library)
    assert count() == before + 4
    del more
    assert count() == before


def test_names(monkeypatch: pytest.MonkeyPatch, library_cache: Path) -> None:
    monkeypatch.setenv("NARROWS_CACHE", str(library_cache))
    assert load("reference").name == "reference"
    assert load().name == "native"
    with pytest.raises(ConfigError, match="'fast' is unknown; use auto, native or reference"):
        load("fast")
