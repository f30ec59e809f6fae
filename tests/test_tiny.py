"""The whole path in seconds: a two-layer model over prefill, hand-over and decode, equal to decoding in one place."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from narrows.attention.base import PagedAttention
from narrows.config import EngineConfig
from narrows.core.events import EventKind
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.request import FinishReason, Request, SamplingParams
from narrows.kernels.reference import ReferenceKernels
from narrows.metrics.definitions import check_lifetime, measure
from narrows.models.load import load_model
from narrows.testing.cluster import MemoryCluster
from narrows.testing.driver import Driver
from narrows.testing.faults import Faults, FaultyTransport
from narrows.testing.models import tiny_model
from narrows.transfer.base import Arrived, PeerName, Post, PostId, Transport, TransportEvent

CONFIG = EngineConfig(
    dtype="float32",
    kernels="reference",
    max_model_len=128,
    page_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    kv_cache_memory_bytes=2 * 2**20,
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cluster(folder: Path) -> Iterator[MemoryCluster]:
    with MemoryCluster(CONFIG, folder) as one:
        yield one


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 7 + i * i) % 256 for i in range(length))


def requests(*lengths: int, params: SamplingParams = GREEDY) -> list[Request]:
    return [Request(RequestId(f"r{i}"), prompt(i, n), replace(params, seed=i)) for i, n in enumerate(lengths)]


def expected(folder: Path, request: Request) -> tuple[int, ...]:
    """Greedy decoding of one request alone, all tokens of the prompt at once, no cluster."""
    import torch

    kernels = ReferenceKernels()
    driver = Driver(load_model(folder, torch.float32, kernels), kernels)
    return tuple(driver.greedy(request.prompt, request.params.max_tokens or 0))


def assert_nothing_is_held(cluster: MemoryCluster) -> None:
    for name, instance in cluster.instances.items():
        assert instance.phase.load().used_pages == 0, name
        assert instance.phase.load().running == instance.phase.load().waiting == 0, name
    check_lifetime(cluster.events)


def test_handed_over_decode_equals_decode_in_one_place(folder: Path, cluster: MemoryCluster) -> None:
    batch = requests(5, 70, 1, 33, 100, 8)
    assert cluster.generate(batch) == [expected(folder, request) for request in batch]
    assert_nothing_is_held(cluster)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_transport_does_not_change_the_tokens(folder: Path, cluster: MemoryCluster, transport: str) -> None:
    batch = requests(5, 70, 33)
    with MemoryCluster(CONFIG, folder, transport=transport, loaded=cluster.loaded) as other:
        assert other.generate(batch) == cluster.generate(batch)
        assert_nothing_is_held(other)


def test_several_instances_share_the_work_and_sampling_does_not_depend_on_where(
    folder: Path, cluster: MemoryCluster
) -> None:
    batch = requests(5, 70, 33, 20, 64, 2, params=replace(GREEDY, temperature=1.0, top_p=0.9))
    with MemoryCluster(replace(CONFIG, prefill=2, decode=2), folder, loaded=cluster.loaded) as wide:
        assert wide.generate(batch) == cluster.generate(batch)
        used = {e.instance for e in wide.events if e.kind in (EventKind.DECODE_STARTED, EventKind.PREFILL_STARTED)}
        assert used == {"prefill-0", "prefill-1", "decode-0", "decode-1"}


def test_the_first_token_is_computed_once_and_every_position_crosses_once(cluster: MemoryCluster) -> None:
    (request,) = requests(50)
    cluster.generate([request])
    layout = cluster.sizes.layout
    (metrics,) = measure(cluster.events).values()
    payload = 50 * layout.num_layers * (layout.token_bytes + layout.num_kv_heads)  # KV and its mask
    assert payload <= metrics.handover_bytes <= payload * 1.1 + 4096
    kinds = [event.kind for event in cluster.events]
    assert kinds.count(EventKind.FIRST_TOKEN) == 1
    assert kinds.count(EventKind.TOKEN) == 11


def test_a_known_prefix_is_not_computed_again(cluster: MemoryCluster) -> None:
    first, again = requests(60, 60)
    again = replace(again, prompt=(*first.prompt[:50], *prompt(9, 10)))
    tokens = [cluster.generate([one])[0] for one in (first, replace(first, id=RequestId("same")), again)]
    cached = [m.cached_tokens for m in measure(cluster.events).values()]
    assert cached == [0, 56, 48]  # whole pages of 8, and at least one token is computed
    assert tokens[0] == tokens[1]


def test_alike_prompts_that_come_together_are_computed_once(cluster: MemoryCluster) -> None:
    (first,) = requests(60)
    same = [replace(first, id=RequestId(f"n{i}"), params=replace(first.params, seed=i)) for i in range(3)]
    cluster.generate(same)
    assert sorted(m.cached_tokens for m in measure(cluster.events).values()) == [0, 56, 56]


def test_a_full_pool_preempts_and_the_tokens_stay_the_same(folder: Path, cluster: MemoryCluster) -> None:
    batch = requests(40, 40, 40, params=replace(GREEDY, max_tokens=60))
    token_bytes = cluster.sizes.layout.num_layers * cluster.sizes.layout.token_bytes
    small = replace(CONFIG, kv_cache_memory_bytes=160 * token_bytes)
    with MemoryCluster(small, folder, loaded=cluster.loaded) as tight:
        assert tight.generate(batch) == cluster.generate(batch)
        assert any(event.kind is EventKind.PREEMPTED for event in tight.events)
        assert_nothing_is_held(tight)


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("after", [2, 4, 6, 9])
def test_a_lost_instance_changes_no_token(folder: Path, cluster: MemoryCluster, victim: str, after: int) -> None:
    batch = requests(40, 70, 3)
    with MemoryCluster(CONFIG, folder, loaded=cluster.loaded) as faulty:
        for request in batch:
            faulty.submit(request)
        for _ in range(after):
            faulty.turn()
        faulty.kill(InstanceId(victim))
        faulty.start(InstanceId(victim), Role(victim.partition("-")[0]))
        faulty.run()
        assert [faulty.tokens(r.id) for r in batch] == cluster.generate(batch)
        assert_nothing_is_held(faulty)


@pytest.mark.parametrize("after", range(12))
def test_an_abort_in_any_state_gives_every_page_back(cluster: MemoryCluster, after: int) -> None:
    batch = requests(90, 20)
    for request in batch:
        cluster.submit(request)
    for _ in range(after):
        cluster.turn()
    cluster.abort("r0")
    cluster.run()
    assert cluster.ending("r0") in (FinishReason.ABORT, FinishReason.LENGTH)
    assert cluster.ending("r1") is FinishReason.LENGTH
    assert_nothing_is_held(cluster)


@pytest.mark.parametrize("chunk", [1, 3, 7, 32, 128])
def test_chunks_and_prefixes_change_no_bit_in_bfloat16(folder: Path, chunk: int) -> None:
    """With the fast kernels: a prompt's logprobs are the same bits whole, in chunks and behind a cached prefix."""
    config = replace(CONFIG, dtype="bfloat16", kernels="auto", max_num_batched_tokens=chunk)
    params = replace(GREEDY, max_tokens=1, logprobs=5)
    first = Request(RequestId("first"), prompt(3, 57), params)
    with (
        MemoryCluster(config, folder) as chunked,
        MemoryCluster(replace(config, max_num_batched_tokens=128), folder) as whole,
    ):
        for cluster in (whole, chunked):
            for name in ("first", "cached"):  # the second has one token left to compute
                cluster.generate([replace(first, id=RequestId(name))])
        want = whole.outputs["first"][0].tokens
        assert [c.outputs[n][0].tokens for c in (whole, chunked) for n in ("first", "cached")] == [want] * 4
        assert whole.outputs["cached"][0].cached_tokens == chunked.outputs["cached"][0].cached_tokens == 56


@pytest.mark.parametrize("seed", range(4))
def test_bad_luck_on_the_link_changes_no_token(folder: Path, cluster: MemoryCluster, seed: int) -> None:
    """Events late and out of order, some posts lost: what does not arrive is computed again."""
    faults = Faults(delay=0.3, reorder=0.5, drop=0.02)

    def wrap(name: InstanceId, transport: Transport) -> Transport:
        return FaultyTransport(transport, faults, seed) if name.startswith("prefill") else transport

    batch = requests(40, 70, 3)
    with MemoryCluster(CONFIG, folder, loaded=cluster.loaded, wrap=wrap) as unlucky:
        for request in batch:
            unlucky.submit(request)
        unlucky.run()
        for request, tokens in zip(batch, cluster.generate(batch), strict=True):
            gave_up = unlucky.ending(request.id) is FinishReason.ERROR
            assert unlucky.tokens(request.id) == (tokens[: len(unlucky.tokens(request.id))] if gave_up else tokens)
        assert_nothing_is_held(unlucky)


def test_a_damaged_hand_over_is_not_answered_from(folder: Path, cluster: MemoryCluster) -> None:
    """The last note is destroyed each time: the request ends with an error that says so, never with tokens."""

    class Damaging(FaultyTransport):
        def poll(self) -> Sequence[TransportEvent]:
            return [replace(e, note=b"?" + e.note) if isinstance(e, Arrived) and e.note else e for e in super().poll()]

    def wrap(name: InstanceId, transport: Transport) -> Transport:
        return Damaging(transport, Faults(), 0) if name.startswith("decode") else transport

    (request,) = requests(20)
    with MemoryCluster(CONFIG, folder, loaded=cluster.loaded, wrap=wrap) as broken:
        broken.submit(request)
        broken.run()
        assert broken.ending("r0") is FinishReason.ERROR
        assert "damaged" in (broken.outputs["r0"][-1].error or "")
        assert broken.tokens("r0") == expected(folder, request)[: len(broken.tokens("r0"))]
        assert_nothing_is_held(broken)


def test_each_layer_is_posted_before_the_next_is_computed(folder: Path, cluster: MemoryCluster) -> None:
    log: list[tuple[str, int]] = []

    class Watched(FaultyTransport):
        def post(self, peer: PeerName, post: Post) -> PostId:
            log.append(("post", post.tag.layer))
            return super().post(peer, post)

    class Attention(PagedAttention):
        def attend(self, layer: int, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
            log.append(("attend", layer))
            return super().attend(layer, *arguments, **more)

    def wrap(name: InstanceId, transport: Transport) -> Transport:
        return Watched(transport, Faults(), 0) if name.startswith("prefill") else transport

    model, _ = cluster.loaded
    loaded = model, Attention(ReferenceKernels())
    with MemoryCluster(replace(CONFIG, max_num_batched_tokens=16), folder, loaded=loaded, wrap=wrap) as watched:
        watched.generate([replace(requests(50)[0], params=replace(GREEDY, max_tokens=2))])
    start = log.index(("post", 0))
    chunk = [("post", 0), ("attend", 0), ("post", 1)]
    # The landing comes while the first of four chunks is computed, so that one is posted as a whole; only the last
    # chunk has a row whose logits are wanted, so only it goes on behind the last layer's KV.
    assert log[start:][:12] == [("post", 0), ("post", 1), *chunk, *chunk, *chunk, ("attend", 1)]
    assert log.count(("post", 2)) == 1  # the note


def test_a_broken_prompt_is_refused_and_not_cached(folder: Path, cluster: MemoryCluster) -> None:
    """NaN logits at the end of a prompt: an error, and nothing of it is shared with later prompts."""
    model, attention = cluster.loaded
    (request,) = requests(50)

    class Broken:
        spec = model.spec

        def forward(self, *arguments: Any, **more: Any) -> Tensor:
            return model.forward(*arguments, **more) * (float("nan") if broken else 1.0)

    broken = True
    with MemoryCluster(CONFIG, folder, loaded=(Broken(), attention)) as unlucky:  # type: ignore[arg-type]
        unlucky.submit(request)
        unlucky.run()
        assert unlucky.ending("r0") is FinishReason.ERROR and "NaN" in (unlucky.outputs["r0"][-1].error or "")
        assert_nothing_is_held(unlucky)
        broken = False
        assert unlucky.generate([replace(request, id=RequestId("again"))]) == [expected(folder, request)]
        assert measure(unlucky.events)[RequestId("again")].cached_tokens == 0


def test_the_books_equal_the_engine_after_every_step(cluster: MemoryCluster) -> None:
    for request in requests(40, 9, 70, 16, 23):
        cluster.submit(request)
    decode = InstanceId("decode-0")
    checked = 0
    while cluster.turn() or cluster.coordinator.num_live:
        load = cluster.instances[decode].phase.load()
        cluster.deliver()
        if any(instance == decode for instance, _ in cluster.coordinator.outbox):
            continue  # decode has yet to hear of what the books have already
        (view,) = cluster.coordinator.view().of(Role.DECODE)
        assert (view.used_pages, view.running) == (load.used_pages, load.running + load.waiting)
        checked += 1
    assert checked > 20


def test_ends_by_stop_token_length_context_and_min_tokens(folder: Path, cluster: MemoryCluster) -> None:
    (request,) = requests(20)
    tokens = expected(folder, request)
    stop = next(t for i, t in enumerate(tokens) if i >= 2 and t not in tokens[:i])
    at = tokens.index(stop)
    cases = {
        "stop": (replace(GREEDY, stop_token_ids=(stop,)), at + 1, FinishReason.STOP),
        "length": (replace(GREEDY, max_tokens=5), 5, FinishReason.LENGTH),
        "context": (replace(GREEDY, max_tokens=None), 128 - 20, FinishReason.LENGTH),
        "one": (replace(GREEDY, max_tokens=1), 1, FinishReason.LENGTH),
        "at once": (replace(GREEDY, stop_token_ids=(tokens[0],)), 1, FinishReason.STOP),
    }
    for name, (params, _, _) in cases.items():
        cluster.submit(Request(RequestId(name), request.prompt, params))
    cluster.run()
    assert {n: (len(cluster.tokens(n)), cluster.ending(n)) for n in cases} == {
        n: (length, reason) for n, (_, length, reason) in cases.items()
    }
    assert_nothing_is_held(cluster)
