"""One simulation: requests through prefill instances, links and decode groups on virtual time.

    arrival ──▶ queue ──choose_prefill──▶ prefill ───hand-over──▶ decode group ──▶ end
                                             └── decode room is found while it computes, or later
    external prefill:  arrival ──────────────────────────────▶ decode group ──▶ end      (NanoCP, section 3)

The order of placing is the coordinator's (runtime.coordinator): the policies are the same objects.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.trace import Span
from narrows.errors import ConfigError
from narrows.kv.cache import KVCache
from narrows.kv.layout import pages_for
from narrows.metrics.definitions import RequestMetrics
from narrows.profile.timing import Work
from narrows.sched.base import GroupPolicy, PrefillPolicy
from narrows.sched.group import Bindings, Decision, GroupView, Ints, Placement, Waiting
from narrows.sched.least_batch import LeastBatch
from narrows.sched.state import GroupState
from narrows.sched.view import ClusterView, Demand, InstanceView
from narrows.sim.cost import Cost
from narrows.sim.group import DecodeGroup, GroupOptions, GroupShape
from narrows.sim.handover import HandOver, HandOverModel
from narrows.sim.link import Link, Transfer
from narrows.sim.loop import Loop
from narrows.sim.prefill import PrefillInstance
from narrows.sim.request import Life
from narrows.sim.workload import Trace


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Prefill instances and what each has; `link_bytes_per_s` is what it can send."""

    cost: Cost
    num_instances: int
    num_pages: int
    page_size: int
    link_bytes_per_s: float
    handover: HandOverModel
    link_latency_s: float = 0.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    reuse_prefixes: bool = True


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated, names looked up (sim.setup); what can never be served is refused by `simulate`.

    `lock_step`: all decode instances are one group. Else each steps on its own and `policy`, of degree 1, chooses
    among them. `prefill` None: requests arrive with their KV at hand, and their first token too: at their arrival or,
    with `first_token_at_start`, when decode begins, which leaves waiting for room out of TTST and TPOT. `cost` is that
    of decode, and of prefilling again what external prefill brought and decode preempted.
    """

    trace: Trace
    cost: Cost
    policy: GroupPolicy
    decode: GroupShape
    prefill: PrefillShape | None = None
    lock_step: bool = True
    options: GroupOptions = field(default_factory=GroupOptions)
    first_token_at_start: bool = False
    prefill_policy: PrefillPolicy = field(default_factory=LeastBatch)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears what. `progress` (requests ended, of all); `decided` each decision of a group with its view; `placed`
    each placement on instances that step on their own; `trace` what instances and links do."""

    progress: Callable[[int, int], Any] | None = None
    decided: Callable[[GroupView, Decision, float], Any] | None = None
    placed: Callable[[GroupView, Waiting, Placement | None, float], Any] | None = None
    trace: Callable[[InstanceId, Span], Any] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run."""

    lives: Sequence[Life]
    groups: Sequence[DecodeGroup]
    prefill: Sequence[PrefillInstance]
    queue: Sequence[tuple[float, int]]  # (time, requests that wait for prefill) at each change
    end_s: float
    num_events: int  # of the loop

    def events(self) -> list[Event]:
        """All requests' events by time; those of one request in their order."""
        return sorted(self._all(), key=lambda event: event.time_s)

    def _all(self) -> Iterator[Event]:
        for life in self.lives:
            yield from life.events()

    def metrics(self) -> list[RequestMetrics]:
        """Of each request, in the order of arrival."""
        return [life.measure() for life in self.lives]


def simulate(setup: Setup, listeners: Listeners | None = None) -> Outcome:
    """Run until all requests have ended. Raises ConfigError for what can never be served."""
    return _Cluster(setup, listeners or Listeners()).run()


class _Cluster:
    """The coordinator's part, and the hooks of instances."""

    def __init__(self, setup: Setup, listeners: Listeners) -> None:
        self._setup = setup
        self._listeners = listeners
        self._loop = Loop()
        self._lives = [Life(RequestId(str(i)), i, arrival) for i, arrival in enumerate(setup.trace)]
        self._groups = self._make_groups()
        self._prefill: dict[InstanceId, PrefillInstance] = {}
        self._queue: OrderedDict[Life, None] = OrderedDict()  # not yet sent to prefill
        self._roomless: OrderedDict[Life, None] = OrderedDict()  # for whom no decode room has been found
        self._at_prefill: dict[Life, tuple[PrefillInstance, int]] = {}  # and the pages counted there
        self._at_decode: dict[Life, DecodeGroup] = {}
        self._held: dict[InstanceId, tuple[int, int]] = {}  # (requests, pages) of each prefill instance
        self._queued: list[tuple[float, int]] = []
        self._num_placed = 0
        self._num_ended = 0
        if setup.prefill is not None:
            for i in range(setup.prefill.num_instances):
                self._make_prefill(InstanceId(f"prefill-{i}"), setup.prefill)

    def _make_groups(self) -> list[DecodeGroup]:
        setup = self._setup
        names = [InstanceId(f"decode-{i}") for i in range(setup.decode.num_instances)]
        if setup.lock_step:
            return [self._make_group(setup.decode, names)]
        one = GroupShape(1, 1, setup.decode.num_pages, setup.decode.page_size, setup.decode.max_num_seqs)
        return [self._make_group(one, [name]) for name in names]

    def _make_group(self, shape: GroupShape, names: Sequence[InstanceId]) -> DecodeGroup:
        setup, listeners = self._setup, self._listeners
        return DecodeGroup(
            self._loop,
            shape,
            names,
            setup.policy,
            setup.cost,
            self,
            setup.options,
            record=listeners.decided,
            trace=listeners.trace,
        )

    def _make_prefill(self, name: InstanceId, shape: PrefillShape) -> None:
        trace = self._listeners.trace

        def crossed(transfer: Transfer, now_s: float) -> None:
            if trace is not None:
                trace(
                    name, Span(transfer.path, transfer.path, transfer.started_s, now_s, num_bytes=round(transfer.sent))
                )

        link = Link(self._loop, shape.link_bytes_per_s, latency_s=shape.link_latency_s, observe=crossed)
        cache = KVCache(shape.num_pages, shape.page_size, reuse_prefixes=shape.reuse_prefixes)
        self._held[name] = (0, 0)
        self._prefill[name] = PrefillInstance(
            self._loop,
            name,
            shape.cost,
            cache,
            link,
            shape.handover,
            self,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            trace=trace,
        )

    def run(self) -> Outcome:
        self._check()
        for life in self._lives:
            self._loop.at(life.arrival.time_s, partial(self._arrive, life))
        self._loop.run()
        left = [life.id for life in self._lives if not life.finished]
        assert not left, f"requests {left[:5]} have not ended"
        return Outcome(
            self._lives,
            self._groups,
            tuple(self._prefill.values()),
            self._queued,
            self._loop.now_s,
            self._loop.num_run,
        )

    def _check(self) -> None:
        """Refuse what could never be placed: it would hold up all behind it."""
        if not self._lives:
            raise ConfigError("trace: it has no requests; give at least one")
        most = max(self._lives, key=lambda life: life.arrival.num_tokens)
        lengths = f"{most.arrival.num_prompt} + {most.arrival.num_output} tokens"
        if not self._groups[0].fits(most.arrival.num_tokens):
            shape = self._groups[0].shape
            raise ConfigError(
                f"trace: request {most.index + 1}: input_length + output_length: {lengths} do not fit the decode "
                f"instances even when nothing else is there ({shape.num_instances} of {shape.num_pages} pages of "
                f"{shape.page_size} tokens, policy {self._setup.policy.name}); give them more memory, spread "
                "requests by another policy, or leave the request out"
            )
        prefill = self._setup.prefill
        if prefill is not None and pages_for(most.arrival.num_tokens + 1, prefill.page_size) > prefill.num_pages:
            raise ConfigError(
                f"trace: request {most.index + 1}: input_length + output_length: {lengths} do not fit a prefill "
                f"instance of {prefill.num_pages} pages of {prefill.page_size} tokens; give it more memory, or leave "
                "the request out"
            )

    # ---- arrivals and the order of placing

    def _arrive(self, life: Life) -> None:
        now_s = self._loop.now_s
        life.tell(EventKind.ARRIVED, now_s, num_prompt_tokens=life.arrival.num_prompt)
        if self._setup.prefill is None:
            self._come_with_kv(life)
        else:
            self._queue[life] = None
            self._schedule()
            self._note_queue()

    def _come_with_kv(self, life: Life) -> None:
        """External prefill: KV, and the next token, are at hand."""
        late = self._setup.first_token_at_start and life.generation == 0 and life.num_left > 1
        if not late:
            life.sample(self._loop.now_s, None)
        if life.num_left == 0:
            self._end(life)
        else:
            self._seek_room(life)
            self._schedule()

    def _seek_room(self, life: Life) -> None:
        if self._setup.lock_step:
            self._groups[0].enqueue(life, life.arrival.time_s)
        else:
            self._roomless[life] = None

    def _schedule(self) -> None:
        """Give decode room to what has begun, then begin what is queued; both strictly in order."""
        while self._roomless:
            life = next(iter(self._roomless))
            if not self._reserve(life):
                break
            del self._roomless[life]
        while self._queue:
            life = next(iter(self._queue))
            demand = Demand(life.room, life.num_left > 1)
            name = self._setup.prefill_policy.choose_prefill(self._view(), demand, self._loop.now_s)
            if name is None:
                break
            del self._queue[life]
            self._to_prefill(life, name, demand)

    def _to_prefill(self, life: Life, name: InstanceId, demand: Demand) -> None:
        instance, (seqs, pages) = self._prefill[name], self._held[name]
        needed = pages_for(life.room, instance.cache.page_size)
        self._held[name] = (seqs + 1, pages + needed)
        self._at_prefill[life] = instance, needed
        life.tell(EventKind.PLACED, self._loop.now_s, name)
        instance.submit(life, demand.needs_decode)
        if not demand.needs_decode:
            return
        if self._setup.lock_step or self._roomless or not self._reserve(life):
            self._seek_room(life)

    def _reserve(self, life: Life) -> bool:
        """Room on one of the instances that step on their own."""
        view, request = self.decode_view(), Waiting(life.room, life.arrival.time_s)
        placement = self._setup.policy.place(GroupState(view), request, self._loop.now_s)
        if self._listeners.placed is not None:
            self._listeners.placed(view, request, placement, self._loop.now_s)
        if placement is None:
            return False
        if len(placement.members) != 1:
            raise ConfigError(
                f"policy: {self._setup.policy.name} spreads a request over instances, which must step together for "
                "that; use one of degree 1, or let them step together"
            )
        self._num_placed += 1
        self._groups[placement.moe].put(life, Placement(0, (0,), placement.split), self._num_placed)
        return True

    def decode_view(self) -> GroupView:
        """Instances that step on their own, as the coordinator sees them (runtime.coordinator)."""
        for group in self._groups:
            group.settle()
        seats = sorted((order, i, n, on) for i, group in enumerate(self._groups) for order, n, on in group.holdings())
        _, moe, tokens, active = np.array(seats, np.int64).reshape(-1, 4).T
        rows = np.flatnonzero(active)
        shape, width = self._setup.decode, len(self._groups)

        def total(of: Ints) -> Ints:
            return np.bincount(moe, of, width).astype(np.int64)

        return GroupView(
            nodes=np.zeros(width, np.int64),
            num_pages=np.full(width, shape.num_pages),
            used_pages=total(-(-tokens // shape.page_size)),
            kv_tokens=total(tokens - 1),
            page_size=shape.page_size,
            max_num_seqs=shape.max_num_seqs,
            active=Bindings(moe[rows], np.arange(len(rows) + 1), moe[rows], tokens[rows] - 1),
            num_placed=self._num_placed,
            arriving=total(1 - active),
        )

    def _view(self) -> ClusterView:
        assert self._setup.prefill is not None
        shape = self._setup.prefill
        return ClusterView(
            tuple(
                InstanceView(name, Role.PREFILL, shape.num_pages, pages, shape.page_size, shape.max_num_seqs, seqs)
                for name, (seqs, pages) in sorted(self._held.items())
            )
        )

    def _note_queue(self) -> None:
        self._queued.append((self._loop.now_s, len(self._queue)))

    def _end(self, life: Life) -> None:
        life.finish(self._loop.now_s)
        self._ended()

    def _ended(self) -> None:
        self._num_ended += 1
        if self._listeners.progress is not None:
            self._listeners.progress(self._num_ended, len(self._lives))

    # ---- what instances tell

    def prefilled(self, life: Life) -> None:
        if life.num_left == 0:
            self._end(life)

    def ready(self, life: Life) -> None:
        group, num_bytes = self._at_decode[life], self._at_prefill[life][0].sent_bytes(life)
        life.tell(EventKind.HANDOVER_DONE, self._loop.now_s, group.home(life), num_bytes=num_bytes)
        group.arrived(life)

    def let_go(self, life: Life, instance: InstanceId) -> None:
        seqs, pages = self._held[instance]
        self._held[instance] = (seqs - 1, pages - self._at_prefill.pop(life)[1])
        self._schedule()
        self._note_queue()

    def placed(self, life: Life, group: DecodeGroup) -> HandOver | None:
        if self._setup.prefill is None:
            if life.produced == 0:
                life.sample(self._loop.now_s, None)
            return None
        self._at_decode[life] = group
        return self._at_prefill[life][0].land(life)

    def finished(self, life: Life) -> None:
        self._ended()
        self._leave(life)
        self._schedule()

    def _leave(self, life: Life) -> None:
        self._at_decode.pop(life, None)
        if life in self._at_prefill:
            self._at_prefill[life][0].release(life)

    def preempted(self, life: Life, since_s: float) -> None:
        if self._setup.prefill is None:
            seconds = self._setup.cost.prefill_s([Work(life.num_tokens, life.num_tokens)])
            self._loop.after(seconds, partial(self._come_with_kv, life))
            return
        self._leave(life)
        self._queue[life] = None
        self._queue.move_to_end(life, last=False)
        self._schedule()
        self._note_queue()
