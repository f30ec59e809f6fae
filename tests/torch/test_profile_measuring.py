"""What profiles are measured by: the decode rows of a known text against decoding it token by token, planted selections
against their closed form, and the fitted prefill time against planted seconds."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from narrows.errors import ConfigError
from narrows.kernels.base import PagedBatch
from narrows.kernels.reference import ReferenceKernels
from narrows.kv.blocks import block_edges
from narrows.models.layers.decoder import Model
from narrows.models.load import load_model
from narrows.profile.measuring import timing
from narrows.profile.measuring.importance import NUM_ROWS, TextRun, fit_groups, measure_importance
from narrows.profile.measuring.steps import prefill_step
from narrows.profile.smoothing import smooth
from narrows.profile.timing import Work
from narrows.select.base import KVIndex, MetadataLayout
from narrows.testing.driver import make_batch
from narrows.testing.models import tiny_model

KERNELS = ReferenceKernels()
TEXT = [int(t) for t in np.random.default_rng(5).integers(0, 256, 600)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Steps this small only lose by more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tiny_model(tmp_path_factory.mktemp("m") / "tiny", num_hidden_layers=4)
    return load_model(folder, torch.float32, KERNELS)


class Largest:
    """The newest token and the quarter of the others whose keys score highest, in plain loops."""

    name, ratio, fingerprint = "largest", 0.25, "largest"
    metadata = MetadataLayout(16 * 4)  # the key itself

    def __init__(self, *, looks_ahead: bool = False) -> None:
        self.looks_ahead = looks_ahead

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        metadata[slots.long()] = entries[slots.long(), :, :16].contiguous().view(torch.uint8)

    def select(
        self, layer: int, query: Tensor, metadata: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> KVIndex:
        keys = metadata.view(torch.float32)
        rows = []
        for r, length in enumerate(batch.context_len.tolist()):
            at = torch.arange(length - 1)
            slots = batch.page_table[r, at // batch.page_size] * batch.page_size + at % batch.page_size
            for h in range(keys.shape[1]):
                scores = (query[r].view(keys.shape[1], -1, 16)[h] @ keys[slots, h].T).amax(0)
                best = scores.argsort(descending=True, stable=True)[: length // 4]
                rows.append([*sorted(best.tolist()), length - 1])
        return index_of(rows)


class Planted:
    """Selects the same positions whatever is asked, and the newest token."""

    name, ratio, fingerprint, looks_ahead = "planted", 1.0, "planted", False
    metadata = MetadataLayout(0)

    def __init__(self, chosen: Sequence[int]) -> None:
        self.chosen = chosen

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        pass

    def select(
        self, layer: int, query: Tensor, metadata: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> KVIndex:
        # The last layer's second head leaves one out: heads are counted each.
        rows = [
            [*self.chosen[: -1 if layer == 3 and h else None], length - 1]
            for length in batch.context_len.tolist()
            for h in range(2)
        ]
        return index_of(rows)


def index_of(rows: list[list[int]]) -> KVIndex:
    most = max(map(len, rows))
    return KVIndex(
        torch.tensor([row + [-1] * (most - len(row)) for row in rows], dtype=torch.int32),
        torch.tensor([len(row) for row in rows], dtype=torch.int32),
    )


class OneByOne:
    """Decode as it happens: one row a step, the newest key described after it; sums written out."""

    def __init__(self, model: Model, selector: Largest, num_tokens: int) -> None:
        self.model, self.selector, self.looks_ahead = model, selector, selector.looks_ahead
        self.entries = [torch.zeros(num_tokens, 2, 32) for _ in range(4)]
        self.metadata = [torch.zeros(num_tokens, 2, 64, dtype=torch.uint8) for _ in range(4)]
        self.pages = [list(range(num_tokens // 8))]
        self.foreseen: dict[int, Tensor] = {}
        self.sparse = False
        self.counts = np.zeros((4, num_tokens), dtype=np.int64)

    def step(self, tokens: Sequence[int], stop: int, *, sparse: bool) -> None:
        self.sparse = sparse
        batch = make_batch(self.pages, [stop], [len(tokens)], 8)
        self.model.forward(torch.tensor(tokens), self.entries, batch, self)
        for layer in range(4):
            self.selector.describe(layer, self.entries[layer], batch.slots, self.metadata[layer])

    def foresee(self, layer: int, query: Tensor, batch: PagedBatch, *, scale: float, window: int | None) -> None:
        self.foreseen[layer] = query

    def attend(
        self, layer: int, query: Tensor, entries: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> tuple[Tensor, Tensor]:
        if not self.sparse or layer < 2:
            return KERNELS.attend(query, entries, batch, scale=scale, window=window)
        by = self.foreseen[layer] if self.looks_ahead else query
        index = self.selector.select(layer, by, self.metadata[layer], batch, scale=scale, window=window)
        out = torch.zeros_like(query)
        for h in range(2):
            at = index.positions[h, : index.counts[h]].long()
            self.counts[layer, at] += 1
            for q in (2 * h, 2 * h + 1):
                weights = torch.softmax(entries[at, h, :16] @ query[0, q] * scale, 0)
                out[0, q] = weights @ entries[at, h, 16:]
        return out, torch.zeros(1, 4)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_decode_rows_select_what_decoding_token_by_token_selects(model: Model, looks_ahead: bool) -> None:
    selector = Largest(looks_ahead=looks_ahead)
    run = TextRun(model, KERNELS, selector, 120)
    run.prefill(TEXT[:75])
    got = run.decode(TEXT[75:87])
    slow = OneByOne(model, selector, 120)
    slow.step(TEXT[:75], 75, sparse=False)
    for at in range(75, 87):
        slow.step([TEXT[at]], at + 1, sparse=True)
    np.testing.assert_array_equal(got, slow.counts[:, :75])
    assert got[2:].sum() > 12 * 2 * 2 * 10  # a quarter of 75 and more, per row, head and layer
    # What was decoded leaves no trace in the prefill that goes on from there.
    run.prefill(TEXT[:100])
    fresh = TextRun(model, KERNELS, selector, 120)
    fresh.prefill(TEXT[:100])
    np.testing.assert_array_equal(run.decode(TEXT[100:110]), fresh.decode(TEXT[100:110]))


def test_importance_of_a_planted_selection_in_closed_form(model: Model) -> None:
    chosen = [0, 1, 40, 127]
    said: list[tuple[int, int]] = []
    made = measure_importance(
        model,
        KERNELS,
        Planted(chosen),
        TEXT,
        fingerprint="m",
        groups=(128, 200),
        num_blocks=64,
        num_prompts=2,
        prefix=[7],
        progress=lambda *done: said.append(done),
    )
    assert (made.model, made.selector, [g.num_tokens for g in made.groups]) == ("m", "planted", [128, 200])
    for group in made.groups:
        expected = np.zeros((4, group.num_tokens))
        expected[:2] = np.inf
        expected[2, chosen] = 1.0
        expected[3, chosen] = [1, 1, 1, 0.5]
        expected[2:] = smooth(expected[2:])
        starts = block_edges(group.num_tokens, 64)
        means = [expected[:, a:b].mean(axis=1) for a, b in pairwise(starts)]
        np.testing.assert_allclose(group.matrix, np.stack(means, axis=1), rtol=1e-6)
    assert said[-1] == (400, 400) and said == sorted(said)


def test_lengths_fit_the_model_and_the_text(model: Model) -> None:
    assert fit_groups((512, 100, 8192), 512) == [100, 512 - NUM_ROWS]
    assert fit_groups((512, 100), 512, 300) == [100, 300 - NUM_ROWS]
    with pytest.raises(ConfigError, match="text: 10 tokens are too few"):
        fit_groups((512,), 512, 10)
    with pytest.raises(ConfigError, match="groups: 0"):
        fit_groups((0, 5), 512)
    with pytest.raises(ConfigError, match=r"text: 300 tokens are too few for prompts of 400.*at most 236"):
        measure_importance(model, KERNELS, Planted([0]), TEXT[:300], fingerprint="m", groups=(400,))


def test_a_limit_ends_the_work_after_the_shortest_length(model: Model) -> None:
    made = measure_importance(model, KERNELS, Planted([0]), TEXT, fingerprint="m", groups=(64, 128, 256), limit_s=0.0)
    assert [group.num_tokens for group in made.groups] == [64]
    assert made.groups[0].matrix[2, 0] == 1.0


def test_steps_of_several_prompts_lie_one_after_another() -> None:
    batch = prefill_step([(3, 10), (0, 2)], 4)
    assert batch.query_start.tolist() == [0, 7, 9]
    assert batch.context_len.tolist() == [10, 2]
    assert batch.page_table.tolist() == [[0, 1, 2], [3, 0, 0]]
    assert batch.slots.tolist() == [3, 4, 5, 6, 7, 8, 9, 12, 13]
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (batch.max_query, batch.max_context, batch.is_decode) == (7, 10, False)


def test_timing_measures_every_kind_of_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that a model of known speed moves: 2 ms a step, 50 us a token, 1 us a position."""
    now = [0.0]

    class Timed:
        spec, max_positions, dtype = model.spec, 8192, torch.float32

        def forward(self, tokens: Tensor, entries: object, batch: PagedBatch, *_: object, logit_rows: Tensor) -> None:
            work = zip(batch.query_start.diff().tolist(), batch.context_len.tolist(), strict=True)
            attended = sum(sum(range(c - n + 1, c + 1)) for n, c in work)
            now[0] += 2e-3 + 50e-6 * len(tokens) + 1e-6 * attended

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    got = timing.measure_timing(Timed(), KERNELS, fingerprint="m", setup="s")  # type: ignore[arg-type]
    assert (got.step_s, got.token_s, got.attended_s) == pytest.approx((2e-3, 50e-6, 1e-6), rel=1e-6)
    assert (got.model, got.setup) == ("m", "s")


def test_timing_of_a_real_model_with_a_short_context(model: Model) -> None:
    said: list[tuple[int, int]] = []
    got = timing.measure_timing(model, KERNELS, fingerprint="m", setup="s", progress=lambda *d: said.append(d))
    assert 0 < got.prefill_s([Work(64, 64)]) < 10
    assert said[-1][0] == said[-1][1]
