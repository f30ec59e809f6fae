"""A decode instance: makes room, waits for a hand-over, then continues all its requests one token a step.

reserved ──HandOver arrived──▶ running ──last token──────▶ gone, or held while KV is on its way to it
    │                             └──no page left──▶ preempted: the same, to be prefilled again
    └──Release (nobody can write to its pages any more)──▶ gone

A full hand-over has brought all KV. Behind a selective one the mask says what is here, and each step fetches what its
selection lacks (attention.selective); the seat is `complete` when the mask says so, and needs its prefill no more.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrows.attention.selective import SelectiveAttention
from narrows.core.ids import InstanceId
from narrows.core.plan import Landing
from narrows.core.request import Request
from narrows.core.scheme import SCHEMES, Scheme
from narrows.core.wire import (
    Failed,
    HandOver,
    Load,
    Produced,
    Release,
    Released,
    Reserve,
    Reserved,
    Started,
    ToInstance,
)
from narrows.errors import TransportError
from narrows.kv.cache import KVCache
from narrows.kv.layout import MASK_LOCAL, MASK_REMOTE
from narrows.kv.mask import KVMask
from narrows.kv.table import BlockTable
from narrows.runtime.phase import Choice, Ending, Instance, Report
from narrows.runtime.runner import Rows, Runner
from narrows.transfer.base import Arrived, PeerGone, PeerName, Region, Transport, TransportEvent
from narrows.transfer.codec import decode
from narrows.transfer.fetcher import Fetcher, Origin

Key = tuple[str, int]

LOCAL_PAUSE_S = 0.01  # the longest wait for KV before the others' turn is looked at again


@dataclass(slots=True)
class Seat:
    """One attempt's place here. `table.num_tokens` has room for the KV of the next step's token."""

    request: Request
    table: BlockTable
    prompt_tokens: int  # whose KV comes from prefill
    arrived_bytes: int = 0
    complete: bool = False  # all of that KV is here
    settled: bool = False  # and prefill will write nothing more
    origin: Origin | None = None
    scheme: Scheme = SCHEMES["full"]


@dataclass(frozen=True, slots=True)
class Selection:
    """What a decode instance needs to read selected KV only."""

    attention: SelectiveAttention  # of requests that lack KV
    runner: Runner  # of their steps
    local: SelectiveAttention  # of those that do not
    fetcher: Fetcher
    metadata: Region | None


@dataclass(frozen=True, slots=True)
class Regions:
    """Registered memory that prefill writes to."""

    pool: Region
    mask: Region


class DecodePhase:
    """See the module's text. Every seat holds its pages until it is gone."""

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        mask: KVMask,
        regions: Regions,
        transport: Transport,
        ending: Ending,
        *,
        selection: Selection | None,  # None: every step reads all KV
        name: InstanceId,
        clock: Callable[[], float],
        max_num_seqs: int,
    ) -> None:
        self.report = Report()
        self.instance: Instance
        self._runner = runner
        self._cache = cache
        self._mask = mask
        self._regions = regions
        self._transport = transport
        self._ending = ending
        self._selection = selection
        self._name = name
        self._max_num_seqs = max_num_seqs
        self._reserved: dict[Key, Seat] = {}
        self._running: dict[Key, Seat] = {}  # in order of their start
        self._held: dict[Key, Seat] = {}  # ended, but prefill may still write to their pages
        self._clock = clock
        # of the step that is going on
        self._lacking: Set[Key] = set()
        self._waited_s = self._local_s = 0.0

    # ---- messages and events

    def handle(self, message: ToInstance) -> None:
        if isinstance(message, Reserve):
            request = message.request
            self.report.reserved.append(Reserved(request.id, request.generation, self._reserve(request)))
        elif isinstance(message, Release):
            key = (message.request, message.generation)
            seat = self._reserved.pop(key, None) or self._running.pop(key, None) or self._held.pop(key, None)
            if seat is not None:
                self._transport.revoke(*key)
                self._free(seat)
            self.report.released.append(Released(*key))

    def is_urgent(self, message: ToInstance) -> bool:
        return isinstance(message, Reserve)

    def _reserve(self, request: Request) -> Landing | None:
        num_tokens = request.num_tokens
        if len(self._reserved) + len(self._running) + len(self._held) >= self._max_num_seqs:
            return None
        table = self._cache.reserve(num_tokens + 1)
        if table is None:
            return None
        self._reserved[request.id, request.generation] = Seat(request, table, num_tokens)
        self._mask.set(table.runs(0, num_tokens), MASK_REMOTE)
        metadata = self._selection.metadata if self._selection is not None else None
        return Landing(
            request.id,
            request.generation,
            self._name,
            self._transport.address,
            self._regions.pool.key,
            self._regions.mask.key,
            self._mask.layout.num_slots,
            tuple(table.runs(0, num_tokens)),
            None if metadata is None else metadata.key,
        )

    def serve(self) -> bool:
        deferred: list[TransportEvent] = []
        fetcher = None if self._selection is None else self._selection.fetcher
        if fetcher is not None:
            deferred, fetcher.deferred = fetcher.deferred, []
        events = self._transport.poll()
        for event in deferred:
            self._on_event(event)
        for event in events:
            if fetcher is None or not fetcher.take(event):
                self._on_event(event)
        if fetcher is not None:
            for key in fetcher.settled & self._running.keys():
                self._running[key].settled = True
            fetcher.settled.clear()
        return bool(deferred) or bool(events)

    def _on_event(self, event: TransportEvent) -> None:
        if isinstance(event, PeerGone):
            lost = [k for k, seat in self._running.items() if not seat.complete and _is_from(seat, event.peer)]
            for key in lost:
                self._lose(key, f"{event.peer} is gone with KV of it: {event.reason}")
        if not isinstance(event, Arrived):
            return
        key = (event.tag.request, event.tag.generation)
        seat = self._reserved.get(key)
        if seat is None:
            return
        seat.arrived_bytes += event.num_bytes
        if event.note:
            self._start(key, seat, event.peer, event.note)

    def _start(self, key: Key, seat: Seat, peer: PeerName, frame: bytes) -> None:
        try:
            note = decode(frame)
        except TransportError as error:
            self.report.failed.append(Failed(*key, error=f"its hand-over is damaged: {error}", retry=True))
            return
        seat.complete = self._is_complete(seat)
        lacks = not seat.complete and (self._selection is None or (isinstance(note, HandOver) and note.full))
        if not isinstance(note, HandOver) or note.num_tokens != seat.prompt_tokens or lacks:
            self.report.failed.append(Failed(*key, error="its hand-over arrived incomplete", retry=True))
            return
        if self._selection is not None and note.full:  # its metadata did not cross: the keys are here
            slots = torch.from_numpy(seat.table.slots(0, seat.prompt_tokens))
            for layer in range(self._mask.layout.num_layers):
                self._selection.attention.describe(layer, slots)
        self._running[key] = self._reserved.pop(key)
        seat.origin, seat.settled = Origin(*key, peer, seat.prompt_tokens), note.full
        seat.scheme = note.scheme
        seat.request = replace(seat.request, output=(*seat.request.output, note.token))
        self.report.started.append(Started(*key, handover_bytes=seat.arrived_bytes))

    def _is_complete(self, seat: Seat) -> bool:
        return self._mask.is_complete(seat.table.runs(0, seat.prompt_tokens))

    # ---- computing

    def step(self) -> bool:
        """One token for each running request. Those that lack KV step together, and while they wait for it the others
        take steps of their own: a slow link is no reason for everybody to wait."""
        for seat in self._running.values():
            seat.complete = seat.complete or self._is_complete(seat)
        self._lacking = {key for key, seat in self._running.items() if not seat.complete}
        self._waited_s = self._local_s = 0.0
        if self._lacking:
            assert self._selection is not None
            self._step(self._lacking, self._selection.runner, self._selection.attention)
        if not self._local_s:
            self._step_local()
        return bool(self._lacking) or self._local_s > 0.0

    def wait(self, timeout_s: float) -> None:
        """In the middle of a step, while KV is on its way: others' steps take at most as long as is waited anyway."""
        local = self._running.keys() - self._lacking
        if local and self._local_s <= self._waited_s:
            self._step_local()
            self.instance.intake()
            return
        began_s = self._clock()
        self.instance.wait(min(timeout_s, LOCAL_PAUSE_S) if local else timeout_s)
        self._waited_s += self._clock() - began_s

    def _step_local(self) -> None:
        """One token for those whose KV is all here."""
        local = self._running.keys() - self._lacking
        if local:
            began_s = self._clock()
            self._step(local, self._runner, None if self._selection is None else self._selection.local)
            self._local_s += self._clock() - began_s

    def _step(self, keys: Set[Key], runner: Runner, attention: SelectiveAttention | None) -> None:
        plan = [(key, seat) for key, seat in self._running.items() if key in keys]
        seats = [seat for _, seat in plan]
        if attention is not None:
            self._begin(seats, attention)
        logits = runner.run([self._rows(seat) for seat in seats])
        self._apply(plan, logits, attention)

    def _rows(self, seat: Seat) -> Rows:
        return Rows(seat.table, seat.request.num_tokens - 1, seat.request.output[-1:])

    def _begin(self, seats: Sequence[Seat], attention: SelectiveAttention) -> None:
        """Tell the attention which requests lack KV, and where it is."""
        lacking = [seat for seat in seats if not seat.complete]
        attention.begin(
            [not seat.complete for seat in seats],
            parallel_lanes=all(seat.scheme.parallel_lanes for seat in lacking),
            packed=all(seat.scheme.packed for seat in lacking),
        )
        if lacking:
            assert self._selection is not None
            self._selection.fetcher.begin(
                [seat.origin for seat in seats], grants=any(seat.scheme.speculative != 0.0 for seat in seats)
            )

    def _apply(self, plan: Sequence[tuple[Key, Seat]], logits: Tensor, attention: SelectiveAttention | None) -> None:
        self._note_stored([seat for _, seat in plan])
        broken, read = set[int](), [(0, 0)] * len(plan)
        if attention is not None:
            broken, counts = attention.broken, attention.counts
            read = list(zip(counts.selected.tolist(), counts.fetched.tolist(), strict=True))
        good = [i for i in range(len(plan)) if i not in broken]
        for i in sorted(broken):
            self._lose(plan[i][0], "KV of it that a step needed did not come from prefill")
        choices = self._ending.choose(logits[good], [plan[i][1].request for i in good]) if good else []
        for i, choice in zip(good, choices, strict=True):
            self._take(*plan[i], choice, *read[i])
        for key, seat in plan:
            while key in self._running and not self._cache.grow(seat.table, seat.request.num_tokens):
                self._preempt_youngest([key for key, _ in plan])  # others may be in the middle of a step

    def _take(self, key: Key, seat: Seat, choice: "Choice | str", selected: int, fetched: int) -> None:
        """A token of one request, or the error that ends it."""
        if not isinstance(choice, Choice):
            self.report.failed.append(Failed(*key, error=choice, held=self._leave(key)))
            return
        index = len(seat.request.output)
        seat.request = replace(seat.request, output=(*seat.request.output, choice.token.id))
        held = choice.finish_reason is not None and self._leave(key)
        self.report.produced.append(
            Produced(*key, index, choice.token, choice.finish_reason, held=held, selected=selected, fetched=fetched)
        )

    def _note_stored(self, seats: Sequence[Seat]) -> None:
        """The step has stored the KV of each seat's last token in all layers."""
        slots = [seat.table.slot(seat.request.num_tokens - 1) for seat in seats]
        self._mask.states[:, torch.tensor(slots)] = MASK_LOCAL

    def _preempt_youngest(self, among: Sequence[Key]) -> None:
        key = next(key for key in reversed(among) if key in self._running)
        held = self._leave(key)
        self.report.failed.append(Failed(*key, error="no KV page was left", retry=True, held=held, preempted=True))

    def _lose(self, key: Key, error: str) -> None:
        """KV that a running request needs will not come: it is to be computed again."""
        self._held[key] = self._running.pop(key)
        self.report.failed.append(Failed(*key, error=error, retry=True))

    def _leave(self, key: Key) -> bool:
        """A running request has ended. Whether its pages are held, since prefill may still write to them: even what
        is complete may be written once more, where a fetch and a push have crossed."""
        seat = self._running.pop(key)
        if not seat.settled:
            self._held[key] = seat
            return True
        self._free(seat)
        return False

    def _free(self, seat: Seat) -> None:
        """Give the pages back, their mask absent: whoever gets them next starts with nothing."""
        self._mask.clear(seat.table.runs(0, seat.table.capacity))
        self._cache.release(seat.table)

    def load(self) -> Load:
        waiting = len(self._reserved) + len(self._held)
        return Load(self._cache.pages.num_used, self._cache.pages.num_cached, len(self._running), waiting)


def _is_from(seat: Seat, peer: PeerName) -> bool:
    return seat.origin is not None and seat.origin.peer == peer
