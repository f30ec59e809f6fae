"""A prefill instance: computes prompts in chunks and pushes their KV layer by layer to where decode made room.

waiting ──pages──▶ running ──last chunk──▶ leased ──all delivered──▶ released; its pages become prefix cache
                      │ each layer of each chunk is posted as soon as it is stored, while the next computes
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from narrows.core.plan import Landing
from narrows.core.request import Request
from narrows.core.wire import Failed, HandOver, Load, Prefill, Produced, Push, Release, Released, Started, ToInstance
from narrows.errors import PeerLost
from narrows.kv.cache import KVCache
from narrows.kv.layout import KVLayout
from narrows.kv.table import BlockTable
from narrows.runtime.channel import encode
from narrows.runtime.phase import Choice, Ending, Report
from narrows.runtime.runner import Rows, Runner
from narrows.sched.chunks import plan_chunks
from narrows.transfer.base import (
    Copy,
    Done,
    Dropped,
    Post,
    PostId,
    Priority,
    Put,
    Region,
    Tag,
    Transport,
    TransportEvent,
)
from narrows.transfer.plan import clip, plan_layer

CONNECT_TIMEOUT_S = 2.0


@dataclass(slots=True)
class Job:
    """One attempt of one request here. `stored[l]` and `posted[l]` count leading tokens, layer by layer."""

    request: Request
    table: BlockTable | None = None  # None: waiting for pages
    cached_tokens: int = 0
    computed: int = 0
    stored: list[int] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    landing: Landing | None = None
    token: int | None = None  # sampled here
    handed_over: bool = False  # the last post is out
    failed: bool = False  # reported; only Release follows
    releasing: bool = False
    open_posts: set[PostId] = field(default_factory=set)

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
        layout: KVLayout,
        region: Region,
        transport: Transport,
        ending: Ending,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.report = Report()
        self._runner = runner
        self._cache = cache
        self._layout = layout
        self._region = region
        self._transport = transport
        self._ending = ending
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._jobs: dict[tuple[str, int], Job] = {}  # in order of arrival
        self._posts: dict[PostId, Job] = {}

    # ---- messages and events

    def handle(self, message: ToInstance) -> None:
        if isinstance(message, Prefill):
            job = Job(message.request)
            self._jobs[job.request.id, job.request.generation] = job
        elif isinstance(message, Push):
            job_or_none = self._jobs.get((message.landing.request, message.landing.generation))
            if job_or_none is not None and not job_or_none.releasing:
                job_or_none.landing = message.landing
                self._push_all(job_or_none)
        elif isinstance(message, Release):
            self._on_release(message)

    def on_event(self, event: TransportEvent) -> None:
        if not isinstance(event, Done | Dropped):
            return
        job = self._posts.pop(event.post, None)
        if job is None:
            return
        job.open_posts.discard(event.post)
        if isinstance(event, Dropped) and not job.releasing:
            self._fail(job, f"its KV did not arrive at {event.peer}: {event.error}", retry=True)
        if not job.open_posts and (job.releasing or (job.handed_over and not job.failed)):
            self._let_go(job)

    def _on_release(self, message: Release) -> None:
        job = self._jobs.get((message.request, message.generation))
        if job is None:  # it has ended here by itself
            self.report.released.append(Released(message.request, message.generation))
            return
        job.releasing = True
        if job.open_posts:
            self._transport.cancel(message.request, message.generation)
        else:
            self._let_go(job)

    def _let_go(self, job: Job) -> None:
        if job.table is not None:
            self._cache.release(job.table)
        del self._jobs[job.request.id, job.request.generation]
        self.report.released.append(Released(job.request.id, job.request.generation))

    def _fail(self, job: Job, error: str, *, retry: bool) -> None:
        if not job.failed:
            job.failed = True
            self.report.failed.append(Failed(job.request.id, job.request.generation, error, retry))

    # ---- computing

    def step(self) -> bool:
        self._admit()
        jobs = [job for job in self._jobs.values() if job.computing]
        chunks = plan_chunks([len(job.tokens) - job.computed for job in jobs], self._budget)
        plan = [(job, self._rows(job, chunk)) for job, chunk in zip(jobs, chunks, strict=True) if chunk]
        if not plan:
            return False
        logits = self._runner.run([rows for _, rows in plan], lambda layer: self._on_layer(plan, layer))
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
            job.stored = [job.cached_tokens] * self._layout.num_layers
            job.posted = [0] * self._layout.num_layers
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

    def _on_layer(self, plan: Sequence[tuple[Job, Rows]], layer: int) -> None:
        """Layer `layer` of this step's KV is in the pool: send it while the next one computes."""
        for job, rows in plan:
            job.stored[layer] = rows.stop
            self._push(job, layer)

    def _apply(self, plan: Sequence[tuple[Job, Rows]], logits: object) -> None:
        for job, rows in plan:
            assert job.table is not None
            job.computed = rows.stop
            self._cache.commit(job.table, job.tokens[: rows.stop])
        finished = [job for job, rows in plan if rows.wants_logits]
        for job, choice in zip(finished, self._ending.choose(logits, [j.request for j in finished]), strict=True):  # type: ignore[arg-type]
            if isinstance(choice, Choice):
                self._hand_over(job, choice)
            else:
                assert job.table is not None
                self._cache.discard(job.table)
                self._fail(job, choice, retry=False)

    # ---- pushing

    def _hand_over(self, job: Job, choice: Choice) -> None:
        job.token = choice.token.id
        self.report.produced.append(
            Produced(
                job.request.id,
                job.request.generation,
                len(job.request.output),
                choice.token,
                choice.finish_reason,
                job.cached_tokens,
            )
        )
        self._push_last(job)

    def _push_all(self, job: Job) -> None:
        for layer in range(len(job.stored)):
            self._push(job, layer)
        self._push_last(job)

    def _push(self, job: Job, layer: int) -> None:
        """Post what this layer has stored and not posted yet, its mask update behind it."""
        start, stop = job.posted[layer], job.stored[layer]
        if job.landing is None or job.table is None or start == stop or job.failed:
            return
        job.posted[layer] = stop
        target = replace(self._layout, num_pages=job.landing.num_slots // self._layout.page_size)
        push = plan_layer(self._layout, target, layer, job.table.runs(start, stop), clip(job.landing.runs, start, stop))
        self._post(
            job,
            job.landing,
            layer,
            copies=(Copy(self._region, push.source_offsets, push.target_offsets, push.lengths),),
            trailing=tuple(Put(job.landing.mask, offset, data) for offset, data in push.mask_puts),
        )

    def _push_last(self, job: Job) -> None:
        """When prompt and pushes are complete: the note that lets decode begin."""
        if job.token is None or job.landing is None or job.handed_over:
            return
        note = encode(HandOver(job.token, len(job.tokens)))
        self._post(job, job.landing, self._layout.num_layers, note=note)
        job.handed_over = True

    def _post(
        self,
        job: Job,
        landing: Landing,
        layer: int,
        copies: tuple[Copy, ...] = (),
        trailing: tuple[Put, ...] = (),
        note: bytes = b"",
    ) -> None:
        if job.failed:
            return
        tag = Tag(job.request.id, job.request.generation, layer)
        try:
            peer = self._transport.connect(landing.address, timeout_s=CONNECT_TIMEOUT_S)
            post = self._transport.post(peer, Post(tag, Priority.PROACTIVE, landing.pool, copies, trailing, note))
        except PeerLost as error:
            self._fail(job, f"its KV can not be sent to {landing.instance}: {error}", retry=True)
            return
        job.open_posts.add(post)
        self._posts[post] = job

    def load(self) -> Load:
        running = sum(job.table is not None for job in self._jobs.values())
        return Load(self._cache.pages.num_used, self._cache.pages.num_cached, running, len(self._jobs) - running)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
