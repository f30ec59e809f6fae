"""What goes next of a hand-over, and that everything goes exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.errors import TransportError
from narrows.kv.blocks import block_edges
from narrows.transfer.delivery import Delivery
from narrows.transfer.meter import LinkMeter
from narrows.transfer.positions import decode_positions, encode_positions
from narrows.transfer.staging import StagingRing

LAYERS, HEADS = 4, 2


def delivery(
    num_tokens: int, num_blocks: int, seed: int = 0
) -> tuple[Delivery, "np.ndarray[tuple[int], np.dtype[np.int64]]"]:
    edges = block_edges(num_tokens, num_blocks)
    blocks = len(edges) - 1
    rest = np.random.default_rng(seed).permutation(np.arange(2 * blocks, LAYERS * blocks))
    order = np.concatenate([np.arange(2 * blocks), rest])
    return Delivery(LAYERS, HEADS, edges, order), order


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 30), st.integers(0, 5))
def test_every_token_of_every_layer_goes_once_whatever_the_steps(
    tokens: int, blocks: int, batch: int, seed: int
) -> None:
    parcel, _ = delivery(tokens, blocks, seed)
    random = np.random.default_rng(seed)
    stored, sent = [0] * LAYERS, []
    while parcel.num_left:
        layer = int(random.integers(LAYERS))
        stored[layer] = min(tokens, stored[layer] + int(random.integers(1, 10)))
        parcel.store(layer, stored[layer])
        layers, positions, heads = parcel.take(batch, proactive=False)
        assert all(p < stored[int(at)] for at, p in zip(layers, positions, strict=True)), "not computed yet"
        sent += list(zip(layers.tolist(), positions.tolist(), heads.tolist(), strict=True))
    assert sorted(sent) == [(layer, p, h) for layer in range(LAYERS) for p in range(tokens) for h in range(HEADS)]


def test_blocks_go_in_their_order_and_only_those_to_be_pushed() -> None:
    parcel, order = delivery(12, 3)
    for layer in range(LAYERS):
        parcel.store(layer, 12)
    assert not len(parcel.take(4, proactive=True)[1]), "how many are to be pushed is not known yet"
    parcel.push(8)
    taken = []
    while len(found := parcel.take(4, proactive=True)[1]):
        assert len(found) == 4 * HEADS
        taken.append(parcel.pushed)
    assert len(taken) == 8 and parcel.num_left == 4
    # by hand: 3 blocks of 4 tokens a layer; the order after the first two layers is the one given
    layers, tokens, _ = parcel.take(4, proactive=False)
    assert (layers[0] * 3 + tokens[0] // 4) == order[8]


def test_a_small_budget_takes_one_block_and_a_large_one_all_that_fit() -> None:
    parcel, _ = delivery(30, 3)  # blocks of ten tokens
    for layer in range(LAYERS):
        parcel.store(layer, 30)
    assert [len(parcel.take(n, proactive=False)[1]) // HEADS for n in (1, 10, 19, 20, 35)] == [10, 10, 10, 20, 30]


def test_the_first_layers_alone_can_be_asked_for() -> None:
    parcel, _ = delivery(12, 3)
    parcel.store(1, 12)
    parcel.store(2, 12)
    layers, _, _ = parcel.take(1000, proactive=False, dense=True)
    assert set(layers.tolist()) == {1}
    assert not len(parcel.take(1000, proactive=False, dense=True)[1])
    parcel.store(0, 12)
    assert set(parcel.take(1000, proactive=False, dense=True)[0].tolist()) == {0}


def test_what_decode_fetched_is_left_out_and_what_crosses_twice_is_counted() -> None:
    parcel, _ = delivery(8, 2)
    for layer in range(LAYERS):
        parcel.store(layer, 8)
    every, some, none = np.arange(8), np.array([1, 2]), np.array([], dtype=np.int64)
    assert parcel.fetch(2, [some, some]) == 0
    assert parcel.fetch(3, [every, none]) == 0
    assert parcel.fetch(3, [np.array([0]), none]) == 1  # again
    sent: dict[int, list[tuple[int, int]]] = {layer: [] for layer in range(LAYERS)}
    while parcel.num_left:
        for layer, token, head in zip(*(part.tolist() for part in parcel.take(3, proactive=False)), strict=True):
            sent[layer].append((token, head))
    assert sorted(sent[2]) == [(t, h) for t in (0, 3, 4, 5, 6, 7) for h in range(HEADS)]
    assert sorted(sent[3]) == [(t, 1) for t in range(8)], "the other head has been fetched"
    assert len(sent[0]) == len(sent[1]) == 16
    assert parcel.fetch(0, [np.array([5]), none]) == 1, "it has been pushed"


def test_a_layer_taken_whole_leaves_out_what_was_sent() -> None:
    parcel, _ = delivery(10, 5)
    parcel.store(0, 6)
    assert parcel.take(2, proactive=False)[1].tolist() == [0] * HEADS + [1] * HEADS
    assert parcel.take_layer(0).tolist() == [2, 3, 4, 5]
    assert not len(parcel.take_layer(0)) and not len(parcel.take_layer(1))
    for layer in range(LAYERS):
        parcel.store(layer, 10)
    assert [len(parcel.take_layer(layer)) for layer in range(LAYERS)] == [4, 10, 10, 10]
    assert parcel.num_left == 0 and parcel.pushed == 20


# ---- positions


rows = st.integers(1, 300).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.sets(st.integers(0, n - 1)).map(sorted), min_size=HEADS, max_size=HEADS)
    )
)


@given(rows)
def test_positions_survive_their_code(case: tuple[int, list[list[int]]]) -> None:
    n, heads = case
    code = encode_positions([np.array(row, dtype=np.int64) for row in heads], n)
    assert [row.tolist() for row in decode_positions(code, HEADS, n)] == heads


def test_the_shortest_code_is_taken() -> None:
    """By hand: a head of 5 bytes; a bitmap of 8,000 positions is 1,000 bytes a head, a list 2 bytes a position and 4
    for each count; positions beyond 16 bits take 4."""
    n = 8000
    few, many = np.arange(0, 8000, 80), np.arange(0, 8000, 5)
    assert len(encode_positions([few, few], n)) == 5 + 8 + 2 * 100 * 2
    assert len(encode_positions([many, many], n)) == 5 + 2 * 1000
    assert len(encode_positions([np.arange(n)] * 2, n)) == 5
    assert len(encode_positions([few, few], 100_000)) == 5 + 8 + 2 * 100 * 4
    assert [row.tolist() for row in decode_positions(encode_positions([few, few], 100_000), 2, 100_000)] == [
        few.tolist()
    ] * 2


@pytest.mark.parametrize("cut", [0, 3, 5, 11, -1])
def test_damaged_positions_are_refused(cut: int) -> None:
    code = encode_positions([np.array([1, 2, 50]), np.array([7])], 100_000)
    with pytest.raises(TransportError, match="positions"):
        decode_positions(code[:cut] if cut >= 0 else code + b"\0\0\0\0", 2, 100_000)


def test_positions_of_another_prompt_or_beyond_it_are_refused() -> None:
    code = encode_positions([np.array([99])], 100)
    with pytest.raises(TransportError, match="100"):
        decode_positions(code, 1, 101)
    beyond = bytearray(code)
    beyond[-2:] = (100).to_bytes(2, "little")
    with pytest.raises(TransportError, match="fit"):
        decode_positions(bytes(beyond), 1, 100)


# ---- the staging ring


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 5)), max_size=60))
def test_pieces_in_use_never_overlap_and_the_ring_empties(steps: list[tuple[bool, int, int]]) -> None:
    ring, held = StagingRing(64), list[tuple[int, int]]()
    for give_back, size, which in steps:
        if give_back and held:
            ring.give_back(held.pop(which % len(held))[0])
            continue
        at = ring.take(size)
        if at is None:
            assert held, "an empty ring has room for all that fits it"
            continue
        assert at + size <= 64
        assert all(at + size <= other or other + n <= at for other, n in held)
        held.append((at, size))
    for at, _ in held:
        ring.give_back(at)
    assert ring.take(64) is not None


# ---- the link's rate


def test_the_rate_is_bytes_over_the_time_something_was_on_its_way() -> None:
    meter = LinkMeter()
    assert meter.bytes_per_s is None
    meter.sent(100_000, 10.0)
    meter.landed(100_000, 10.1)
    assert meter.bytes_per_s == pytest.approx(1e6)
    # A rest does not count, nor what is too little to tell latency from rate.
    meter.sent(1000, 50.0)
    meter.landed(1000, 50.5)
    assert meter.bytes_per_s == pytest.approx(1e6)
    # 0.4 of the newest sample: 1e6 + 0.4 * (2e6 - 1e6)
    meter.sent(200_000, 60.0)
    meter.landed(200_000, 60.1)
    assert meter.bytes_per_s == pytest.approx(1.4e6)


def test_a_long_stretch_is_judged_while_it_lasts_and_what_is_dropped_is_forgotten() -> None:
    meter = LinkMeter()
    meter.sent(1_000_000, 0.0)
    meter.landed(50_000, 0.05)
    assert meter.bytes_per_s == pytest.approx(1e6)
    meter.dropped(950_000)
    meter.sent(60_000, 9.0)
    meter.landed(60_000, 9.06)
    assert meter.bytes_per_s == pytest.approx(1e6)
