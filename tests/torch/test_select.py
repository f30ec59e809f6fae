"""Every algorithm against brute force from its definition, position by position; and what all of them promise."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from narrows.errors import ConfigError
from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.native import NativeKernels
from narrows.kernels.reference import ReferenceKernels
from narrows.select.base import KVIndex, Selector
from narrows.select.calibration import save
from narrows.select.codes import SINKS
from narrows.select.quest import SPAN, WIDTH
from narrows.select.registry import NEEDS_CALIBRATION, SELECTORS, open_selector
from narrows.select.shape import SelectorShape

LAYERS, HEADS, KV_HEADS, DIM, PAGE = 2, 6, 2, 16, 16
GROUP = HEADS // KV_HEADS
SCALE = DIM**-0.5
LENGTHS = [1, 2, 5, 6, 40, 17, 120, 33]
KERNELS: dict[str, Callable[[], Kernels]] = {"native": lambda: NativeKernels(2), "reference": ReferenceKernels}


@pytest.fixture(scope="module", params=list(KERNELS))
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return KERNELS[request.param]()


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def arrays_of(name: str) -> dict[str, Tensor]:
    """A calibration of the right shape; what it says is arbitrary."""
    random = torch.Generator().manual_seed(5)

    def normal(*size: int) -> Tensor:
        return torch.randn(LAYERS, KV_HEADS, *size, generator=random)

    if name == "quest":
        return {"low": normal(DIM, 4).sort(-1).values - 1, "high": normal(DIM, 4).sort(-1).values + 1}
    width = 6 * 16 if name == "infinigen" else 32
    return {"encode": normal(DIM, width), "bias": normal(1, width), "decode": normal(DIM, width) / 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("calibration")
    for name in NEEDS_CALIBRATION:
        save(folder / name, name, "model", arrays_of(name))
    return {name: folder / name for name in NEEDS_CALIBRATION}


def shape_of(dtype: torch.dtype, page_size: int = PAGE) -> SelectorShape:
    return SelectorShape(LAYERS, HEADS, KV_HEADS, DIM, page_size, dtype)


class Pool:
    """Requests of given lengths whose pages are dealt in a shuffled order; all keys but the newest are described."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, seed: int = 0, page_size: int = PAGE) -> None:
        random = torch.Generator().manual_seed(seed)
        self.page_size = page_size
        self.lengths = list(lengths)
        pages = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(pages), generator=random, dtype=torch.int32)
        self.table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for line, start, count in zip(self.table, torch.tensor([0, *pages]).cumsum(0), pages, strict=False):
            line[:count] = order[start : start + count]
        self.entries = torch.randn(sum(pages) * page_size, KV_HEADS, 2 * DIM, generator=random).to(dtype)
        self.query = torch.randn(len(lengths), HEADS, DIM, generator=random).to(dtype)

    def slots(self, request: int) -> Tensor:
        at = torch.arange(self.lengths[request])
        return self.table[request, at // self.page_size] * self.page_size + (at % self.page_size).to(torch.int32)

    def keys(self, request: int) -> Tensor:
        """[n, Hkv, D] float32, in order of position."""
        return self.entries[self.slots(request).long(), :, :DIM].float()

    def batch(self, requests: Sequence[int] | None = None) -> PagedBatch:
        chosen = list(range(len(self.lengths))) if requests is None else list(requests)
        length = torch.tensor([self.lengths[r] for r in chosen], dtype=torch.int32)
        return PagedBatch(
            query_start=torch.arange(len(chosen) + 1, dtype=torch.int32),
            context_len=length,
            page_table=self.table[chosen],
            slots=torch.stack([self.slots(r)[-1] for r in chosen]),
            positions=length - 1,
            page_size=self.page_size,
            max_query=1,
            max_context=int(length.max()),
        )

    def noise(self, selector: Selector) -> Tensor:
        """Metadata of which nothing is described."""
        layout = selector.metadata
        size = (len(self.entries) // layout.tokens_per_row, KV_HEADS, layout.row_bytes)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(9))

    def describe(self, selector: Selector, layer: int = 1, calls: Sequence[int] = ()) -> Tensor:
        """Metadata; `calls` are positions at which a prompt is cut. What was never described is noise."""
        metadata = self.noise(selector)
        for request, length in enumerate(self.lengths):
            cuts = [0, *(cut for cut in calls if cut < length - 1), length - 1]
            for first, end in pairwise(cuts):
                selector.describe(layer, self.entries, self.slots(request)[first:end], metadata)
        return metadata

    def select(self, selector: Selector, *, layer: int = 1, window: int | None = None) -> list[list[int]]:
        """The positions of each row."""
        index = selector.select(
            layer, self.query, self.describe(selector, layer), self.batch(), scale=SCALE, window=window
        )
        return rows_of(index)


def rows_of(index: KVIndex) -> list[list[int]]:
    """Checks the form of an index: ascending, without repeats, then -1."""
    assert index.positions.dtype == index.counts.dtype == torch.int32
    assert index.counts.min() >= 1 and index.positions.shape[1] >= index.counts.max()
    found = []
    for line, count in zip(index.positions.tolist(), index.counts.tolist(), strict=True):
        assert line[:count] == sorted(set(line[:count])) and set(line[count:]) <= {-1}
        assert min(line[:count]) >= 0
        found.append(line[:count])
    return found


# ---- brute force


def softmax_of(scores: dict[int, float]) -> dict[int, float]:
    peak = max(scores.values(), default=0.0)
    total = sum(math.exp(score - peak) for score in scores.values())
    return {at: math.exp(score - peak) / total for at, score in scores.items()}


def brute(
    pool: Pool,
    ratio: float,
    score: Callable[[int, int, int, int], float],
    *,
    sinks: int = 0,
    window: int | None = None,
    alpha: float | None = None,
) -> list[tuple[set[int], dict[int, float], int]]:
    """For each row: positions that are read whatever they score, the mass of the others, and how many are read.

    score(request, query head, KV head, position) is a query's score of a described position.
    """
    rows = []
    for request, length in enumerate(pool.lengths):
        first = 0 if window is None else max(0, length - window)
        always = {length - 1, *range(first, min(sinks, length - 1))}
        scored = range(max(first, sinks), length - 1)
        num = min(max(1, math.ceil(ratio * length - 1e-9)), length - first)
        masses, near = [], []
        for kv_head in range(KV_HEADS):
            mass, counts = dict.fromkeys(scored, 0.0), []
            for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
                scores = {at: score(request, head, kv_head, at) for at in scored}
                for at, part in softmax_of(scores).items():
                    mass[at] += part
                best = max(scores.values(), default=0.0)
                counts.append(sum(one >= best - (alpha or 0.0) for one in scores.values()))
            masses.append(mass)
            near.append(sum(counts) / len(counts))
        if alpha is not None and ratio < 1.0:
            num = min(num, 1 + sinks + math.ceil(max(near)))
        rows += [(always, mass, num) for mass in masses]
    return rows


def agrees(found: list[list[int]], rows: list[tuple[set[int], dict[int, float], int]], slack: float = 1e-4) -> None:
    """Same number, all that is always read (as far as there is room), and no other of less mass than one left out."""
    for chosen, (always, mass, num) in zip(found, rows, strict=True):
        assert len(chosen) == num
        assert max(always) in chosen
        assert len(always & set(chosen)) == min(len(always), num)
        assert set(chosen) <= always | set(mass)
        taken = [mass[at] for at in chosen if at not in always]
        left = [part for at, part in mass.items() if at not in chosen]
        assert min(taken, default=math.inf) >= max(left, default=-math.inf) - slack


def dot_of(pool: Pool) -> Callable[[int, int, int, int], float]:
    keys = [pool.keys(r).double() for r in range(len(pool.lengths))]
    return lambda r, head, kv_head, at: float(pool.query[r, head].double() @ keys[r][at, kv_head]) * SCALE


@pytest.mark.parametrize("window", [None, 7, 64])
@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0])
def test_exact_is_the_top_of_attention(kernels: Kernels, dtype: torch.dtype, ratio: float, window: int | None) -> None:
    pool = Pool(LENGTHS, dtype)
    selector = open_selector("exact", shape=shape_of(dtype), ratio=ratio, kernels=kernels)
    agrees(pool.select(selector, window=window), brute(pool, ratio, dot_of(pool), window=window))


@pytest.mark.parametrize("window", [None, 7])
def test_infinigen_adds_up_the_nearest_values_of_each_part(
    kernels: Kernels, dtype: torch.dtype, files: dict[str, Path], window: int | None
) -> None:
    pool, arrays = Pool(LENGTHS, dtype), arrays_of("infinigen")
    selector = open_selector(
        "infinigen", shape=shape_of(dtype), ratio=0.3, kernels=kernels, calibration=files["infinigen"]
    )
    assert selector.metadata.entry_bytes == 3
    assert selector.looks_ahead

    def score(request: int, head: int, kv_head: int, at: int) -> float:
        key, query = pool.keys(request)[at, kv_head], pool.query[request, head].float()
        total = 0.0
        for part in range(6):
            own = slice(part * 16, (part + 1) * 16)
            near = key @ arrays["encode"][1, kv_head][:, own] + arrays["bias"][1, kv_head, 0, own]
            total += float(query @ arrays["decode"][1, kv_head][:, own][:, int(near.argmax())]) * SCALE
        return total

    agrees(pool.select(selector, window=window), brute(pool, 0.3, score, sinks=SINKS, window=window, alpha=5.0), 2e-3)


@pytest.mark.parametrize("window", [None, 7])
def test_hata_adds_up_signed_bits(
    kernels: Kernels, dtype: torch.dtype, files: dict[str, Path], window: int | None
) -> None:
    pool, arrays = Pool(LENGTHS, dtype), arrays_of("hata")
    selector = open_selector("hata", shape=shape_of(dtype), ratio=0.3, kernels=kernels, calibration=files["hata"])
    assert selector.metadata.entry_bytes == 4

    def score(request: int, head: int, kv_head: int, at: int) -> float:
        bits = pool.keys(request)[at, kv_head] @ arrays["encode"][1, kv_head] + arrays["bias"][1, kv_head, 0] > 0
        weights = pool.query[request, head].float() @ arrays["decode"][1, kv_head]
        return sum(float(weight) if bit else -float(weight) for weight, bit in zip(weights, bits, strict=True)) * SCALE

    agrees(pool.select(selector, window=window), brute(pool, 0.3, score, sinks=SINKS, window=window), 2e-3)


@pytest.mark.parametrize("window", [None, 7])
def test_quest_scores_a_run_by_its_rounded_bounds(
    kernels: Kernels, dtype: torch.dtype, files: dict[str, Path], window: int | None
) -> None:
    pool, arrays = Pool(LENGTHS, dtype), arrays_of("quest")
    selector = open_selector("quest", shape=shape_of(dtype), ratio=0.3, kernels=kernels, calibration=files["quest"])
    assert selector.metadata.tokens_per_row == PAGE
    assert selector.metadata.entry_bytes == DIM / 2 / SPAN

    def nearest(values: Tensor, bound: Tensor) -> Tensor:
        return torch.stack([line[(line - x).abs().argmin()] for line, x in zip(values, bound, strict=True)])

    def score(request: int, head: int, kv_head: int, at: int) -> float:
        run = pool.keys(request)[:-1, kv_head][at // SPAN * SPAN : (at // SPAN + 1) * SPAN]
        low = nearest(arrays["low"][1, kv_head], run.amin(0))
        high = nearest(arrays["high"][1, kv_head], run.amax(0))
        query = pool.query[request, head].float()
        return float((query * (low + high) / 2 + WIDTH * query.abs() * (high - low) / 2).sum()) * SCALE

    agrees(pool.select(selector, window=window), brute(pool, 0.3, score, sinks=SINKS, window=window), 2e-3)


@pytest.mark.parametrize(
    ("length", "ratio", "window", "expected"),
    [
        (20, 0.5, None, [0, 1, 2, 3, 14, 15, 16, 17, 18, 19]),
        (20, 0.1, None, [0, 19]),
        (20, 0.01, None, [19]),
        (3, 1.0, None, [0, 1, 2]),
        (1, 0.2, None, [0]),
        (20, 0.3, 8, [12, 13, 14, 15, 18, 19]),
    ],
)
def test_streaming_reads_sinks_and_the_end(
    kernels: Kernels, length: int, ratio: float, window: int | None, expected: list[int]
) -> None:
    pool = Pool([length, 50], torch.float32)
    selector = open_selector("streaming", shape=shape_of(torch.float32), ratio=ratio, kernels=kernels)
    assert selector.metadata.entry_bytes == 0
    assert pool.select(selector, window=window)[:KV_HEADS] == [expected] * KV_HEADS


# ---- what all promise


@pytest.fixture(params=SELECTORS)
def selector(request: pytest.FixtureRequest, kernels: Kernels, files: dict[str, Path]) -> Selector:
    return opened(request.param, kernels, files, 0.3)


def opened(name: str, kernels: Kernels, files: dict[str, Path], ratio: float, page_size: int = PAGE) -> Selector:
    shape = shape_of(torch.float32, page_size)
    return open_selector(name, shape=shape, ratio=ratio, kernels=kernels, calibration=files.get(name))


@pytest.mark.parametrize("name", SELECTORS)
def test_ratio_one_reads_everything(kernels: Kernels, files: dict[str, Path], name: str) -> None:
    pool = Pool(LENGTHS, torch.float32)
    selector = opened(name, kernels, files, 1.0)
    assert pool.select(selector) == [list(range(n)) for n in LENGTHS for _ in range(KV_HEADS)]
    assert pool.select(selector, window=9) == [list(range(max(0, n - 9), n)) for n in LENGTHS for _ in range(KV_HEADS)]


def test_a_request_does_not_depend_on_the_others(selector: Selector) -> None:
    pool = Pool(LENGTHS, torch.float32)
    metadata, together = pool.describe(selector), pool.select(selector)
    for request in range(len(LENGTHS)):
        index = selector.select(
            1, pool.query[request : request + 1], metadata, pool.batch([request]), scale=SCALE, window=None
        )
        assert rows_of(index) == together[request * KV_HEADS : (request + 1) * KV_HEADS]


@pytest.mark.parametrize("calls", [(16, 32), (1, 2, 3, 20, 21, 100), (7, 90), tuple(range(200))])
def test_metadata_does_not_depend_on_how_a_prompt_was_cut(selector: Selector, calls: tuple[int, ...]) -> None:
    pool = Pool(LENGTHS, torch.float32)
    whole, cut = pool.describe(selector), pool.describe(selector, calls=calls)
    for request in range(len(LENGTHS)):
        described = pool.slots(request)[:-1].long() // selector.metadata.tokens_per_row
        assert torch.equal(whole[described], cut[described])


def test_one_call_describes_several_requests(selector: Selector) -> None:
    pool = Pool([40, 200], torch.float32)
    metadata = pool.describe(selector)
    both = pool.noise(selector)
    slots = torch.cat([pool.slots(0)[:-1], pool.slots(1)[:-1]])
    selector.describe(1, pool.entries, slots, both)
    described = slots.long() // selector.metadata.tokens_per_row
    assert torch.equal(metadata[described], both[described])


def test_a_recycled_page_is_described_anew(selector: Selector) -> None:
    pool = Pool([40], torch.float32)
    metadata = pool.describe(selector)
    pool.entries.mul_(7.0)
    selector.describe(1, pool.entries, pool.slots(0)[:-1], metadata)
    pool.entries.div_(7.0)
    selector.describe(1, pool.entries, pool.slots(0)[:-1], metadata)
    described = pool.slots(0)[:-1].long() // selector.metadata.tokens_per_row
    assert torch.equal(metadata[described], pool.describe(selector)[described])


def test_layers_have_their_own_calibration(kernels: Kernels, files: dict[str, Path]) -> None:
    pool = Pool([200], torch.float32)
    for name in NEEDS_CALIBRATION:
        selector = opened(name, kernels, files, 0.2)
        assert pool.select(selector, layer=0) != pool.select(selector, layer=1)


@pytest.mark.parametrize("page_size", [1, 2, 4, 64])
def test_any_page_size_selects_the_same(kernels: Kernels, files: dict[str, Path], page_size: int) -> None:
    """Where runs of keys are not cut shorter by the page."""
    for name in SELECTORS:
        if name == "quest" and page_size < SPAN:
            continue
        wanted, found = Pool([70], torch.float32), Pool([70], torch.float32, page_size=page_size)
        found.entries[found.slots(0).long()] = wanted.entries[wanted.slots(0).long()]
        found.query = wanted.query
        assert found.select(opened(name, kernels, files, 0.3, page_size)) == wanted.select(
            opened(name, kernels, files, 0.3)
        )


def test_quest_works_with_pages_smaller_than_its_runs(kernels: Kernels, files: dict[str, Path]) -> None:
    pool = Pool([70, 3], torch.float32, page_size=4)
    assert [len(row) for row in pool.select(opened("quest", kernels, files, 0.3, 4))] == [21, 21, 1, 1]


def test_both_kernels_select_alike(files: dict[str, Path]) -> None:
    """But for scores that rounding of tables makes equal or swaps: at most one position in a row."""
    native, reference = NativeKernels(2), ReferenceKernels()
    pool = Pool([500, 3, 77], torch.bfloat16)
    for name in SELECTORS:
        shape = shape_of(torch.bfloat16)
        ours, plain = (
            pool.select(open_selector(name, shape=shape, ratio=0.2, kernels=k, calibration=files.get(name)))
            for k in (native, reference)
        )
        for one, other in zip(ours, plain, strict=True):
            assert len(set(one) - set(other)) <= 1


def test_fingerprints_tell_parameters_apart(kernels: Kernels, files: dict[str, Path], tmp_path: Path) -> None:
    seen = {opened(name, kernels, files, ratio).fingerprint for name in SELECTORS for ratio in (0.1, 0.2)}
    assert len(seen) == 2 * len(SELECTORS)
    arrays = arrays_of("hata")
    arrays["bias"][0, 0, 0, 0] += 1
    save(tmp_path / "hata", "hata", "model", arrays)
    assert opened("hata", kernels, {"hata": tmp_path / "hata"}, 0.2).fingerprint not in seen
    assert opened("hata", kernels, files, 0.2).fingerprint in seen


# ---- errors


@pytest.mark.parametrize("name", sorted(NEEDS_CALIBRATION))
def test_a_calibration_that_does_not_fit_is_refused(files: dict[str, Path], name: str, tmp_path: Path) -> None:
    kernels = ReferenceKernels()
    fix = f"narrows profile hash --select {name}"

    def refused(path: Path | None, what: str, shape: SelectorShape | None = None) -> None:
        with pytest.raises(ConfigError, match=what) as error:
            open_selector(name, shape=shape or shape_of(torch.float32), ratio=0.2, kernels=kernels, calibration=path)
        assert fix in str(error.value)

    refused(None, "needs a calibration")
    refused(tmp_path / "none", "there is no calibration file")
    (tmp_path / "half").write_bytes(files[name].read_bytes()[:-100])
    refused(tmp_path / "half", "truncated")
    other = next(iter(NEEDS_CALIBRATION - {name}))
    refused(files[other], f"a calibration of {other}")
    refused(files[name], "another model", SelectorShape(LAYERS, HEADS, KV_HEADS, DIM, PAGE, torch.float32, "other"))
    refused(files[name], "does not fit the model", SelectorShape(3, HEADS, KV_HEADS, DIM, PAGE, torch.float32))
    refused(files[name], "does not fit the model", SelectorShape(LAYERS, HEADS, KV_HEADS, 32, PAGE, torch.float32))
    same = SelectorShape(LAYERS, HEADS, KV_HEADS, DIM, PAGE, torch.float32, "model")
    open_selector(name, shape=same, ratio=0.2, kernels=kernels, calibration=files[name])


def test_unknown_names_and_ratios_are_refused() -> None:
    shape, kernels = shape_of(torch.float32), ReferenceKernels()
    with pytest.raises(ConfigError, match=r"'h2o' is unknown.*exact, quest"):
        open_selector("h2o", shape=shape, ratio=0.2, kernels=kernels)
    for ratio in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="select_ratio"):
            open_selector("exact", shape=shape, ratio=ratio, kernels=kernels)
