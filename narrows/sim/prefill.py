"""A simulated prefill instance: chunks, pages and prefix cache are the engine's, time is the cost's.

    waiting ──pages──▶ running ──last chunk──▶ leased ──all delivered, or the request is over──▶ gone
                          │ stored layers go to the hand-over in pieces, while the next ones compute

The steps are those of runtime.prefill on numbers alone.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

from narrows.core.events import EventKind
from narrows.core.ids import InstanceId
from narrows.core.trace import COMPUTE, Span
from narrows.kv.cache import KVCache
from narrows.kv.table import BlockTable
from narrows.profile.timing import Work
from narrows.sched.chunks import plan_chunks
from narrows.sim.cost import Cost
from narrows.sim.handover import HandOver, HandOverModel
from narrows.sim.link import Link
from narrows.sim.loop import Loop
from narrows.sim.request import Life, shared_tokens


class PrefillHooks(Protocol):
    """Whoever follows requests."""

    def prefilled(self, life: Life) -> None:
        """Its token is there, and told of."""
        ...

    def ready(self, life: Life) -> None:
        """Decode has what it begins with."""
        ...

    def let_go(self, life: Life, instance: InstanceId) -> None:
        """The instance holds nothing of this attempt any more."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One attempt of one request here."""

    life: Life
    needs_decode: bool
    num_tokens: int
    handover: HandOver
    tokens: "array[int]"
    table: BlockTable | None = None  # None: waiting for pages
    landed: bool = False  # decode has made room
    computed: int = 0
    done: bool = False  # its token is sampled


class PrefillInstance:
    """Computes what it is given, oldest first."""

    def __init__(
        self,
        loop: Loop,
        name: InstanceId,
        cost: Cost,
        cache: KVCache,
        link: Link,
        handover: HandOverModel,
        hooks: PrefillHooks,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        trace: Callable[[InstanceId, Span], Any] | None = None,
    ) -> None:
        self.name = name
        self.cache = cache
        self.link = link
        self.busy_s = 0.0
        self._loop = loop
        self._cost = cost
        self._handover = handover
        self._hooks = hooks
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._trace = trace
        self._jobs: dict[Life, Job] = {}  # in order of arrival
        self._stepping = False

    @property
    def num_waiting(self) -> int:
        """Jobs without pages."""
        return sum(job.table is None for job in self._jobs.values())

    def submit(self, life: Life, needs_decode: bool) -> None:
        """Compute the KV of all its tokens and sample the next one."""
        handover = HandOver(
            self._handover,
            self.link,
            life.num_tokens,
            partial(self._hooks.ready, life),
            partial(self._delivered, life),
        )
        self._jobs[life] = Job(life, needs_decode, life.num_tokens, handover, life.tokens())
        self._wake()

    def land(self, life: Life) -> HandOver:
        """Decode has made room for it."""
        job = self._jobs[life]
        job.landed = True
        if job.table is not None:
            self._land(job)
        return job.handover

    def _land(self, job: Job) -> None:
        """Room at decode and pages here: from now on, and with what is cached known, it may cross."""
        uncached = job.num_tokens - job.computed
        job.handover.land(self._cost.prefill_s([Work(uncached, job.num_tokens)]) if uncached else 0.0)

    def sent_bytes(self, life: Life) -> int:
        return self._jobs[life].handover.num_bytes

    def release(self, life: Life) -> None:
        """The request is over, or is prefilled anew: nothing more of it is sent. What was not delivered is told."""
        job = self._jobs.get(life)
        if job is not None:
            job.handover.cancel()
            self._let_go(job)

    def _delivered(self, life: Life) -> None:
        self._let_go(self._jobs[life])

    def _let_go(self, job: Job) -> None:
        del self._jobs[job.life]
        if job.table is not None:
            self.cache.release(job.table)
        if job.needs_decode and any(job.handover.sent.values()):
            delivered = job.handover.delivered(job.life.id, job.life.generation)
            job.life.deliver(self._loop.now_s, self.name, delivered)
        self._hooks.let_go(job.life, self.name)
        self._wake()

    # ---- computing

    def _wake(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._loop.at(self._loop.now_s, self._step, rank=1)

    def _step(self) -> None:
        self._stepping = False
        self._admit()
        jobs = [job for job in self._jobs.values() if job.table is not None and not job.done]
        chunks = plan_chunks([job.num_tokens - job.computed for job in jobs], self._budget)
        plan = [(job, chunk) for job, chunk in zip(jobs, chunks, strict=True) if chunk]
        if not plan:
            return
        seconds = self._cost.prefill_s([Work(chunk, job.computed + chunk) for job, chunk in plan])
        now_s, self._stepping = self._loop.now_s, True
        if any(job.needs_decode for job, _ in plan):
            num_layers = self._handover.num_layers
            for first, last in pairwise(self._handover.edges()):
                at_s = now_s + (seconds if last == num_layers else seconds * last / num_layers)
                self._loop.at(at_s, partial(self._store, plan, first, last))
        self._loop.at(now_s + seconds, partial(self._apply, plan, now_s), rank=1)

    def _admit(self) -> None:
        """Pages for waiting jobs, in order, as long as there are some and this step's budget is not filled."""
        running = [job for job in self._jobs.values() if job.table is not None]
        open_tokens = sum(job.num_tokens - job.computed for job in running if not job.done)
        num_running = len(running)
        for job in self._jobs.values():
            if job.table is not None or self._is_about_to_be_cached(job):
                continue
            if open_tokens >= self._budget or num_running >= self._max_num_seqs:
                return
            admission = self.cache.admit(job.tokens)
            if admission is None:
                return
            job.table, job.computed = admission.table, admission.cached_tokens
            if job.life.generation == 0:
                job.life.cached_tokens = admission.cached_tokens
            if job.needs_decode:
                if job.computed:
                    job.handover.store(0, self._handover.num_layers, job.computed)
                if job.landed:
                    self._land(job)
            open_tokens += job.num_tokens - job.computed
            num_running += 1
            job.life.tell(EventKind.PREFILL_STARTED, self._loop.now_s, self.name)

    def _is_about_to_be_cached(self, job: Job) -> bool:
        """Whether most of this prompt is just being computed for another job: waiting for it is quicker."""
        if not self.cache.reuses_prefixes or not job.life.arrival.prefix_ids:
            return False
        for other in self._jobs.values():
            if other.table is not None and not other.done and other.computed < job.num_tokens:
                page_size = self.cache.page_size
                shared = shared_tokens(job.life, other.life) // page_size * page_size
                if 2 * shared > job.num_tokens and other.computed < shared:
                    return True
        return False

    def _store(self, plan: list[tuple[Job, int]], first_layer: int, last_layer: int) -> None:
        for job, chunk in plan:
            if job.needs_decode and not job.handover.ended:
                job.handover.store(first_layer, last_layer, chunk)

    def _apply(self, plan: list[tuple[Job, int]], began_s: float) -> None:
        now_s = self._loop.now_s
        self._stepping = False
        self.busy_s += now_s - began_s
        for job, chunk in plan:
            if job.table is None or self._jobs.get(job.life) is not job:
                continue  # released meanwhile
            job.computed += chunk
            self.cache.commit(job.table, job.tokens[: job.computed])
            if job.computed == job.num_tokens:
                self._finish(job)
        if self._trace is not None:
            tokens = sum(chunk for _, chunk in plan)
            self._trace(self.name, Span(COMPUTE, f"prefill {tokens} tokens", began_s, now_s))
        self._wake()

    def _finish(self, job: Job) -> None:
        """The prompt's token is sampled: it goes to the client at once, and to decode with the hand-over."""
        job.done, job.tokens = True, array("q")
        life = job.life
        life.sample(self._loop.now_s, self.name)
        self._hooks.prefilled(life)
        if job.needs_decode:
            job.handover.finish()
        else:
            self._let_go(job)
