"""Whole runs: hand-overs by closed forms, bytes and events that add up, what is refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.core.events import EventKind
from narrows.core.scheme import SCHEMES
from narrows.errors import ConfigError
from narrows.metrics.definitions import check_lifetime, measure
from narrows.profile.timing import Work
from narrows.sched.registry import make_policy
from narrows.sim.ablations import DenseCollective, PiecewiseGraph
from narrows.sim.cluster_file import make_scenario
from narrows.sim.cost import Null, StepLoad
from narrows.sim.group import GroupShape
from narrows.sim.handover import HandOverModel
from narrows.sim.hardware import H200
from narrows.sim.model_shapes import DEEPSEEK_V3
from narrows.sim.report import row_of
from narrows.sim.roofline import Roofline
from narrows.sim.run import Outcome, PrefillShape, Setup, simulate
from narrows.sim.setup import make_setup
from narrows.sim.workload import Arrival

LAYERS, TOKEN_BYTES, METADATA_BYTES = 10, 100.0, 10.0
STEP_S = 0.7


@dataclass(frozen=True)
class Linear(Null):
    """The null cost with 0.1 s a phase, and prefill of a millisecond a token that is computed."""

    phase_s: float = 0.1

    def prefill_s(self, batch: Sequence[Work]) -> float:
        return 1e-3 * sum(work.uncached for work in batch)


def setup(arrivals: Sequence[Arrival], rate: float = math.inf, scheme: str = "full", **more: Any) -> Setup:
    prefill: dict[str, Any] = {"num_instances": 1, "num_pages": 1000, "page_size": 16, "max_num_batched_tokens": 1000}
    prefill |= more.pop("prefill", {})
    metadata = 0.0 if scheme == "full" else METADATA_BYTES
    model = HandOverModel(LAYERS, TOKEN_BYTES, metadata, SCHEMES[scheme], pieces=LAYERS, **more.pop("handover", {}))
    decode = GroupShape(more.pop("instances", 1), 8, 1000, 16, 64)
    shape = PrefillShape(Linear(), link_bytes_per_s=rate, handover=model, **prefill)
    return Setup(tuple(arrivals), Linear(), make_policy(more.pop("policy", "least-batch")), decode, shape, **more)


def when(outcome: Outcome, index: int, *kinds: EventKind) -> list[float]:
    return [e.time_s for e in outcome.lives[index].events() if e.kind in kinds]


def handed(outcome: Outcome, index: int) -> float:
    (time_s,) = when(outcome, index, EventKind.HANDOVER_DONE)
    return time_s


def test_an_unlimited_link_leaves_prefill_and_steps() -> None:
    outcome = simulate(setup([Arrival(1.0, 500, 3)]))
    assert when(outcome, 0, EventKind.PREFILL_STARTED) == [1.0]
    assert when(outcome, 0, EventKind.FIRST_TOKEN) == [1.5]
    assert handed(outcome, 0) == 1.5
    assert when(outcome, 0, EventKind.TOKEN) == pytest.approx([1.5 + STEP_S, 1.5 + 2 * STEP_S])
    check_lifetime(outcome.events())


@pytest.mark.parametrize("tt_over_tp", [0.1, 0.95, 1.0, 2.0, 6.5])
def test_full_transfer_layer_by_layer(tt_over_tp: float) -> None:
    """Layers are stored evenly over Tp and each takes Tt / L: all has crossed at Tp + Tt / L where the link is the
    faster, else at Tp / L + Tt."""
    num_tokens = 800
    tp, num_bytes = 0.8, LAYERS * TOKEN_BYTES * num_tokens
    tt = tt_over_tp * tp
    outcome = simulate(setup([Arrival(0.0, num_tokens, 2)], rate=num_bytes / tt))
    assert handed(outcome, 0) == pytest.approx(max(tp + tt / LAYERS, tp / LAYERS + tt))
    (delivered,) = [e.delivered for e in outcome.events() if e.delivered is not None]
    assert delivered.full
    assert delivered.proactive_bytes == delivered.num_bytes == num_bytes
    row = row_of(outcome, "least-batch", 50.0)
    assert row["prefill_busy"] == pytest.approx(tp / outcome.end_s)
    assert row["link_busy"] == pytest.approx(tt / outcome.end_s)


def test_two_on_one_link_share_it_in_order() -> None:
    """Both are computed in one step; the second layer of each crosses behind the first of both."""
    num_tokens, tt = 400, 4.0  # Tt of both together; Tp of both 0.8 s
    rate = 2 * LAYERS * TOKEN_BYTES * num_tokens / tt
    outcome = simulate(setup([Arrival(0.0, num_tokens, 2)] * 2, rate=rate))
    assert handed(outcome, 1) == pytest.approx(0.8 / LAYERS + tt)
    assert handed(outcome, 0) == pytest.approx(0.8 / LAYERS + tt - tt / 2 / LAYERS)


def test_selective_transfer_begins_with_metadata_and_the_first_layers() -> None:
    """Tt = 10 Tp: during prefill little crosses. Decode begins when the metadata and layers 0 and 1 have."""
    num_tokens = 800
    tp, kv = 0.8, LAYERS * TOKEN_BYTES * num_tokens
    metadata = (LAYERS - 2) * METADATA_BYTES * num_tokens
    rate = (kv + metadata) / (10 * tp)
    outcome = simulate(setup([Arrival(0.0, num_tokens, 40)], rate=rate, scheme="selective"))
    full = simulate(setup([Arrival(0.0, num_tokens, 40)], rate=rate))
    must = 2 * TOKEN_BYTES * num_tokens + metadata
    # from the first layer on the link is busy, and nothing but `must` and blocks that were on their way crosses
    assert handed(outcome, 0) >= tp / LAYERS + must / rate - 1e-9
    assert handed(outcome, 0) <= max(tp, tp / LAYERS + must / rate) + 0.5 * tp
    assert handed(outcome, 0) < 0.4 * handed(full, 0)
    (delivered,) = [e.delivered for e in outcome.events() if e.delivered is not None]
    assert not delivered.full
    assert delivered.metadata_bytes == pytest.approx(metadata)
    assert delivered.transfer_s == pytest.approx(10 * tp)
    assert delivered.prefill_s == pytest.approx(tp)


def test_all_kv_crosses_once_in_the_end() -> None:
    """Fetched entries cross packed in three quarters of their bytes; with that undone the paths add up to all KV."""
    num_tokens = 800
    kv = LAYERS * TOKEN_BYTES * num_tokens
    outcome = simulate(setup([Arrival(0.0, num_tokens, 400)], rate=kv / 6.0, scheme="selective"))
    (delivered,) = [e.delivered for e in outcome.events() if e.delivered is not None]
    crossed = delivered.proactive_bytes + delivered.speculative_bytes + delivered.on_demand_bytes / 0.75
    assert crossed - delivered.wasted_bytes == pytest.approx(kv, abs=4)  # each path's is rounded
    assert delivered.wasted_bytes < 1e-3 * kv  # was fetched while the same was granted
    assert delivered.on_demand_bytes > 0
    ratios = [ratio for measured in outcome.metrics() for ratio in measured.on_demand_ratio]
    assert ratios[0] <= 0.1 + 1e-3
    assert ratios[-1] == 0.0
    assert ratios == sorted(ratios, reverse=True)
    check_lifetime(outcome.events())


def test_a_step_waits_for_what_it_fetches_beyond_attention() -> None:
    num_tokens = 1000
    kv = LAYERS * TOKEN_BYTES * num_tokens
    handover = {"select_ratio": 0.5, "on_demand_ratio": 1.0}
    arrivals = [Arrival(0.0, num_tokens, 10)]
    for scheme in ("selective", "partial"):
        outcome = simulate(setup(arrivals, rate=kv / 20.0, scheme=scheme, handover=handover))
        first = next(e for e in outcome.events() if e.kind is EventKind.TOKEN)
        fetch_s = first.fetched * TOKEN_BYTES * (0.75 if scheme == "selective" else 1.0) / (kv / 20.0)
        # Beside attention (0.1 s) with parallel lanes, before it without; the link may be in the midst of a block.
        exposed_s = fetch_s - 0.1 if scheme == "selective" else fetch_s
        block_s = 64 * 1024 / (kv / 20.0)
        took = first.time_s - handed(outcome, 0)
        assert STEP_S + exposed_s - 1e-6 <= took <= STEP_S + exposed_s + block_s


def test_a_fast_link_makes_auto_full() -> None:
    for rate, full in ((1e12, True), (1e5, False)):
        outcome = simulate(setup([Arrival(0.0, 800, 3)], rate=rate, scheme="auto"))
        assert [e.delivered.full for e in outcome.events() if e.delivered is not None] == [full]


def test_prefixes_of_the_trace_are_found_again() -> None:
    """Two blocks of 512 tokens are shared; pages of 16 tokens, so all of them."""
    first = Arrival(0.0, 1500, 2, (1, 2, 3))
    second = Arrival(10.0, 1400, 2, (1, 2, 4))
    again = Arrival(20.0, 1500, 2, (1, 2, 3))
    outcome = simulate(setup([first, second, again]))
    cached = [e.cached_tokens for e in outcome.events() if e.kind is EventKind.FIRST_TOKEN]
    assert cached == [0, 1024, 1488]  # of its own 1,500, all whole pages but what is left to compute
    assert when(outcome, 1, EventKind.FIRST_TOKEN) == pytest.approx([10 + 1e-3 * (1400 - 1024)])
    without = simulate(setup([first, second], prefill={"reuse_prefixes": False}))
    assert [e.cached_tokens for e in without.events() if e.kind is EventKind.FIRST_TOKEN] == [0, 0]


def test_long_prompts_are_computed_in_chunks() -> None:
    # a budget of 1,000: the older one has at least half of it, the short one its 300, the older one the rest; the
    # third has no pages before that leaves something of a step
    outcome = simulate(setup([Arrival(0.0, 900, 1), Arrival(0.0, 300, 1), Arrival(0.0, 2500, 1)]))
    # steps: 700 + 300, 200 + 800, 1,000, 700
    ends = [when(outcome, i, EventKind.FIRST_TOKEN)[0] for i in range(3)]
    assert ends == pytest.approx([2.0, 1.0, 3.7])
    assert when(outcome, 2, EventKind.PREFILL_STARTED) == pytest.approx([1.0])


TRACES = st.lists(
    st.tuples(st.integers(0, 3000), st.integers(1, 900), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=12
).map(
    lambda items: sorted(
        (Arrival(t / 1000, n, out, (shared, 100 + shared)[: -(-n // 512)]) for t, n, out, shared in items),
        key=lambda arrival: arrival.time_s,
    )
)


@settings(deadline=None, max_examples=60)
@given(
    TRACES,
    st.sampled_from(["full", "selective", "partial", "auto"]),
    st.sampled_from([1e5, 1e6, math.inf]),
    st.booleans(),
    st.sampled_from([40, 1000]),
)
def test_whatever_comes_ends_well(
    arrivals: list[Arrival], scheme: str, rate: float, lock_step: bool, prefill_pages: int
) -> None:
    """Every request has all its tokens and one ending, all pages come back, and a second run is the same."""
    pages = max(prefill_pages, 64)
    made = setup(
        arrivals,
        rate,
        scheme,
        lock_step=lock_step,
        instances=2,
        prefill={"num_instances": 2, "num_pages": pages, "max_num_batched_tokens": 256},
    )
    made = replace(made, decode=replace(made.decode, num_pages=120))
    outcome = simulate(made)
    check_lifetime(outcome.events())
    for life in outcome.lives:
        assert len(when(outcome, life.index, EventKind.FIRST_TOKEN, EventKind.TOKEN)) == life.arrival.num_output
    for group in outcome.groups:
        assert all(cache.pages.num_used == 0 for cache in group.caches)
        assert group.is_empty
    for instance in outcome.prefill:
        assert instance.cache.pages.num_used == 0
        assert instance.num_waiting == 0
    assert simulate(made).events() == outcome.events()
    assert outcome.metrics() == list(measure(outcome.events()).values())


def test_external_prefill_tells_the_first_token_at_arrival_or_admission() -> None:
    one = GroupShape(1, 1, 2, 4, 4)
    made = Setup((Arrival(0.0, 4, 3), Arrival(0.0, 4, 2)), Linear(), make_policy("least-batch"), one)
    late = replace(made, first_token_at_start=True)
    assert when(simulate(made), 1, EventKind.FIRST_TOKEN) == [0.0]
    assert when(simulate(late), 1, EventKind.FIRST_TOKEN) == pytest.approx([2 * STEP_S])


# ---- what is refused


def test_a_request_longer_than_the_cluster_is_named() -> None:
    made = setup([Arrival(0.0, 10, 2), Arrival(0.0, 15_990, 11)])
    with pytest.raises(ConfigError, match=r"request 2: input_length \+ output_length: 15990 \+ 11 tokens do not fit"):
        simulate(made)
    small = setup([Arrival(0.0, 700, 200)], prefill={"num_pages": 50})
    with pytest.raises(ConfigError, match=r"request 1: .* do not fit a prefill instance of 50 pages"):
        simulate(small)


def test_a_trace_without_requests() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        simulate(setup([]))


def test_a_policy_that_spreads_needs_steps_together() -> None:
    scenario = make_scenario(
        {"decode": {"lock_step": False}, "policy": {"name": "dual-balanced"}, "model": {"name": "Qwen3-8B"}}
    )
    with pytest.raises(ConfigError, match=r"policy\.name: 'dual-balanced' spreads"):
        make_setup(scenario)


def test_ratios_out_of_range() -> None:
    with pytest.raises(ConfigError, match=r"on_demand_ratio: 1\.5"):
        HandOverModel(2, 1.0, on_demand_ratio=1.5)
    with pytest.raises(ConfigError, match="pieces: 0"):
        HandOverModel(2, 1.0, pieces=0)


# ---- what NanoCP's data plane replaces


def test_a_dense_collective_exchanges_the_largest_batch_with_everyone() -> None:
    zero = np.zeros(4, np.int64)
    batch = np.array([3, 5, 2, 2])
    local = StepLoad.local(batch, batch * 100)
    inner = Roofline(H200, DEEPSEEK_V3)
    cost = DenseCollective(inner, per_node=2)
    assert cost.decode(local).total_s == inner.decode(local).total_s  # nobody is spread
    spread = replace(local, sent=np.array([1, 0, 0, 0]), received=np.array([0, 1, 0, 0]))
    expected = replace(local, sent=np.array([5, 5, 0, 0]), received=np.array([5, 5, 0, 0]))
    assert cost.decode(spread).total_s == inner.decode(expected).total_s
    assert (inner.decode(spread).moe.cp[2:] == zero[2:]).all()


def test_piecewise_graphs_cost_a_gap_a_layer() -> None:
    load = StepLoad.local(np.array([4, 4]), np.array([100, 100]))
    inner = Roofline(H200, DEEPSEEK_V3)
    slower = PiecewiseGraph(inner, 50e-6).decode(load).total_s
    assert slower == pytest.approx(inner.decode(load).total_s + 61 * 50e-6)
