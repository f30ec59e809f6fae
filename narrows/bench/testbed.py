"""A cluster of real processes on which hand-overs are measured one after another, each under the same conditions.

Before each measurement the documents' prefixes are in the prefix cache and their tails are not, though the same prompts
have been computed before, for another scheme. Pages are evicted least recently used first, so:

    touch     every prefix is asked for once more: it is cached, or computed the first time
    flush     as many tokens of noise as there are pages that hold no prefix: they take the place of all the rest
    touch     the noise is now what goes first

How much of a prompt was cached in the end is measured too (`cached_tokens`), so a wrong guess shows.
"""

import contextlib
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from narrows.bench.documents import KINDS, Documents
from narrows.config import EngineConfig
from narrows.core.events import Event, EventKind
from narrows.core.ids import RequestId
from narrows.core.request import FinishReason, Request, SamplingParams
from narrows.core.scheme import Scheme
from narrows.errors import ConfigError, NarrowsError
from narrows.kv.layout import pages_for
from narrows.launch import started
from narrows.metrics.definitions import TOKEN_KINDS, RequestMetrics, measure
from narrows.models.catalog import resolve
from narrows.models.spec import read_spec
from narrows.profiles import ensure_files
from narrows.runtime.client import Output
from narrows.runtime.cluster import LocalCluster
from narrows.runtime.sizing import DTYPE_BYTES

PATIENCE_S = 180.0  # without any event, beyond what the link needs, before a measurement is given up
SETTLED_TOKENS = 48  # behind the delivery, of which the median gap is taken
IDLE_POLL_S = 0.01
LEAST_CONTEXT = 1024
SPARE_PAGES = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of a testbed. `hit` is the part of each prompt that is in the prefix cache, in whole pages."""

    prompt_tokens: int = 8000
    output_tokens: int = 64
    hit: float = 0.75
    rounds: int = 3
    text: str = "mixed"
    follow_tokens: int = 256  # behind output_tokens, at most, until all KV has been delivered

    def __post_init__(self) -> None:
        if self.prompt_tokens < 128:
            raise ConfigError(
                f"prompt_tokens: {self.prompt_tokens} are too few to be worth a hand-over; use 128 or more"
            )
        if self.output_tokens < 4:
            raise ConfigError(f"output_tokens: {self.output_tokens} leave no gap to measure; use at least 4")
        if not 0.0 <= self.hit < 1.0:
            raise ConfigError(f"hit: {self.hit} is out of range; use 0 to below 1")
        if self.text not in KINDS:
            raise ConfigError(f"text: {self.text!r} is not a kind of text; use one of {', '.join(KINDS)}")

    def prefix_tokens(self, page_size: int) -> int:
        return int(self.hit * self.prompt_tokens) // page_size * page_size


@dataclass(frozen=True, slots=True)
class Reading:
    """One measured request."""

    metrics: RequestMetrics
    tokens: tuple[int, ...]
    started_s: float  # when prefill began
    handed_s: float | None  # when decode could begin
    delivered_s: float | None  # when all KV was at decode; None: not before the request ended
    ended_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch under one scheme, in the order of its documents."""

    readings: tuple[Reading, ...]


class EventLog(list[Event]):
    """Events as they come, and a wake-up for whoever waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = threading.Condition()

    def append(self, event: Event) -> None:
        with self.changed:
            super().append(event)
            self.changed.notify_all()


@dataclass
class Testbed:
    """Made by `open_testbed`. One measurement at a time."""

    config: EngineConfig
    workload: Workload
    cluster: LocalCluster
    events: EventLog
    documents: Documents
    num_documents: int
    kv_bytes: int  # of one prompt
    importance: str | None  # the profile to push by
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _noise: random.Random = field(default_factory=lambda: random.Random(0))
    _open: set[str] = field(default_factory=set)
    _errors: list[str] = field(default_factory=list)
    _used: bool = False  # something but prefixes is cached

    # ---- measuring

    def measure(self, scheme: Scheme, round: int, batch: int, profile: str | None = None) -> Sample:
        """Hand the first `batch` documents over by `scheme`, all submitted at once.

        `profile` replaces the importance profile of orders that have one. Returns when every page is free again.
        Raises NarrowsError when a request fails or nothing happens any more.
        """
        by_profile = scheme.order == "profile" and not scheme.full
        self.cluster.adopt(scheme, (profile or self.importance) if by_profile else None)
        delivers = scheme.full or scheme.speculative != 0.0
        follow = self.workload.follow_tokens if delivers else 0
        prompts = [self.documents.prompt(document, round) for document in range(batch)]
        return self._hand_over(prompts, self.workload.output_tokens, follow)

    def prefill_s(self, repeats: int) -> list[float]:
        """Tp: seconds from the start of prefill to the first token, of the first document with other tails."""
        seconds = []
        for _ in range(repeats + 1):
            self.reset()
            tail = self._make_noise(self.workload.prompt_tokens - self.documents.prefix_tokens)
            (key,) = self._submit([self.documents.prefix(0)[:-1] + tail], 1)
            self._wait(lambda: not self._open, 0.0)
            self._until_idle()
            (reading,) = self._read([key])
            seconds.append(reading.metrics.token_times_s[0] - reading.started_s)
        return seconds[1:]  # the first also warms up

    def warm_up(self, schemes: Sequence[Scheme]) -> None:
        """Everything has run once and the rate of the link is known, without touching a document."""
        length = min(512, self.workload.prompt_tokens)
        for scheme in schemes:
            profile = self.importance if scheme.order == "profile" and not scheme.full else None
            self.cluster.adopt(scheme, profile)
            self._hand_over([self._make_noise(length)], 4, 0, reset=False)

    def reset(self) -> None:
        """Prefixes are cached, tails are not. See the module's text."""
        if not self.documents.prefix_tokens:
            return
        self._touch()
        if self._used:
            size = self.config.page_size
            num_pages = min(i.num_pages for i in self.cluster.status().instances if i.role == "prefill")
            left = num_pages - self.num_documents * (self.documents.prefix_tokens // size)
            most = (self.cluster.model.max_model_len - size) // size
            while left > 0:
                pages = min(left, most)
                left -= pages
                self._compute([self._make_noise(pages * size)])
            self._touch()
        self._used = True

    # ---- requests

    def _touch(self) -> None:
        self._compute([self.documents.prefix(document) for document in range(self.num_documents)])

    def _compute(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Prefill only, on every prefill instance: copies that are there together go to different ones."""
        for prompt in prompts:
            self._submit([prompt] * self.config.prefill, 1)
            self._wait(lambda: not self._open, 0.0)
        self._until_idle()

    def _make_noise(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(self._noise.randrange(self.cluster.model.vocab_size) for _ in range(num_tokens))

    def _hand_over(
        self, prompts: Sequence[tuple[int, ...]], num_tokens: int, follow: int, *, reset: bool = True
    ) -> Sample:
        if reset:
            self.reset()
        room = self.cluster.model.max_model_len - max(map(len, prompts))
        first = len(self.events)
        keys = self._submit(prompts, min(num_tokens + follow, room))
        link = self.config.link_gbps
        crossing_s = 0.0 if link is None else len(prompts) * self.kv_bytes * 8e-9 / link
        self._wait(lambda: not self._open or self._have_settled(keys, num_tokens, first), 4 * crossing_s)
        for key in keys:
            self.cluster.abort(RequestId(key), FinishReason.STOP)
        self._wait(lambda: not self._open, 4 * crossing_s)
        self._until_idle()
        return Sample(tuple(self._read(keys, first)))

    def _submit(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[str]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)
        keys = [f"bench-{next(self._numbers)}" for _ in prompts]
        self._open.update(keys)
        for key, prompt in zip(keys, prompts, strict=True):
            self.cluster.submit(Request(RequestId(key), prompt, params), self._take)
        return keys

    def _take(self, output: Output) -> None:
        if output.finish_reason is None:
            return
        with self.events.changed:
            self._open.discard(output.request)
            if output.finish_reason is FinishReason.ERROR:
                self._errors.append(output.error or "a request failed")
            self.events.changed.notify_all()

    def _have_settled(self, keys: Sequence[str], num_tokens: int, first: int) -> bool:
        """Whether every request has its tokens, and SETTLED_TOKENS of them since all KV of all was delivered."""
        tokens, settled = Counter[str](), Counter[str]()
        delivered: set[str] = set()
        for event in self.events[first:]:
            if event.kind in TOKEN_KINDS:
                tokens[event.request] += 1
                settled[event.request] += delivered.issuperset(keys)
            elif event.kind is EventKind.DELIVERED:
                delivered.add(event.request)
        return all(tokens[key] >= num_tokens and settled[key] >= SETTLED_TOKENS for key in keys)

    def _wait(self, done: Callable[[], bool], extra_s: float) -> None:
        """Until `done`. Raises NarrowsError when a request has failed, or nothing was heard for too long."""
        heard = True
        with self.events.changed:
            while heard and not done() and not self._errors:
                heard = self.events.changed.wait(PATIENCE_S + extra_s) or done()
        # The cluster's thread tells events under its lock: ask for its status only without ours.
        if self._errors:
            raise NarrowsError(f"a measured request failed: {self._errors[0]}")
        if not heard:
            raise NarrowsError(
                f"nothing happened for {PATIENCE_S + extra_s:.0f} s while {len(self._open)} requests were measured; "
                f"instances: {self.cluster.status().instances}"
            )

    def _until_idle(self) -> None:
        """Until nothing is sent and no page is held any more: that is told in loads, which are no events."""
        pause = threading.Event()
        for _ in range(int(PATIENCE_S / IDLE_POLL_S)):
            status = self.cluster.status()
            if not any(i.used_pages or i.running or i.waiting for i in status.instances):
                return
            pause.wait(IDLE_POLL_S)
        raise NarrowsError(f"pages are still held {PATIENCE_S:.0f} s after the last request: {status.instances}")

    def _read(self, keys: Sequence[str], first: int = 0) -> list[Reading]:
        events = self.events[first:]
        metrics = measure(events)
        return [read(metrics[RequestId(key)], [event for event in events if event.request == key]) for key in keys]


def read(metrics: RequestMetrics, events: Sequence[Event]) -> Reading:
    """What happened to one request, from its events."""

    def time_of(kind: EventKind) -> float | None:
        return next((event.time_s for event in events if event.kind is kind), None)

    started_s, ended_s, delivered_s = map(time_of, (EventKind.PREFILL_STARTED, EventKind.FINISHED, EventKind.DELIVERED))
    assert started_s is not None and ended_s is not None
    tokens = tuple(event.token for event in events if event.kind in TOKEN_KINDS and event.token is not None)
    if delivered_s is not None and delivered_s >= ended_s:  # cut off when the request ended
        delivered_s = None
    return Reading(metrics, tokens, started_s, time_of(EventKind.HANDOVER_DONE), delivered_s, ended_s)


@contextlib.contextmanager
def open_testbed(config: EngineConfig, workload: Workload, num_documents: int) -> Iterator[Testbed]:
    """A ready cluster with room for `num_documents` prompts at once. Raises ConfigError when they do not fit the model.

    `config` names selector and link; what it says of scheme, pool and longest request is set here.
    """
    folder = resolve(config.model)
    spec = read_spec(folder)
    token_bytes = spec.num_layers * spec.num_kv_heads * spec.entry_dim * DTYPE_BYTES[config.dtype]
    config = fit(config, workload, num_documents, spec.max_positions, token_bytes)
    events = EventLog()
    with started(config, events) as (cluster, tokenizer):
        documents = Documents(
            tokenizer,
            workload.text,
            prompt_tokens=workload.prompt_tokens,
            prefix_tokens=workload.prefix_tokens(config.page_size),
            documents=num_documents,
            rounds=workload.rounds,
        )
        yield Testbed(
            config,
            workload,
            cluster,
            events,
            documents,
            num_documents,
            workload.prompt_tokens * token_bytes,
            ensure_files(config, folder).importance,
        )


def fit(
    config: EngineConfig, workload: Workload, num_documents: int, max_positions: int, token_bytes: int
) -> EngineConfig:
    """The config with a pool that holds the documents and hardly more, so that little has to be flushed."""
    limit = min(config.max_model_len or max_positions, max_positions)
    needed = workload.prompt_tokens + workload.output_tokens
    if needed > limit:
        raise ConfigError(
            f"prompt_tokens: {workload.prompt_tokens} and {workload.output_tokens} output tokens are more than the "
            f"{limit} tokens of the model's context; use at most {limit - workload.output_tokens}"
        )
    # Profiles depend on the context, so it takes few values: a power of two.
    longest = needed + workload.follow_tokens
    context = min(max(LEAST_CONTEXT, 1 << (longest - 1).bit_length()), limit)
    pages = num_documents * (pages_for(min(longest, context) + 1, config.page_size) + 1) + SPARE_PAGES
    pages = max(pages, pages_for(context, config.page_size) + num_documents + SPARE_PAGES)
    return replace(
        config,
        transfer="full",
        max_model_len=context,
        max_num_seqs=max(config.max_num_seqs, num_documents, config.prefill),
        kv_cache_memory_bytes=config.kv_cache_memory_bytes or pages * config.page_size * token_bytes,
        enable_prefix_caching=workload.hit > 0.0,
    )
