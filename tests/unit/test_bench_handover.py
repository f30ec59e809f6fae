"""The bench of hand-overs: prompts that share their beginning, a cache that holds it only, figures and verdicts."""

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from narrows.bench import testbed
from narrows.bench.documents import KINDS, Documents
from narrows.bench.figures import Case, differing, judge, make_row
from narrows.bench.handover import Plan, make_rows, plot, schemes_named, show
from narrows.bench.plots import colours_of
from narrows.bench.testbed import EventLog, Reading, Sample, Workload, fit, read
from narrows.config import EngineConfig
from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.request import FinishReason, Request
from narrows.core.scheme import SCHEMES
from narrows.core.wire import Delivered
from narrows.errors import ConfigError, NarrowsError
from narrows.kv.cache import KVCache
from narrows.metrics.definitions import measure
from narrows.runtime.client import InstanceStatus, Output, Status


class Words:
    """A tokenizer whose tokens are characters; every text begins with 7."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [7] * add_special_tokens + [ord(char) for char in text]


# ---- documents


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_share_their_prefix_and_never_their_tail(kind: str) -> None:
    documents = Documents(Words(), kind, prompt_tokens=400, prefix_tokens=288, documents=3, rounds=3)
    prompts = {(d, r): documents.prompt(d, r) for d in range(3) for r in range(3)}
    for (d, r), prompt in prompts.items():
        assert len(prompt) == 400 - d
        assert prompt[0] == 7
        assert documents.prefix(d)[:-1] == prompt[:288]
        assert len(documents.prefix(d)) == 289
        assert prompt == documents.prompt(d, r)
    tails = [prompt[288 : 288 + 100] for prompt in prompts.values()]
    assert len(set(tails)) == len(tails)
    assert len({prompt[:288] for prompt in prompts.values()}) == 3


def test_without_a_hit_documents_are_all_tail() -> None:
    documents = Documents(Words(), "code", prompt_tokens=200, prefix_tokens=0, documents=1, rounds=2)
    assert len(documents.prompt(0, 1)) == 200
    assert documents.prompt(0, 0)[:100] != documents.prompt(0, 1)[:100]


def test_too_little_text_is_said() -> None:
    with pytest.raises(ConfigError, match="prose"):
        Documents(Words(), "prose", prompt_tokens=400_000, prefix_tokens=0, documents=2, rounds=3)


# ---- the cache before each measurement


class FakeCluster:
    """Prefills at once over a real KVCache, and decodes one token a request."""

    PAGE = 16

    def __init__(self, num_pages: int, events: EventLog, max_model_len: int) -> None:
        self.cache = KVCache(num_pages, self.PAGE)
        self.events = events
        self.model = SimpleNamespace(vocab_size=1000, max_model_len=max_model_len)
        self.now_s = 0.0
        self.computed = 0
        self.adopted: list[tuple[str, str | None]] = []

    def adopt(self, scheme: Any, profile: str | None) -> None:
        self.adopted.append((scheme.name, profile))

    def abort(self, request: RequestId, reason: FinishReason) -> None:
        pass

    def status(self) -> Status:
        status = InstanceStatus("prefill-0", Role.PREFILL, True, 0, 0, 0, self.cache.pages.num_pages)
        return Status(True, 0, (status,))

    def submit(self, request: Request, sink: Any) -> None:
        assert len(request.prompt) < self.model.max_model_len
        admission = self.cache.admit(request.prompt)
        assert admission is not None
        self.cache.commit(admission.table, request.prompt)
        self.cache.release(admission.table)
        self.computed += len(request.prompt) - admission.cached_tokens
        kinds: list[tuple[EventKind, dict[str, Any]]] = [
            (EventKind.ARRIVED, {"num_prompt_tokens": len(request.prompt)}),
            (EventKind.PREFILL_STARTED, {}),
            (EventKind.FIRST_TOKEN, {"token": 1, "cached_tokens": admission.cached_tokens}),
            (EventKind.FINISHED, {"finish_reason": FinishReason.LENGTH}),
        ]
        for kind, values in kinds:
            self.now_s += 1.0
            self.events.append(Event(kind, request.id, self.now_s, InstanceId("prefill-0"), **values))
        sink(Output(request.id, finish_reason=FinishReason.LENGTH))


def make_bed(num_documents: int, workload: Workload) -> testbed.Testbed:
    config = fit(EngineConfig(page_size=FakeCluster.PAGE), workload, num_documents, 8192, 10)
    assert config.kv_cache_memory_bytes is not None and config.max_model_len is not None
    events = EventLog()
    num_pages = config.kv_cache_memory_bytes // (10 * FakeCluster.PAGE)
    cluster = FakeCluster(num_pages, events, config.max_model_len)
    documents = Documents(
        Words(),
        "mixed",
        prompt_tokens=workload.prompt_tokens,
        prefix_tokens=workload.prefix_tokens(FakeCluster.PAGE),
        documents=num_documents,
        rounds=workload.rounds,
    )
    return testbed.Testbed(config, workload, cast(Any, cluster), events, documents, num_documents, 4000, "usual")


@pytest.mark.parametrize(("num_documents", "tokens"), [(1, 200), (1, 1500), (3, 1500), (6, 800)])
def test_prefixes_are_cached_and_tails_are_not_however_often(num_documents: int, tokens: int) -> None:
    bed = make_bed(num_documents, Workload(tokens, 8, rounds=2, follow_tokens=4))
    prefix = bed.documents.prefix_tokens
    assert prefix == int(0.75 * tokens) // FakeCluster.PAGE * FakeCluster.PAGE
    for _ in range(3):
        for round in range(2):
            for batch in {1, num_documents}:
                sample = bed.measure(SCHEMES["full"], round, batch)
                assert [r.metrics.cached_tokens for r in sample.readings] == [prefix] * batch
    assert len(bed.prefill_s(2)) == 2
    assert bed.measure(SCHEMES["full"], 0, 1).readings[0].metrics.cached_tokens == prefix


def test_without_flushing_the_whole_prompt_would_be_cached() -> None:
    """What the test above guards against."""
    bed = make_bed(1, Workload(1500, 8, rounds=1, follow_tokens=0))
    bed.measure(SCHEMES["full"], 0, 1)
    prompt = bed.documents.prompt(0, 0)
    (reading,) = bed._hand_over([prompt], 8, 0, reset=False).readings
    assert reading.metrics.cached_tokens > bed.documents.prefix_tokens


def test_a_scheme_comes_with_the_profile_it_needs() -> None:
    bed = make_bed(1, Workload(200, 8, rounds=1))
    for scheme, profile in (("full", None), ("partial", None), ("selective", None), ("selective", "own")):
        bed.measure(SCHEMES[scheme], 0, 1, profile)
    adopted = cast(Any, bed.cluster).adopted
    assert adopted == [("full", None), ("partial", None), ("selective", "usual"), ("selective", "own")]


def test_a_request_that_fails_fails_the_bench() -> None:
    bed = make_bed(1, Workload(200, 8, rounds=1))
    cluster = cast(Any, bed.cluster)
    cluster.submit = lambda request, sink: sink(Output(request.id, finish_reason=FinishReason.ERROR, error="no luck"))
    with pytest.raises(NarrowsError, match="no luck"):
        bed.measure(SCHEMES["full"], 0, 1)


def test_an_event_wakes_who_waits() -> None:
    events = EventLog()
    woken = threading.Event()

    def wait() -> None:
        with events.changed:
            events.changed.wait_for(lambda: bool(events), 10)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    events.append(Event(EventKind.ARRIVED, RequestId("r"), 0.0))
    thread.join(10)
    assert woken.is_set()


# ---- sizes


def test_the_pool_holds_the_documents_and_the_context_is_a_power_of_two() -> None:
    config = fit(EngineConfig(page_size=32), Workload(8000, 64), 6, 8192, 23040)
    assert config.max_model_len == 8192
    assert config.kv_cache_memory_bytes is not None
    pages = config.kv_cache_memory_bytes // (32 * 23040)
    assert 6 * 256 <= pages <= 6 * 260
    assert fit(EngineConfig(), Workload(512, 8, follow_tokens=32), 1, 8192, 10).max_model_len == 1024
    assert not fit(EngineConfig(), Workload(512, 8, hit=0.0), 1, 8192, 10).enable_prefix_caching


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: fit(EngineConfig(), Workload(8000, 256), 1, 8192, 10), "prompt_tokens"),
        (lambda: fit(EngineConfig(max_model_len=1000), Workload(1000, 8), 1, 8192, 10), "prompt_tokens"),
        (lambda: Workload(10), "prompt_tokens"),
        (lambda: Workload(output_tokens=2), "output_tokens"),
        (lambda: Workload(hit=1.0), "hit"),
        (lambda: Workload(text="poems"), "text"),
        (lambda: Plan(schemes_named(["full"]), tt_over_tp=(0.0,)), "tt_over_tp"),
        (lambda: Plan(schemes_named(["full"]), batches=(0,)), "batch"),
        (lambda: Plan(schemes_named(["full"]), selectors=("none",)), "selector"),
        (lambda: Plan(schemes_named(["full", "full"])), "scheme"),
        (lambda: schemes_named(["fast"]), "scheme"),
    ],
)
def test_what_can_not_be_measured_is_said_before(make: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=f"^{word}"):
        make()


# ---- figures


def reading(
    arrival_s: float, times_s: Sequence[float], tokens: Sequence[int], counts: Sequence[tuple[int, int]], **more: Any
) -> Reading:
    """A request's reading, through its events."""
    id = RequestId(f"r{arrival_s}")
    sent = Delivered(id, 0, 100, 1000, 300, 600, 50, pushed_blocks=5, num_blocks=20, full=False)
    events = [Event(EventKind.ARRIVED, id, arrival_s), Event(EventKind.PREFILL_STARTED, id, arrival_s + 0.5)]
    kinds = [EventKind.FIRST_TOKEN] + [EventKind.TOKEN] * (len(times_s) - 1)
    counts = [(0, 0), *counts]
    for kind, at, token, (selected, fetched) in zip(kinds, times_s, tokens, counts, strict=True):
        cached = 96 if kind is EventKind.FIRST_TOKEN else 0
        events.append(Event(kind, id, at, token=token, selected=selected, fetched=fetched, cached_tokens=cached))
    events.append(Event(EventKind.HANDOVER_DONE, id, more.get("handed_s", times_s[1] - 0.1)))
    events.append(Event(EventKind.DELIVERED, id, more.get("delivered_s", times_s[-1] + 9), delivered=sent))
    events.append(Event(EventKind.FINISHED, id, times_s[-1], finish_reason=FinishReason.STOP))
    return read(measure(events)[id], sorted(events, key=lambda event: event.time_s))


CASE = Case("selective", "exact", 6.5, 2, 128, 4, 0.25, 0.001)
FIRST = reading(0.0, [1.0, 3.0, 3.5, 4.5, 4.6], [1, 2, 3, 4, 5], [(100, 80), (100, 20), (0, 0), (0, 0)])
SECOND = reading(1.0, [2.0, 6.0, 6.5, 8.5, 8.6], [6, 7, 8, 9, 10], [(300, 120), (100, 0), (0, 0), (0, 0)])


def test_a_row_by_hand() -> None:
    row = make_row(CASE, [Sample((FIRST, SECOND))])
    assert row["scheme"] == "selective" and row["batch"] == 2 and row["tt_over_tp"] == 6.5
    assert row["ttft_s"] == 1.0
    assert row["ttst_s"] == row["ttst_min_s"] == row["ttst_max_s"] == 3.0  # 2 and 4
    assert row["second_token_s"] == 4.0  # 3 and 5
    assert row["tbt_s"] == pytest.approx((0.5 + 1.0 + 0.5 + 2.0) / 4)  # the fifth token is beyond what is measured
    assert row["gaps_s"] == pytest.approx([0.5, 1.5])
    assert row["ctl_s"] == pytest.approx([1.0, (3 / 2 + 5 / 2) / 2, (3.5 / 3 + 5.5 / 3) / 2, (4.5 / 4 + 7.5 / 4) / 2])
    assert row["on_demand_ratios"] == pytest.approx([200 / 400, 20 / 200, 0.0])
    assert row["on_demand_ratio"] == pytest.approx(0.2)
    assert row["cached_tokens"] == 96
    paths = ("metadata", "proactive", "on_demand", "speculative", "wasted")
    assert [row[f"{path}_bytes"] for path in paths] == [200, 2000, 600, 1200, 100]
    assert row["pushed_share"] == 0.25 and row["full_share"] == 0.0
    assert row["tokens_sha256"] == hashlib.sha256(json.dumps([[[1, 2, 3, 4], [6, 7, 8, 9]]]).encode()).hexdigest()
    assert row["tbt_after_delivery_s"] is None and row["tokens_until_delivery"] is None
    # From the first prefill's start, 0.5 s, to the last end, 8.6 s, at 125,000 bytes a second.
    assert row["link_use"] == pytest.approx(4000 / (8.1 * 125_000))


def test_medians_over_rounds_and_the_spread() -> None:
    slow = reading(0.0, [1.0, 9.0, 9.5, 10.0], [1, 2, 3, 4], [(0, 0)] * 3)
    row = make_row(CASE, [Sample((one,)) for one in (FIRST, slow, SECOND)])
    assert (row["ttst_s"], row["ttst_min_s"], row["ttst_max_s"]) == (4.0, 2.0, 8.0)


def test_gaps_behind_the_delivery_go_beyond_the_measured_tokens() -> None:
    one = reading(0.0, [1.0, 2.0, 3.0, 4.0, 4.2, 4.5], [1, 2, 3, 4, 5, 6], [(0, 0)] * 5, delivered_s=3.5)
    row = make_row(CASE, [Sample((one,))])
    assert row["tbt_after_delivery_s"] == pytest.approx(0.25)  # of 0.2 and 0.3
    assert row["tokens_until_delivery"] == 3
    assert row["ctl_s"] == [1.0, 1.0, 1.0, 1.0]


def test_gaps_behind_the_delivery_are_of_the_whole_batch_together() -> None:
    """The second is delivered at 6.0; the first ends at 9.0, so the second's last gap is one of a smaller batch."""
    times = [1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 7.0, 9.0]
    first = reading(0.0, times, list(range(8)), [(0, 0)] * 7, delivered_s=3.5)
    second = reading(0.0, [1.0, 2.0, 3.0, 4.0, 6.0, 6.1, 6.3, 9.9], list(range(8)), [(0, 0)] * 7, delivered_s=6.0)
    row = make_row(CASE, [Sample((first, second))])
    assert row["tbt_after_delivery_s"] == pytest.approx((0.2 + 0.5) / 2)  # of 0.1, 0.2, 0.5, 2.0
    row = make_row(CASE, [Sample((first, replace(second, delivered_s=None)))])
    assert row["tbt_after_delivery_s"] is None


# ---- verdicts


def a_row(scheme: str, **values: Any) -> dict[str, Any]:
    usual = {"selector": "exact", "tt_over_tp": 6.5, "batch": 1, "prompt_tokens": 128, "tokens_sha256": "same"}
    times = {"ttst_s": 1.0, "second_token_s": 2.0, "tbt_s": 0.1, "tbt_after_delivery_s": 0.1}
    return {"scheme": scheme, **usual, **times, **values}


def test_verdicts() -> None:
    rows = [
        a_row("full", ttst_s=4.4, second_token_s=5.4),
        a_row("selective", tbt_after_delivery_s=0.106),
        a_row("partial", ttst_s=1.1, tbt_s=0.14),
    ]
    assert {(t.claim, round(t.value or 0, 3), t.met) for t in judge(rows)} == {
        ("TTST, full / selective", 4.4, True),
        ("second token, full / selective", 2.7, True),
        ("TTST, partial / selective", 1.1, False),
        ("TBT, partial / selective", 1.4, True),
        ("TBT when all is delivered, selective / full", 1.06, False),
    }


def test_nothing_is_judged_on_links_in_between_or_without_a_figure() -> None:
    between = [a_row("full", tt_over_tp=2.0), a_row("selective", tt_over_tp=2.0), a_row("auto", tt_over_tp=2.0)]
    assert {target.met for target in judge(between)} == {None}
    unseen = [a_row("full"), a_row("selective", tbt_after_delivery_s=None)]
    assert [t.met for t in judge(unseen) if "delivered" in t.claim] == [None]


def test_the_fallback_is_judged_on_fast_links() -> None:
    fast = {"tt_over_tp": 1.0}
    rows = [a_row("full", **fast), a_row("auto", ttst_s=1.2, **fast), a_row("selective", ttst_s=9.0, **fast)]
    judged = {target.claim: target.met for target in judge(rows) if target.met is not None}
    assert judged == {"TTST, auto / full": False, "second token, auto / full": True}


def test_differing_tokens_are_named() -> None:
    rows = [a_row("full"), a_row("partial", tokens_sha256="other"), a_row("full", batch=2, tokens_sha256="of two")]
    (wrong,) = differing(rows)
    assert "partial" in wrong and "full" in wrong
    assert differing(rows[:1] + rows[2:]) == []


# ---- for a person


def test_names_of_a_panel_have_colours_apart() -> None:
    for names in (["full", "random", "sequential", "profile", "optimal"], ["full", "KV reuse", "5 %", "10 %", "20 %"]):
        assert len(set(colours_of(names).values())) == len(names)
    assert colours_of(["full"])["full"] == colours_of(["5 %", "full"])["full"]


def test_rows_can_be_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = {name: [Sample((FIRST, SECOND))] for name in ("ideal", "full", "selective", "partial")}
    rows = make_rows(CASE, samples)
    assert [row["scheme"] for row in rows] == ["full", "selective", "partial"]
    assert rows[0]["ideal_ttst_s"] == 3.0 and rows[0]["tokens_equal_ideal"]
    from dataclasses import asdict

    result = {"results": rows, "targets": [asdict(target) for target in judge(rows)], "differing": differing(rows)}
    show(result)
    printed = capsys.readouterr().out
    assert "missed" in printed and "TTST, full / selective" in printed and "same for every scheme" in printed
    plot(result, tmp_path / "made" / "a.png")
    assert (tmp_path / "made" / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="png"):
        plot(result, tmp_path)
