"""What algorithms learn of a model: the parts against brute force, files of a tiny model, recall on the bundled one."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from narrows.errors import ConfigError
from narrows.kernels import load as load_kernels
from narrows.kernels.reference import ReferenceKernels, rotate
from narrows.models.catalog import resolve
from narrows.models.fingerprint import folder_fingerprint
from narrows.models.layers.decoder import Model
from narrows.models.layers.rope import rope_tables
from narrows.models.load import load_model
from narrows.models.spec import read_spec
from narrows.profile.measuring import calibrate as calibrating
from narrows.profile.measuring.calibrate import FITS, calibrate, one_thread, pieces
from narrows.profile.measuring.hashes import begin, divergence, fit_hash
from narrows.profile.measuring.partial_keys import VALUES, k_means, parts, skew
from narrows.profile.measuring.recall import measure_recall
from narrows.profile.measuring.samples import SKIPPED, LayerSample, Sample, View, collect, views
from narrows.select.calibration import save
from narrows.select.registry import NEEDS_CALIBRATION, open_selector
from narrows.select.shape import SelectorShape
from narrows.testing.driver import Driver
from narrows.testing.models import tiny_model


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def correlated(*size: int, seed: int) -> Tensor:
    return normal(*size, seed=seed) @ normal(size[-1], size[-1], seed=seed + 100) + normal(size[-1], seed=seed + 200)


def test_skew_keeps_scores_and_uncorrelates() -> None:
    query, key = correlated(500, 8, seed=1), correlated(700, 8, seed=2)
    forward, backward, mean, spread = skew(query, key)
    left, right = query @ forward, (key - mean) @ backward
    torch.testing.assert_close(left @ right.T, query @ (key - key.mean(0)).T, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(
        right.T @ right / 700, torch.diag(spread**2), rtol=1e-2, atol=1e-2 * float(spread[0] ** 2)
    )
    torch.testing.assert_close(left.T @ left / 500, torch.eye(8), rtol=1e-2, atol=1e-2)
    assert spread.tolist() == sorted(spread.tolist(), reverse=True)


def test_parts_are_the_best_of_all_cuts() -> None:
    """Against every way to cut seven coordinates into at most three runs from the first on."""
    spread = torch.tensor([9.0, 7.0, 3.0, 2.5, 1.0, 0.9, 0.1])
    variance = spread.double().square()

    def loss(first: int, end: int) -> float:
        dims = end - first
        mean = float(variance[first:end].prod() ** (1 / dims))
        overhead = 2.4 if dims == 1 else 1.9 if dims == 2 else 1.5 if dims <= 6 else 1.3
        return min(float(variance[first:end].sum()), overhead * dims * mean * 2 ** (-8 / dims))

    def total(cuts: tuple[int, ...]) -> float:
        return sum(itertools.starmap(loss, itertools.pairwise((0, *cuts)))) + float(variance[cuts[-1] :].sum())

    best = min(total(cuts) for n in (1, 2, 3) for cuts in itertools.combinations(range(1, 8), n))
    found = parts(spread, 3)
    assert found[0][0] == 0 and all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert total(tuple(end for _, end in found)) == pytest.approx(best)


def test_k_means_finds_separate_heaps() -> None:
    middles = torch.arange(VALUES).float()[:, None] * 10
    points = (middles[:, None] + 0.1 * normal(VALUES, 50, 1)).flatten(0, 1)
    centres = k_means(points, torch.ones(len(points))).sort(0).values
    # Not every heap need get a centre of its own, but each centre lies in a heap or between two.
    lost = (points - centres.T).abs().min(1).values.square().mean()
    assert lost < points.var() / 100
    assert torch.equal(k_means(points, torch.ones(len(points))), k_means(points, torch.ones(len(points))))


def test_weighted_k_means_serves_what_weighs() -> None:
    points = torch.cat([normal(400, 2, seed=1), normal(400, 2, seed=2) + 50])
    weights = torch.cat([torch.ones(400), torch.full((400,), 1e-6)])
    centres = k_means(points, weights)
    near = torch.cdist(points, centres).min(1).values
    assert near[:400].mean() < 0.6


def test_views_are_the_prompt_further_along() -> None:
    """Keys and queries as the model would compute them at later positions: rotated, with the same scores."""
    rope = rope_tables(read_spec(resolve("smollm2-135m")).rope, 64, 1000)
    base_query, base_key = normal(300, 2, 64, seed=1), normal(300, 1, 64, seed=2)

    def rotated(x: Tensor, start: int) -> Tensor:
        at = slice(start, start + 300)
        return rotate(x, rope[0][at, None], rope[1][at, None])

    positions = torch.tensor([150, 299])
    query, key = rotated(base_query, 0), rotated(base_key, 0)
    sample = Sample(positions, (LayerSample(query[positions], query[positions], key),))
    first, second = views([sample], 0, rope, 2)
    torch.testing.assert_close(first.key[0], key[SKIPPED:, 0])
    torch.testing.assert_close(second.key[0], rotated(base_key, 700)[SKIPPED:, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(second.query[0], rotated(base_query, 700)[positions], rtol=1e-3, atol=1e-3)
    weights = first.attention(0.125)
    torch.testing.assert_close(second.attention(0.125), weights, rtol=1e-2, atol=1e-5)
    assert (weights[0, 0, :, 151 - SKIPPED :] == 0).all() and (weights[0, 0, :, : 151 - SKIPPED] > 0).all()


def test_training_a_hash_brings_its_attention_closer() -> None:
    key, query = correlated(1, 300, 16, seed=3), correlated(1, 40, 2, 16, seed=4)
    view = View(query, key, torch.full((40,), 300))
    start = begin([view], 32, torch.Generator().manual_seed(0))
    before = float(divergence(view, *start, 0.05))
    trained = fit_hash([view], 0.05)
    assert trained["encode"].shape == (1, 16, 32) and trained["bias"].shape == (1, 1, 32)
    after = float(divergence(view, trained["encode"], trained["bias"], trained["decode"], 0.05))
    least = float(-(view.attention(0.05) * view.attention(0.05).clamp(min=1e-30).log()).sum(-1).mean())
    assert after - least < 0.7 * (before - least)


def test_pieces_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "LONGEST", 100)
    monkeypatch.setattr(calibrating, "MOST", 250)
    assert list(map(len, pieces([range(90), range(30), range(130), range(300)]))) == [90, 100]
    assert list(map(len, pieces([range(1000)]))) == [100, 100]
    assert pieces([range(1000)])[1] == list(range(100, 200))
    assert pieces([range(30)]) == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_samples_are_what_the_model_stores(tiny: Path) -> None:
    """Keys as another run of the model leaves them in its pool."""
    kernels = ReferenceKernels()
    model = load_model(tiny, torch.float32, kernels)
    tokens = [int(x) for x in torch.randint(0, 250, (100,), generator=torch.Generator().manual_seed(1))]
    (sample,) = collect(model, kernels, [tokens, tokens[:10]], num_rows=7)
    assert len(sample.positions) == 7 and sample.positions[0] == 50 and sample.positions[-1] == 99
    driver = Driver(model, kernels, page_size=16)
    driver.step({0: tokens})
    pages = torch.tensor(driver._pages[0])
    slots = pages[torch.arange(100) // 16] * 16 + torch.arange(100) % 16
    for layer, entries in zip(sample.layers, driver.entries, strict=True):
        torch.testing.assert_close(layer.key, entries[slots, :, : layer.key.shape[2]])
        assert layer.query.shape == layer.foreseen.shape == (7, model.spec.num_heads, model.spec.head_dim)
    assert torch.equal(sample.layers[0].query, sample.layers[0].foreseen)
    assert not torch.equal(sample.layers[1].query, sample.layers[1].foreseen)


@pytest.mark.parametrize("name", sorted(NEEDS_CALIBRATION))
def test_a_file_is_made_and_serves(tiny: Path, tmp_path: Path, name: str) -> None:
    heard: list[tuple[int, int]] = []
    tokens = [int(x) for x in torch.randint(0, 250, (300,), generator=torch.Generator().manual_seed(1))]
    for out in (tmp_path / "a", tmp_path / "deeper" / "b"):
        calibrate(name, tiny, [tokens], out, lambda done, of: heard.append((done, of)), kernels=ReferenceKernels())
    one, other = load_file(tmp_path / "a"), load_file(tmp_path / "deeper" / "b")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert all(array.isfinite().all() for array in one.values())
    done = [one for one, _ in heard]
    assert done[: len(done) // 2] == list(range(1, heard[0][1] + 1))
    spec = read_spec(tiny)
    sizes = (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    shape = SelectorShape(*sizes, 16, torch.float32, folder_fingerprint(tiny))
    selector = open_selector(name, shape=shape, ratio=0.2, kernels=ReferenceKernels(), calibration=tmp_path / "a")
    assert selector.name == name

    content = bytearray((tmp_path / "a").read_bytes())
    content[-20] ^= 1
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged \(its checksum differs\); make one with"):
        open_selector(name, shape=shape, ratio=0.2, kernels=ReferenceKernels(), calibration=tmp_path / "a")


def test_what_can_not_be_calibrated_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exact needs no calibration; hata, infinigen, quest do"):
        calibrate("exact", tiny, [list(range(200))], tmp_path / "out")
    with pytest.raises(ConfigError, match="prompts: too short"):
        calibrate("hata", tiny, [list(range(100))], tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ---- the bundled model


@pytest.fixture(scope="module")
def bundled() -> tuple[Model, list[Sample], list[Sample]]:
    """Samples of prose to calibrate with and of source code to evaluate on, of the first layers and some others."""
    import argparse
    import pydoc_data.topics

    from narrows.server.tokenizer import Tokenizer

    kernels = load_kernels()
    folder = resolve("smollm2-135m")
    model, tokenizer = load_model(folder, torch.bfloat16, kernels), Tokenizer(folder)
    prose = tokenizer.encode("\n".join(pydoc_data.topics.topics.values()), add_special_tokens=False)
    code = tokenizer.encode(Path(argparse.__file__).read_text(), add_special_tokens=False)
    calibration = collect(model, kernels, [prose[:1024]], num_rows=128, foresight=False)
    evaluation = collect(model, kernels, [code[:1500]], num_rows=8)

    def some(samples: list[Sample]) -> list[Sample]:
        return [Sample(one.positions, (*one.layers[:2], *one.layers[2::4])) for one in samples]

    return model, some(calibration), some(evaluation)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("infinigen", 0.95), ("hata", 0.95), ("quest", 0.90)])
def test_recall_on_another_kind_of_text(
    bundled: tuple[Model, list[Sample], list[Sample]], tmp_path: Path, name: str, least: float
) -> None:
    model, calibration, evaluation = bundled
    spec = model.spec
    scale = spec.head_dim**-0.5
    rope = rope_tables(spec.rope, spec.head_dim, spec.max_positions)
    fit = partial(FITS[name], scale=scale)
    with one_thread():
        layers = [fit(views(calibration, layer, rope, 3)) for layer in range(len(evaluation[0].layers))]
        save(tmp_path / name, name, "", {key: torch.stack([part[key] for part in layers]) for key in layers[0]})
        shape = SelectorShape(len(layers), spec.num_heads, spec.num_kv_heads, spec.head_dim, 32, torch.bfloat16)
        selector = open_selector(name, shape=shape, ratio=0.2, kernels=load_kernels(), calibration=tmp_path / name)
        kept = measure_recall(selector, evaluation, page_size=32, scale=scale)
    assert kept.recall >= least
    assert kept.selected <= 0.201
    assert kept.best > 0.9


@pytest.mark.slow
def test_recall_of_exact_is_one_and_of_streaming_is_not(bundled: tuple[Model, list[Sample], list[Sample]]) -> None:
    model, _, evaluation = bundled
    spec = model.spec
    shape = SelectorShape(spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, 32, torch.bfloat16)
    recall = {
        name: measure_recall(
            open_selector(name, shape=shape, ratio=0.2, kernels=load_kernels()), evaluation, page_size=32, scale=0.125
        ).recall
        for name in ("exact", "streaming")
    }
    assert recall["exact"] == pytest.approx(1.0, abs=2e-3)
    assert recall["streaming"] < 0.9
