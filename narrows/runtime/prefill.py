"""A prefill instance: computes prompts in chunks and pushes their KV layer by layer to where decode made room.

waiting ──pages──▶ running ──last chunk──▶ leased ──all delivered──▶ released; its pages become prefix cache
                      │ each layer of each chunk goes to the courier as soon as it is stored, while the next computes

What crosses when is the courier's to decide (transfer.courier), how each hand-over is planned the planner's.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from narrows.core.plan import Landing
from narrows.core.request import Request
from narrows.core.scheme import Scheme
from narrows.core.wire import (
    Adopt,
    Delivered,
    Failed,
    HandOver,
    Load,
    Prefill,
    Produced,
    Push,
    Release,
    Released,
    Started,
    ToInstance,
)
from narrows.errors import ConfigError
from narrows.kv.cache import KVCache
from narrows.kv.table import BlockTable
from narrows.profile.importance import ImportanceProfile
from narrows.runtime.phase import Choice, Ending, Instance, Report
from narrows.runtime.planning import Planner
from narrows.runtime.runner import Rows, Runner
from narrows.sched.chunks import plan_chunks
from narrows.transfer.codec import encode
from narrows.transfer.courier import Courier

_log = logging.getLogger(__name__)

Describe = Callable[[int, Tensor], None]  # layer, slots [T] int32


@dataclass(slots=True)
class Job:
    """One attempt of one request here."""

    request: Request
    table: BlockTable | None = None  # None: waiting for pages
    cached_tokens: int = 0
    computed: int = 0
    landing: Landing | None = None
    token: int | None = None  # sampled here
    failed: bool = False  # reported; only Release follows
    releasing: bool = False

    @property
    def key(self) -> tuple[str, int]:
        return self.request.id, self.request.generation

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.request.tokens

    @property
    def computing(self) -> bool:
        return self.table is not None and self.token is None and not self.failed and not self.releasing


class PrefillPhase:
    """See the module's text. Page ownership: a job's table holds references until Released is said."""

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        courier: Courier,
        planner: Planner,
        ending: Ending,
        *,
        describe: Describe | None,  # derives selector metadata of new KV; None: there is none
        load_profile: Callable[[str], ImportanceProfile],
        clock: Callable[[], float],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.report = Report()
        self.instance: Instance
        self.courier = courier
        self._runner = runner
        self._cache = cache
        self._planner = planner
        self._ending = ending
        self._describe = describe
        self._load_profile = load_profile
        self._clock = clock
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._jobs: dict[tuple[str, int], Job] = {}  # in order of arrival

    # ---- messages and events

    def handle(self, message: ToInstance) -> None:
        if isinstance(message, Prefill):
            job = Job(message.request)
            self._jobs[job.key] = job
        elif isinstance(message, Push):
            self._on_push(message.landing)
        elif isinstance(message, Release):
            self._on_release(message)
        elif isinstance(message, Adopt):
            self._adopt(message)

    def is_urgent(self, message: ToInstance) -> bool:
        """A landing, unless its prompt has come in the same step and waits for the next turn itself."""
        return isinstance(message, Push) and (message.landing.request, message.landing.generation) in self._jobs

    def serve(self) -> bool:
        served = self.courier.serve()
        return self._take_news() or served

    def _take_news(self) -> bool:
        news = self.courier.take_news()
        for item in news:
            if isinstance(item, Delivered):
                self.report.delivered.append(item)
                job = self._jobs.get((item.request, item.generation))
                if job is not None:
                    self._let_go(job)
            elif item.key in self._jobs:
                self._fail(self._jobs[item.key], item.error, retry=True)
        return bool(news)

    def _on_push(self, landing: Landing) -> None:
        job = self._jobs.get((landing.request, landing.generation))
        if job is not None and not job.releasing:
            job.landing = landing
            if job.table is not None:
                self._land(job)

    def _land(self, job: Job) -> None:
        assert job.landing is not None
        plan = self._planner.plan(job.key, len(job.tokens), len(job.tokens) - job.computed)
        self.courier.land(job.landing, plan)

    def _on_release(self, message: Release) -> None:
        job = self._jobs.get((message.request, message.generation))
        if job is None:  # it has ended here by itself
            self.report.released.append(Released(message.request, message.generation))
            return
        job.releasing = True
        if job.table is None:
            self._let_go(job)
        else:
            self.courier.cancel(job.key)
            self._take_news()

    def _adopt(self, message: Adopt) -> None:
        """Hand over by another scheme or profile from now on; what can not be is refused and the old one stays."""
        try:
            profile = self._planner.profile if message.profile is None else self._load_profile(message.profile)
            self._planner.adopt(message.scheme, profile)
        except ConfigError as error:
            _log.error("the hand-over stays as it is: %s", error)
        else:
            _log.info("hand-overs follow scheme %s, profile %s", message.scheme.name, message.profile or "as before")

    def _let_go(self, job: Job) -> None:
        if job.table is not None:
            self._cache.release(job.table)
        del self._jobs[job.key]
        self.report.released.append(Released(*job.key))

    def _fail(self, job: Job, error: str, *, retry: bool) -> None:
        if not job.failed:
            job.failed = True
            self.report.failed.append(Failed(*job.key, error=error, retry=retry))

    # ---- computing

    def step(self) -> bool:
        self._admit()
        jobs = [job for job in self._jobs.values() if job.computing]
        chunks = plan_chunks([len(job.tokens) - job.computed for job in jobs], self._budget)
        plan = [(job, self._rows(job, chunk)) for job, chunk in zip(jobs, chunks, strict=True) if chunk]
        if not plan:
            return False
        began_s = self._clock()
        slots = torch.from_numpy(np.concatenate([rows.table.slots(rows.start, rows.stop) for _, rows in plan]))
        logits = self._runner.run([rows for _, rows in plan], lambda layer: self._on_layer(plan, layer, slots))
        self._planner.observe([(len(rows.tokens), rows.stop) for _, rows in plan], self._clock() - began_s)
        self._apply(plan, logits)
        return True

    def _admit(self) -> None:
        """Pages for waiting jobs, in order, as long as there are some and this step's budget is not filled."""
        open_tokens = sum(len(job.tokens) - job.computed for job in self._jobs.values() if job.computing)
        running = sum(job.table is not None for job in self._jobs.values())
        for job in self._jobs.values():
            if job.table is not None or job.releasing or self._is_about_to_be_cached(job):
                continue
            if open_tokens >= self._budget or running >= self._max_num_seqs:
                return
            admission = self._cache.admit(job.tokens)
            if admission is None:
                return
            job.table, job.cached_tokens = admission.table, admission.cached_tokens
            job.computed = job.cached_tokens
            self.courier.open(job.key, job.table.slots(0, len(job.tokens)), job.cached_tokens)
            if job.landing is not None:
                self._land(job)
            open_tokens += len(job.tokens) - job.computed
            running += 1
            self.report.started.append(Started(job.request.id, job.request.generation))

    def _is_about_to_be_cached(self, job: Job) -> bool:
        """Whether most of this prompt is just being computed for another job: waiting for it is quicker."""
        if not self._cache.reuses_prefixes:
            return False
        for other in self._jobs.values():
            if other.computing and other.computed < len(job.tokens):
                shared = _common_prefix(job.tokens, other.tokens) // self._cache.page_size * self._cache.page_size
                if 2 * shared > len(job.tokens) and other.computed < shared:
                    return True
        return False

    def _rows(self, job: Job, chunk: int) -> Rows:
        assert job.table is not None
        stop = job.computed + chunk
        return Rows(job.table, job.computed, job.tokens[job.computed : stop], wants_logits=stop == len(job.tokens))

    def _on_layer(self, plan: Sequence[tuple[Job, Rows]], layer: int, slots: Tensor) -> None:
        """Layer `layer` of this step's KV is in the pool: it may cross while the next one computes."""
        if self._describe is not None:
            self._describe(layer, slots)
        for job, rows in plan:
            self.courier.store(job.key, layer, rows.stop)
        self.instance.intake()

    def _apply(self, plan: Sequence[tuple[Job, Rows]], logits: Tensor) -> None:
        for job, rows in plan:
            assert job.table is not None
            job.computed = rows.stop
            self._cache.commit(job.table, job.tokens[: rows.stop])
        finished = [job for job, rows in plan if rows.wants_logits]
        for job, choice in zip(finished, self._ending.choose(logits, [j.request for j in finished]), strict=True):
            if isinstance(choice, Choice):
                self._hand_over(job, choice)
            else:
                assert job.table is not None
                self._cache.discard(job.table)
                self._fail(job, choice, retry=False)

    def _hand_over(self, job: Job, choice: Choice) -> None:
        token, num_tokens = choice.token.id, len(job.tokens)
        job.token = token
        self.report.produced.append(
            Produced(*job.key, len(job.request.output), choice.token, choice.finish_reason, job.cached_tokens)
        )

        def note(scheme: Scheme, full: bool) -> bytes:
            return encode(HandOver(token, num_tokens, full, scheme))

        self.courier.finish(job.key, note)

    def load(self) -> Load:
        running = sum(job.table is not None for job in self._jobs.values())
        return Load(self._cache.pages.num_used, self._cache.pages.num_cached, running, len(self._jobs) - running)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
