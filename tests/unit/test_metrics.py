"""Latency figures by hand from a small event stream; the Prometheus page read back by Prometheus' own parser."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.request import FinishReason
from narrows.core.topology import InstanceInfo
from narrows.core.wire import Delivered, Load
from narrows.metrics.definitions import RequestMetrics, check_lifetime, ctl_s, measure
from narrows.metrics.export import BUCKETS_S, PrometheusExporter
from narrows.metrics.summary import distribution, summarize

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")

# What crossed for a's two attempts: 1000 bytes, and 100 + 700 + 300 + 400.
FIRST = Delivered("a", 0, proactive_bytes=1000)
SECOND = Delivered("a", 1, 100, 700, 300, 400, wasted_bytes=50, pushed_blocks=10, num_blocks=30, full=False)

# a: arrives at 10, tokens at 12, 15, 16, 18, preempted once. b: arrives at 11, one token at 12. c: refused at once.
EVENTS = [
    Event(EventKind.ARRIVED, A, 10.0, num_prompt_tokens=100),
    Event(EventKind.ARRIVED, B, 11.0, num_prompt_tokens=20),
    Event(EventKind.PREFILL_STARTED, A, 11.0),
    Event(EventKind.FIRST_TOKEN, A, 12.0, token=1, cached_tokens=64),
    Event(EventKind.FIRST_TOKEN, B, 12.0, token=1),
    Event(EventKind.FINISHED, B, 12.0, finish_reason=FinishReason.STOP),
    Event(EventKind.ARRIVED, C, 12.0, num_prompt_tokens=3),
    Event(EventKind.FINISHED, C, 12.5, finish_reason=FinishReason.ABORT),
    Event(EventKind.HANDOVER_DONE, A, 14.0, num_bytes=1000),
    Event(EventKind.TOKEN, A, 15.0, token=2),
    Event(EventKind.PREEMPTED, A, 15.0),
    Event(EventKind.TOKEN, A, 16.0, token=3),
    Event(EventKind.HANDOVER_DONE, A, 17.0, num_bytes=1200),
    Event(EventKind.DELIVERED, A, 17.5, delivered=FIRST),
    Event(EventKind.TOKEN, A, 18.0, token=4, selected=200, fetched=30),
    Event(EventKind.FINISHED, A, 18.0, finish_reason=FinishReason.LENGTH),
    Event(EventKind.DELIVERED, A, 19.0, delivered=SECOND),
]


def test_figures_by_hand() -> None:
    measured = measure(EVENTS)
    assert list(measured) == [A, B, C]
    a = measured[A]
    selected = ((0, 0), (0, 0), (200, 30))
    assert a == RequestMetrics(
        *(A, 10.0, (12.0, 15.0, 16.0, 18.0), 100, 64, 2200, 1, FinishReason.LENGTH, (FIRST, SECOND), 19.0, selected)
    )
    assert a.total_bytes == 1000 + 1500
    assert a.on_demand_ratio == (0.0, 0.0, 0.15)
    assert (a.ttft_s, a.ttst_s, a.second_token_s) == (2.0, 3.0, 5.0)
    assert a.tbt_s == (1.0, 2.0), "the time to the second token is not among the gaps"
    assert a.tpot_s == (18.0 - 12.0) / 3
    assert a.cumulative_s == (2.0, 5.0 / 2, 6.0 / 3, 8.0 / 4)


def test_too_few_tokens_give_no_figure() -> None:
    measured = measure(EVENTS)
    b, c = measured[B], measured[C]
    assert (b.ttft_s, b.ttst_s, b.second_token_s, b.tbt_s, b.tpot_s) == (1.0, None, None, (), None)
    assert (c.ttft_s, c.cumulative_s, c.num_tokens) == (None, (), 0)


def test_the_curve_is_over_the_requests_that_have_the_token() -> None:
    assert ctl_s(measure(EVENTS).values()) == [(2.0 + 1.0) / 2, 2.5, 2.0, 2.0]
    assert ctl_s([]) == []


def test_summary() -> None:
    summary = summarize(measure(EVENTS).values())
    assert summary.num_requests == 3
    assert summary.finish_reasons == {"stop": 1, "abort": 1, "length": 1}
    assert (summary.num_prompt_tokens, summary.num_cached_tokens, summary.num_tokens) == (123, 64, 5)
    assert (summary.num_preemptions, summary.handover_bytes) == (1, 2200)
    assert summary.tokens_per_s == 5 / 8.0
    assert summary.ttft_s is not None
    assert (summary.ttft_s.count, summary.ttft_s.mean, summary.ttft_s.p50, summary.ttft_s.max) == (2, 1.5, 1.5, 2.0)
    assert summary.tbt_s is not None
    assert (summary.tbt_s.count, summary.tbt_s.mean) == (2, 1.5)
    assert summary.to_json()["ttst_s"]["mean"] == 3.0


def test_summary_of_nothing() -> None:
    summary = summarize([])
    assert (summary.num_tokens, summary.tokens_per_s, summary.ttft_s, summary.ctl_s) == (0, None, None, [])


def test_percentiles_interpolate() -> None:
    spread = distribution([*range(101), None])
    assert spread is not None
    assert (spread.count, spread.mean, spread.p50, spread.p90, spread.p99, spread.max) == (101, 50, 50, 90, 99, 100)
    assert distribution([None]) is None


def test_a_sound_lifetime_passes() -> None:
    check_lifetime(EVENTS)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (EVENTS[:-2], "a: .*|not exactly one ending"),
        ([*EVENTS, EVENTS[-2]], "not exactly one ending"),
        ([*EVENTS, Event(EventKind.TOKEN, A, 19.0)], "after the ending"),
        ([*EVENTS[:-2], replace(EVENTS[-2], finish_reason=None)], "without a reason"),
        (EVENTS[1:], "not exactly one arrival"),
        ([Event(EventKind.PLACED, A, 9.0), *EVENTS], "before the arrival"),
        ([e for e in EVENTS if e.kind is not EventKind.FIRST_TOKEN], "tokens without a first"),
        ([replace(e, kind=EventKind.FIRST_TOKEN) if e.token == 4 else e for e in EVENTS], "is not the first"),
        ([*EVENTS[:-2], replace(EVENTS[-2], time_s=17.0)], "finished is earlier than token"),
    ],
)
def test_a_broken_lifetime_is_named(events: list[Event], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_lifetime(events)


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(exporter: PrometheusExporter) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(exporter.render())
        for sample in family.samples
    }


def test_the_page_counts_what_happened() -> None:
    exporter = PrometheusExporter()
    for event in EVENTS:
        exporter.observe(event)
    page = read(exporter)
    plain = {name: value for (name, labels), value in page.items() if not labels}
    assert plain["narrows_prompt_tokens_total"] == 123
    assert plain["narrows_generated_tokens_total"] == 5
    assert plain["narrows_cached_tokens_total"] == 64
    assert plain["narrows_wasted_bytes_total"] == 50
    by_path = {labels[0][1]: v for (name, labels), v in page.items() if name == "narrows_handover_bytes_total"}
    assert by_path == {"metadata": 100, "proactive": 1700, "on_demand": 300, "speculative": 400}
    entries = {labels[0][1]: v for (name, labels), v in page.items() if name == "narrows_selected_entries_total"}
    assert entries == {"decode": 170, "prefill": 30}
    assert plain["narrows_preemptions_total"] == 1
    assert plain["narrows_live_requests"] == 0
    for name, count, total in [
        ("ttft", 2, 3.0),
        ("ttst", 1, 3.0),
        ("second_token", 1, 5.0),
        ("tbt", 2, 3.0),
        ("tpot", 1, 2.0),
    ]:
        assert plain[f"narrows_{name}_seconds_count"] == count
        assert plain[f"narrows_{name}_seconds_sum"] == pytest.approx(total)
    by_reason = {reason: page["narrows_requests_total", (("finish_reason", reason),)] for reason in FinishReason}
    assert by_reason == {"stop": 1, "length": 1, "abort": 1, "error": 0}
    assert page["narrows_ttft_seconds_bucket", (("le", "1.0"),)] == 1


def test_buckets_span_a_millisecond_to_a_hundred_seconds() -> None:
    assert (BUCKETS_S[0], BUCKETS_S[3], BUCKETS_S[-1], len(BUCKETS_S)) == (0.001, 0.01, 100.0, 16)
    assert list(BUCKETS_S) == sorted(BUCKETS_S)


def test_gauges_follow_the_instances() -> None:
    info = InstanceInfo(InstanceId("decode-0"), Role.DECODE, "x", "", 50, 16, 8, 100, 1000)
    labels = (("instance", "decode-0"), ("role", "decode"))
    exporter = PrometheusExporter()
    exporter.forget(info)
    exporter.set_load(info, Load(used_pages=7, cached_pages=3, running=2, waiting=1))
    exporter.set_queued(4)
    exporter.observe(EVENTS[0])
    page = read(exporter)
    assert page["narrows_queued_requests", ()] == 4
    assert page["narrows_live_requests", ()] == 1
    gauges = ("used_pages", "cached_pages", "running_requests", "waiting_requests", "pages")
    assert [page[f"narrows_{name}", labels] for name in gauges] == [7, 3, 2, 1, 50]
    exporter.forget(info)
    assert not any(found == labels for _, found in read(exporter))


def test_two_exporters_share_nothing() -> None:
    first, second = PrometheusExporter(), PrometheusExporter()
    first.observe(EVENTS[0])
    assert read(first)["narrows_prompt_tokens_total", ()] == 100
    assert read(second)["narrows_prompt_tokens_total", ()] == 0
