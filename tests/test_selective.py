"""Selective hand-over changes when KV crosses, and nothing else: the tokens are those of the same selector with all KV
there, whatever the scheme, the transport, the order of events and what goes wrong on the way."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from narrows.attention.base import PagedAttention
from narrows.config import EngineConfig
from narrows.core.events import EventKind
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.request import FinishReason, Request, SamplingParams
from narrows.core.scheme import SCHEMES, Scheme
from narrows.metrics.definitions import check_lifetime, measure
from narrows.models.layers.decoder import Model
from narrows.models.spec import read_spec
from narrows.profile.importance import Group, ImportanceProfile
from narrows.profile.timing import Timing
from narrows.runtime.build import build_model
from narrows.runtime.handing import Handing
from narrows.runtime.sizing import plan_sizes
from narrows.testing.cluster import MemoryCluster
from narrows.testing.faults import Faults, FaultyTransport
from narrows.testing.models import tiny_model
from narrows.testing.selectors import PlainSelector

CONFIG = EngineConfig(
    dtype="bfloat16",  # with the kernels whose rows do not depend on the other rows of a step, to the bit
    kernels="native",
    max_model_len=160,
    page_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    kv_cache_memory_bytes=8 * 2**20,
)
LAYERS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PUSHED = 0.5  # of the KV blocks, before decode begins: what else is needed must be fetched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> "Loaded":
    return build_model(CONFIG, str(folder), plan_sizes(CONFIG, read_spec(folder)))


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 7 + i * i) % 256 for i in range(length))


def requests(*lengths: int) -> list[Request]:
    return [Request(RequestId(f"r{i}"), prompt(i, n), replace(GREEDY, seed=i)) for i, n in enumerate(lengths)]


def profile(selector: str) -> ImportanceProfile:
    matrix = np.random.default_rng(0).random((LAYERS, 100), dtype=np.float32)
    matrix[:2] = np.inf
    return ImportanceProfile("tiny", selector, 1, (Group(100, matrix),))


def handing(scheme: Scheme, *, ratio: float = 0.25, looks_ahead: bool = False, head_dim: int) -> Handing:
    selector = PlainSelector(head_dim, ratio=ratio, looks_ahead=looks_ahead)
    timing = Timing("tiny", "test", 1, 0.0, 1e-4, 0.0)
    return Handing(scheme, selector, profile(selector.fingerprint), timing, patience_s=2.0)


def selective(name: str) -> Scheme:
    scheme = SCHEMES[name]
    return scheme if scheme.full else replace(scheme, adaptive=False, fraction=PUSHED)


BATCH = (90, 33, 3, 120)
Loaded = tuple[Model, PagedAttention]


def slow(seed: int = 0) -> Callable[[], int]:
    """A link that moves a few frames of a KiB in each turn, or none: every path is late, in every order."""
    random = Random(seed)
    return lambda: random.choice((0, 1, 2, 6))


def assert_nothing_is_held(cluster: MemoryCluster) -> None:
    check_lifetime(cluster.events)
    for name, instance in cluster.instances.items():
        load = instance.phase.load()
        assert (load.used_pages, load.running, load.waiting) == (0, 0, 0), name


@pytest.fixture(scope="module")
def local(folder: Path, loaded: Loaded) -> Callable[..., list[tuple[int, ...]]]:
    """Tokens of the same selector with all KV there, by selector settings and requests."""

    @cache
    def tokens(config: EngineConfig, lengths: tuple[int, ...], **settings: Any) -> list[tuple[int, ...]]:
        full = handing(SCHEMES["full"], head_dim=loaded[0].spec.head_dim, **settings)
        with MemoryCluster(config, folder, loaded=loaded, handing=full) as cluster:
            return cluster.generate(requests(*lengths))

    return tokens


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", ["auto", "selective", "sequential", "random", "streaming", "partial"])
def test_no_scheme_changes_a_token(folder: Path, loaded: Loaded, local: Any, name: str, looks_ahead: bool) -> None:
    some = handing(selective(name), looks_ahead=looks_ahead, head_dim=loaded[0].spec.head_dim)
    with MemoryCluster(CONFIG, folder, loaded=loaded, handing=some, frames=slow()) as cluster:
        assert cluster.generate(requests(*BATCH)) == local(CONFIG, BATCH, looks_ahead=looks_ahead)
        found = measure(cluster.events)
        assert sum(fetched for m in found.values() for _, fetched in m.on_demand) > 0, "nothing was remote"
        assert_nothing_is_held(cluster)


@pytest.mark.parametrize(
    ("transport", "seed"), [*(("loopback", seed) for seed in range(6)), ("tcp", 6), ("tcp", 7), ("shm", 8), ("shm", 9)]
)
def test_no_delay_changes_a_token(folder: Path, loaded: Loaded, local: Any, transport: str, seed: int) -> None:
    """Random delays of frames and of events, both sides, with what the scheme leaves open drawn too."""
    random = Random(seed)
    scheme = replace(
        selective(random.choice(["selective", "random", "streaming"])),
        fraction=random.choice([0.0, 0.3, 0.9]),
        parallel_lanes=random.random() < 0.7,
        packed=random.random() < 0.6,
        speculative=random.choice([0.0, 0.1, 1.0, None]),
    )
    some = replace(handing(scheme, looks_ahead=True, head_dim=loaded[0].spec.head_dim), staged=random.random() < 0.5)
    faults = Faults(delay=0.3, reorder=0.5)
    with MemoryCluster(
        CONFIG if transport == "loopback" else replace(CONFIG, link_gbps=0.004),
        folder,
        transport=transport,
        loaded=loaded,
        handing=some,
        frames=slow(seed) if transport == "loopback" else None,
        wrap=lambda _, transport: FaultyTransport(transport, faults, seed),
    ) as cluster:
        assert cluster.generate(requests(*BATCH)) == local(CONFIG, BATCH, looks_ahead=True)
        assert_nothing_is_held(cluster)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("staged", [False, True])
def test_no_transport_or_machine_mode_changes_a_token(
    folder: Path, loaded: Loaded, local: Any, transport: str, staged: bool
) -> None:
    some = replace(handing(selective("selective"), looks_ahead=True, head_dim=loaded[0].spec.head_dim), staged=staged)
    config = replace(CONFIG, link_gbps=0.004)
    with MemoryCluster(config, folder, transport=transport, loaded=loaded, handing=some) as cluster:
        assert cluster.generate(requests(*BATCH)) == local(CONFIG, BATCH, looks_ahead=True)
        assert sum(fetched for m in measure(cluster.events).values() for _, fetched in m.on_demand) > 0
        assert_nothing_is_held(cluster)


def test_everything_selected_is_dense_attention(folder: Path, loaded: Loaded) -> None:
    """Ratio 1.0, half of the KV fetched on demand: the tokens of the engine without a selector, in float32."""
    config = replace(CONFIG, dtype="float32", kernels="reference")
    dense = build_model(config, str(folder), plan_sizes(config, read_spec(folder)))
    lengths = (40, 3, 60)
    with MemoryCluster(config, folder, loaded=dense) as cluster:
        want = cluster.generate(requests(*lengths))
    some = handing(selective("selective"), ratio=1.0, head_dim=loaded[0].spec.head_dim)
    with MemoryCluster(config, folder, loaded=dense, handing=some, frames=slow()) as cluster:
        assert cluster.generate(requests(*lengths)) == want


def test_a_fast_link_makes_it_a_full_hand_over(folder: Path, loaded: Loaded) -> None:
    """Equation 2 with Tt far below Tp: adaptive schemes wait for everything and fetch nothing."""
    some = handing(SCHEMES["auto"], head_dim=loaded[0].spec.head_dim)
    slow_prefill = replace(some, timing=Timing("tiny", "test", 1, 1000.0, 0.0, 0.0))
    with MemoryCluster(CONFIG, folder, loaded=loaded, handing=slow_prefill) as cluster:
        cluster.generate(requests(90, 120))
        delivered = [d for m in measure(cluster.events).values() for d in m.delivered]
        assert [d.full for d in delivered] == [True, True]
        assert all(d.on_demand_bytes == d.speculative_bytes == d.metadata_bytes == 0 for d in delivered)


def test_several_prefill_instances_and_cached_prefixes(folder: Path, loaded: Loaded, local: Any) -> None:
    config = replace(CONFIG, prefill=2)
    some = handing(selective("selective"), looks_ahead=True, head_dim=loaded[0].spec.head_dim)
    with MemoryCluster(config, folder, loaded=loaded, handing=some, frames=slow()) as cluster:
        want = local(CONFIG, BATCH, looks_ahead=True)
        assert cluster.generate(requests(*BATCH)) == want
        again = [replace(request, id=RequestId(f"again-{request.id}")) for request in requests(*BATCH)]
        assert cluster.generate(again) == want
        found = measure(cluster.events)
        assert sum(found[request.id].cached_tokens for request in again) > 0
        assert {e.instance for e in cluster.events if e.kind is EventKind.PREFILL_STARTED} == {"prefill-0", "prefill-1"}
        assert_nothing_is_held(cluster)


@pytest.mark.parametrize("after", range(0, 40, 3))
def test_an_abort_in_any_state_gives_every_page_back(folder: Path, loaded: Loaded, local: Any, after: int) -> None:
    some = handing(selective("selective"), looks_ahead=True, head_dim=loaded[0].spec.head_dim)
    with MemoryCluster(CONFIG, folder, loaded=loaded, handing=some, frames=slow(after)) as cluster:
        for request in requests(120, 33):
            cluster.submit(request)
        for _ in range(after):
            cluster.turn()
        cluster.abort("r0")
        cluster.run()
        assert cluster.ending("r0") in (FinishReason.ABORT, FinishReason.LENGTH)
        assert cluster.tokens("r1") == local(CONFIG, (120, 33), looks_ahead=True)[1]
        assert_nothing_is_held(cluster)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("after", [4, 9, 14, 20, 28])
def test_a_lost_instance_changes_no_token(folder: Path, loaded: Loaded, local: Any, victim: str, after: int) -> None:
    """Also prefill, lost while decode still lacks KV of it: the request is computed again."""
    some = handing(selective("selective"), looks_ahead=True, head_dim=loaded[0].spec.head_dim)
    with MemoryCluster(CONFIG, folder, loaded=loaded, handing=some, frames=slow(after)) as cluster:
        for request in requests(*BATCH):
            cluster.submit(request)
        for _ in range(after):
            cluster.turn()
        cluster.kill(InstanceId(victim))
        cluster.start(InstanceId(victim), Role(victim.partition("-")[0]))
        cluster.run()
        again = {event.request for event in cluster.events if event.kind is EventKind.PREEMPTED}
        assert again or victim == "prefill-0"
        for request, want in zip(requests(*BATCH), local(CONFIG, BATCH, looks_ahead=True), strict=True):
            assert cluster.ending(request.id) is FinishReason.LENGTH
            assert cluster.tokens(request.id) == want
        assert_nothing_is_held(cluster)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_and_missing_answers_are_never_answered_from(
    folder: Path, loaded: Loaded, local: Any, seed: int
) -> None:
    """Posts lost, notes and messages with flipped bits: each request ends well with the right tokens, or with an error
    and some of them."""
    faults = Faults(drop=0.05, corrupt=0.05)
    some = replace(handing(selective("selective"), looks_ahead=True, head_dim=loaded[0].spec.head_dim), patience_s=0.2)
    with MemoryCluster(
        CONFIG,
        folder,
        loaded=loaded,
        handing=some,
        frames=slow(seed),
        wrap=lambda _, transport: FaultyTransport(transport, faults, seed),
    ) as cluster:
        for request in requests(*BATCH):
            cluster.submit(request)
        cluster.run()
        for request, want in zip(requests(*BATCH), local(CONFIG, BATCH, looks_ahead=True), strict=True):
            tokens = cluster.tokens(request.id)
            if cluster.ending(request.id) is FinishReason.ERROR:
                assert "gave up" in (cluster.outputs[request.id][-1].error or "")
            else:
                assert cluster.ending(request.id) is FinishReason.LENGTH and len(tokens) == len(want)
            assert tokens == want[: len(tokens)]
        assert_nothing_is_held(cluster)


def test_a_full_pool_preempts_and_the_tokens_stay_the_same(folder: Path, loaded: Loaded, local: Any) -> None:
    """Also those that decode had computed from a selection: they are decoded again, not prefilled."""
    lengths = (70, 40, 40)
    token_bytes = plan_sizes(CONFIG, read_spec(folder)).layout.token_bytes * LAYERS
    small = replace(CONFIG, kv_cache_memory_bytes=176 * token_bytes)
    some = handing(selective("selective"), looks_ahead=True, head_dim=loaded[0].spec.head_dim)
    with MemoryCluster(small, folder, loaded=loaded, handing=some, frames=slow()) as cluster:
        assert cluster.generate(requests(*lengths)) == local(CONFIG, lengths, looks_ahead=True)
        assert any(event.kind is EventKind.PREEMPTED for event in cluster.events)
        assert_nothing_is_held(cluster)


def test_who_has_all_its_kv_does_not_wait_for_who_has_not(folder: Path, loaded: Loaded, local: Any) -> None:
    """A request with all its KV goes on while another, on a link that hardly moves, waits for a single step."""
    some = handing(selective("selective"), looks_ahead=True, head_dim=loaded[0].spec.head_dim)
    rate = [1000]
    with MemoryCluster(CONFIG, folder, loaded=loaded, handing=some, frames=lambda: rate[0]) as cluster:
        first, second = requests(90, 120)
        first = replace(first, params=replace(first.params, max_tokens=68))
        cluster.submit(first)
        while not any(e.kind is EventKind.DELIVERED for e in cluster.events):
            cluster.turn()
        cluster.submit(second)
        rate[0], counts, original = 4, list[int](), cluster.between

        def between(waiting: InstanceId) -> None:
            """From the first wait of the second request's first step on nothing moves for sixty turns."""
            cluster.deliver()
            counts.append(len(cluster.tokens("r0")))
            rate[0] = 0 if len(counts) < 60 else 10
            time.sleep(0.0 if rate[0] else 0.005)  # others' steps take at most as long as is waited
            original(waiting)

        cluster.between = between  # type: ignore[method-assign]
        cluster.run()
        assert counts[59] - counts[0] > 5, "one step of the other, several of its own"
        assert cluster.tokens("r1") == local(CONFIG, (90, 120), looks_ahead=True)[1]
        assert cluster.tokens("r0")[:12] == local(CONFIG, (90, 120), looks_ahead=True)[0]
        assert_nothing_is_held(cluster)
