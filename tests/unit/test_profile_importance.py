"""Importance matrices and orders against definitions written out token by token; files against damage."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from narrows.errors import ConfigError
from narrows.kv.blocks import block_edges, blocks_for
from narrows.profile.importance import VERSION, Group, ImportanceProfile
from narrows.profile.orders import on_demand_ratio, order_blocks
from narrows.profile.smoothing import smooth


def profile(*lengths: int, num_layers: int = 4, num_blocks: int = 8, seed: int = 0) -> ImportanceProfile:
    rng = np.random.default_rng(seed)
    counts = [rng.integers(0, 9, (num_layers, n)) for n in lengths]
    return ImportanceProfile("m", "s", VERSION, tuple(Group.from_counts(c, 8, num_blocks) for c in counts))


@given(st.integers(1, 5000), st.integers(1, 1100))
def test_blocks_cover_the_prompt_in_runs_of_equal_length(num_tokens: int, num_blocks: int) -> None:
    edges = block_edges(num_tokens, num_blocks)
    assert edges[0] == 0 and edges[-1] == num_tokens
    assert len(edges) - 1 == min(num_blocks, num_tokens)
    sizes = set(np.diff(edges).tolist())
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("num_tokens", "most", "expected"),
    [(1, 1024, 1), (8, 1024, 1), (9, 1024, 2), (2048, 1024, 256), (8192, 1024, 1024), (9999, 1024, 1024), (64, 3, 3)],
)
def test_blocks_of_short_prompts_are_no_smaller_than_eight_tokens(num_tokens: int, most: int, expected: int) -> None:
    assert blocks_for(num_tokens, most) == expected


def test_importance_is_the_mean_count_of_a_blocks_entries() -> None:
    # Equation 1 by hand: two KV heads, three steps, so 6 rows select; blocks of 2, 3 tokens.
    counts = np.array([[6, 6, 6, 6, 6], [0, 0, 0, 0, 0], [6, 3, 1, 2, 0], [0, 0, 0, 0, 6]])
    group = Group.from_counts(counts, num_queries=6, num_blocks=2)
    assert group.num_tokens == 5
    expected = [[math.inf] * 2, [math.inf] * 2, [9 / 2 / 6, 3 / 3 / 6], [0, 6 / 3 / 6]]
    np.testing.assert_allclose(group.matrix, expected, rtol=1e-6)
    assert group.matrix.dtype == np.float32


@pytest.mark.parametrize(
    ("num_tokens", "group"),
    [(1, 512), (512, 512), (1000, 512), (1024, 512), (1048, 2048), (2048, 2048), (4096, 2048), (4097, 8192)],
)
def test_the_most_similar_group_is_the_nearest_in_ratio(num_tokens: int, group: int) -> None:
    # Half way between 512 and 2048 is their geometric mean, 1024.
    assert profile(512, 2048, 8192).match(num_tokens).num_tokens == group


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
@settings(deadline=None)
def test_resampling_takes_the_mean_at_the_same_relative_position(columns: int, wanted: int, seed: int) -> None:
    made = profile(columns, num_blocks=columns, seed=seed)
    matrix = made.groups[0].matrix
    got = made.importance_for(columns, wanted)
    # Each column cut into `wanted` equal pieces, so that blocks are whole numbers of pieces.
    fine = np.repeat(matrix[2:].astype(np.float64), wanted, axis=1)
    expected = fine.reshape(len(fine), wanted, columns).mean(axis=2)
    np.testing.assert_allclose(got[2:], expected, rtol=1e-5, atol=1e-7)
    assert np.isinf(got[:2]).all() and got.shape == (4, wanted) and got.dtype == np.float32


def test_orders_are_permutations_with_the_first_two_layers_first() -> None:
    num_layers, num_blocks = 5, 7
    importance = profile(7, num_layers=num_layers, num_blocks=num_blocks).importance_for(7, num_blocks)
    for kind in ("profile", "sequential", "random", "streaming"):
        order = order_blocks(kind, importance, num_layers, num_blocks, seed=3)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(35))
        assert sorted(order[:14].tolist()) == list(range(14))
    assert order_blocks("sequential", None, num_layers, num_blocks).tolist() == list(range(35))


def test_profile_order_descends_and_ties_are_in_address_order() -> None:
    matrix = np.array([[np.inf] * 3, [np.inf] * 3, [0.5, 0.1, 0.9], [0.1, 0.9, 0.0]], dtype=np.float32)
    assert order_blocks("profile", matrix, 4, 3).tolist() == [0, 1, 2, 3, 4, 5, 8, 10, 6, 7, 9, 11]


def test_random_order_is_its_seed() -> None:
    orders = [order_blocks("random", None, 8, 16, seed=seed).tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_streaming_order_is_sinks_then_most_recent_first() -> None:
    # Layers 2 and 3 of six blocks: ids 12..17 and 18..23; four sinks each, then the last blocks backwards.
    order = order_blocks("streaming", None, 4, 6)[12:].tolist()
    assert order == [12, 18, 13, 19, 14, 20, 15, 21, 17, 23, 16, 22]
    assert order_blocks("streaming", None, 3, 2).tolist() == [0, 1, 2, 3, 4, 5]


def test_on_demand_ratio_by_hand() -> None:
    counts = np.array([[9, 9, 9], [9, 9, 9], [1, 2, 3], [0, 4, 0]])
    # Two blocks a layer, of 1 and 2 tokens; layer 2: 1 and 5, layer 3: 0 and 4.
    order = np.array([0, 1, 2, 3, 5, 4, 7, 6])
    assert on_demand_ratio(counts, order, 4) == 1.0
    assert on_demand_ratio(counts, order, 5) == 5 / 10
    assert on_demand_ratio(counts, order, 6) == 4 / 10
    assert on_demand_ratio(counts, order, 8) == 0.0


def test_no_order_beats_the_one_that_knows_the_counts() -> None:
    rng = np.random.default_rng(0)
    counts = rng.poisson(rng.gamma(0.3, 4.0, (6, 64)))
    own = ImportanceProfile("m", "s", VERSION, (Group.from_counts(counts, 1, 32),)).importance_for(64, 32)
    oracle = order_blocks("profile", own, 6, 32)
    for pushed in (65, 96, 130):
        best = on_demand_ratio(counts, oracle, pushed)
        others = [order_blocks(kind, None, 6, 32, seed=1) for kind in ("sequential", "random", "streaming")]
        assert all(best < on_demand_ratio(counts, order, pushed) for order in others)


@given(st.integers(1, 400), st.integers(0, 9))
@settings(deadline=None)
def test_smoothing_is_the_mean_of_a_window_that_narrows_towards_the_ends(num_tokens: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 50, (2, num_tokens))
    got = smooth(counts)
    for at in range(num_tokens):
        half = min(32, min(at, num_tokens - 1 - at) // 4)
        np.testing.assert_allclose(got[:, at], counts[:, at - half : at + half + 1].mean(axis=1))
    # What is sharp at the ends stays: the four sinks, the four most recent tokens.
    assert (got[:, :4] == counts[:, :4]).all() and (got[:, -4:] == counts[:, -4:]).all()
    np.testing.assert_allclose(smooth(np.full((1, num_tokens), 7)), 7.0)


# ---- files


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    made = profile(5, 100, 900)
    made.save(tmp_path / "new" / "p.safetensors")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["p.safetensors"]
    for model, selector in (("m", "s"), (None, None)):
        got = ImportanceProfile.load(tmp_path / "new" / "p.safetensors", model=model, selector=selector)
        assert (got.model, got.selector, got.version) == ("m", "s", VERSION)
        assert [g.num_tokens for g in got.groups] == [5, 100, 900]
        assert all((a.matrix == b.matrix).all() for a, b in zip(got.groups, made.groups, strict=True))


@pytest.mark.parametrize(("wrong", "named"), [({"model": "x"}, "another model"), ({"selector": "x"}, "another selec")])
def test_a_file_for_others_is_refused(tmp_path: Path, wrong: dict[str, str], named: str) -> None:
    profile(64).save(tmp_path / "p")
    with pytest.raises(ConfigError, match=named + r".*narrows profile importance"):
        ImportanceProfile.load(tmp_path / "p", **({"model": "m", "selector": "s"} | wrong))


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_no_damage_goes_unnoticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "p"
    profile(64).save(path)
    whole = path.read_bytes()
    if data.draw(st.booleans(), label="cut"):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    try:
        got = ImportanceProfile.load(path, model="m", selector="s")
    except ConfigError as error:
        ok = "narrows profile importance" in str(error)
    else:  # what changed was a blank between the header's fields
        ok = bool((got.groups[0].matrix == profile(64).groups[0].matrix).all())
    assert ok


def test_another_version_kind_or_no_profile_is_refused(tmp_path: Path) -> None:
    path, made = tmp_path / "p", profile(64)
    ImportanceProfile("m", "s", VERSION + 1, made.groups).save(path)
    with pytest.raises(ConfigError, match=f"version {VERSION + 1}, this program reads version {VERSION}; make it"):
        ImportanceProfile.load(path, model="m", selector="s")
    save_file({"x": np.zeros(3)}, path)
    with pytest.raises(ConfigError, match="no profile, not of importance"):
        ImportanceProfile.load(path, model="m", selector="s")
    with pytest.raises(ConfigError, match="there is no file"):
        ImportanceProfile.load(tmp_path / "none", model="m", selector="s")


def test_saving_replaces_whole_files_or_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "p"
    profile(64).save(path)
    with path.open("rb") as reader:  # who reads the old file goes on reading the old file
        profile(32).save(path)
        assert b'num_tokens\\": [64]' in reader.read()
    assert ImportanceProfile.load(path, model="m", selector="s").groups[0].num_tokens == 32
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"can not be written.*folder"):
        profile(64).save(tmp_path / "file" / "p")
