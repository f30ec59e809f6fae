"""The same figures as a Prometheus page, fed event by event."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.request import FinishReason
from narrows.core.topology import InstanceInfo
from narrows.core.wire import Delivered, Load

# 1, 2, 5 in each decade from 1 ms to 100 s.
BUCKETS_S = (*(float(f"{digit}e{power}") for power in range(-3, 2) for digit in (1, 2, 5)), 100.0)
_INSTANCE = ("instance", "role")


@dataclass(slots=True)
class _Live:
    """What of a request's past its later figures need."""

    arrival_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0


class PrometheusExporter:
    """Counters, histograms and gauges of one cluster, in a registry of their own.

    One thread feeds it; `render` may be called from any.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._live: dict[RequestId, _Live] = {}
        self._shown: set[tuple[InstanceId, Role]] = set()
        self._requests = self._counter("requests", "requests that ended, by finish reason", "finish_reason")
        for reason in FinishReason:
            self._requests.labels(reason)
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of the requests that arrived")
        self._cached_tokens = self._counter("cached_tokens", "prompt tokens taken from a prefix cache")
        self._generated_tokens = self._counter("generated_tokens", "tokens sent to callers")
        self._preemptions = self._counter("preemptions", "attempts that were given up, to be computed again")
        self._restarts = self._counter("restarts", "times a lost instance was started again", *_INSTANCE)
        self._handover_bytes = self._counter("handover_bytes", "bytes that crossed from prefill to decode", "path")
        self._wasted_bytes = self._counter("wasted_bytes", "KV bytes that crossed although decode had them")
        self._entries = self._counter("selected_entries", "KV entries read while some were at prefill", "from")
        self._ttft = self._histogram("ttft", "arrival to the first token")
        self._ttst = self._histogram("ttst", "first token to the second")
        self._second_token = self._histogram("second_token", "arrival to the second token")
        self._tbt = self._histogram("tbt", "each gap between tokens behind the second")
        self._tpot = self._histogram("tpot", "mean gap between the tokens of a request that ended")
        self._live_requests = self._gauge("live_requests", "requests that have arrived and not ended")
        self._queued = self._gauge("queued_requests", "requests that wait for an instance")
        self._running = self._gauge("running_requests", "requests in an instance's batch", *_INSTANCE)
        self._waiting = self._gauge("waiting_requests", "requests an instance keeps waiting", *_INSTANCE)
        self._used_pages = self._gauge("used_pages", "KV pages that requests hold", *_INSTANCE)
        self._cached_pages = self._gauge("cached_pages", "KV pages kept for their prefix, free to be taken", *_INSTANCE)
        self._pages = self._gauge("pages", "KV pages in all", *_INSTANCE)

    def observe(self, event: Event) -> None:
        """Count one event. Events of a request must begin with its arrival."""
        if event.kind is EventKind.ARRIVED:
            self._live[event.request] = _Live(event.time_s)
            self._prompt_tokens.inc(event.num_prompt_tokens)
            self._live_requests.set(len(self._live))
        elif event.kind in (EventKind.FIRST_TOKEN, EventKind.TOKEN):
            self._cached_tokens.inc(event.cached_tokens)
            self._observe_token(self._live[event.request], event.time_s)
            self._entries.labels("prefill").inc(event.fetched)
            self._entries.labels("decode").inc(event.selected - event.fetched)
        elif event.delivered is not None:
            self._observe_delivered(event.delivered)
        elif event.kind is EventKind.PREEMPTED:
            self._preemptions.inc()
        elif event.kind is EventKind.FINISHED:
            live = self._live.pop(event.request)
            if live.num_tokens > 1 and live.first_s is not None and live.last_s is not None:
                self._tpot.observe((live.last_s - live.first_s) / (live.num_tokens - 1))
            self._requests.labels(event.finish_reason).inc()
            self._live_requests.set(len(self._live))

    def set_queued(self, num_requests: int) -> None:
        self._queued.set(num_requests)

    def set_load(self, instance: InstanceInfo, load: Load) -> None:
        """What an instance holds now."""
        labels = (instance.id, instance.role)
        self._shown.add(labels)
        self._running.labels(*labels).set(load.running)
        self._waiting.labels(*labels).set(load.waiting)
        self._used_pages.labels(*labels).set(load.used_pages)
        self._cached_pages.labels(*labels).set(load.cached_pages)
        self._pages.labels(*labels).set(instance.num_pages)

    def count_restart(self, instance: InstanceId, role: Role) -> None:
        self._restarts.labels(instance, role).inc()

    def forget(self, instance: InstanceInfo) -> None:
        """The instance is lost: its gauges leave the page."""
        labels = (instance.id, instance.role)
        if labels in self._shown:
            self._shown.remove(labels)
            for gauge in (self._running, self._waiting, self._used_pages, self._cached_pages, self._pages):
                gauge.remove(*labels)

    def render(self) -> str:
        """The page, in Prometheus' text format."""
        return generate_latest(self._registry).decode()

    def _observe_delivered(self, delivered: Delivered) -> None:
        for path in ("metadata", "proactive", "on_demand", "speculative"):
            self._handover_bytes.labels(path).inc(getattr(delivered, f"{path}_bytes"))
        self._wasted_bytes.inc(delivered.wasted_bytes)

    def _observe_token(self, live: _Live, time_s: float) -> None:
        self._generated_tokens.inc()
        live.num_tokens += 1
        if live.first_s is None or live.last_s is None:
            live.first_s = time_s
            self._ttft.observe(time_s - live.arrival_s)
        elif live.num_tokens == 2:
            self._ttst.observe(time_s - live.last_s)
            self._second_token.observe(time_s - live.arrival_s)
        else:
            self._tbt.observe(time_s - live.last_s)
        live.last_s = time_s

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"narrows_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"narrows_{name}_seconds", text, registry=self._registry, buckets=BUCKETS_S)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"narrows_{name}", text, labels, registry=self._registry)
