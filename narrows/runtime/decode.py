"""A decode instance: makes room, waits for KV to arrive, then continues all its requests one token a step.

reserved ──all KV and HandOver arrived──▶ running ──last token──▶ gone
    │                                        └──no page left──▶ preempted: gone, to be prefilled again
    └──Release (nobody can write to its pages any more)──▶ gone
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrows.core.ids import InstanceId
from narrows.core.plan import Landing
from narrows.core.request import Request
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
from narrows.kv.layout import MASK_LOCAL
from narrows.kv.mask import KVMask
from narrows.kv.table import BlockTable
from narrows.runtime.channel import decode
from narrows.runtime.phase import Choice, Ending, Report
from narrows.runtime.runner import Rows, Runner
from narrows.transfer.base import Arrived, Region, Transport, TransportEvent

Key = tuple[str, int]


@dataclass(slots=True)
class Seat:
    """One attempt's place here. `table.num_tokens` has room for the KV of the next step's token."""

    request: Request
    table: BlockTable
    arrived_bytes: int = 0


class DecodePhase:
    """See the module's text. Every seat holds its pages until it is gone."""

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        mask: KVMask,
        pool_region: Region,
        mask_region: Region,
        transport: Transport,
        ending: Ending,
        *,
        instance: InstanceId,
        max_num_seqs: int,
    ) -> None:
        self.report = Report()
        self._runner = runner
        self._cache = cache
        self._mask = mask
        self._pool_region = pool_region
        self._mask_region = mask_region
        self._transport = transport
        self._ending = ending
        self._instance = instance
        self._max_num_seqs = max_num_seqs
        self._reserved: dict[Key, Seat] = {}
        self._running: dict[Key, Seat] = {}  # in order of their start

    # ---- messages and events

    def handle(self, message: ToInstance) -> None:
        if isinstance(message, Reserve):
            request = message.request
            self.report.reserved.append(Reserved(request.id, request.generation, self._reserve(request)))
        elif isinstance(message, Release):
            key = (message.request, message.generation)
            seat = self._reserved.pop(key, None) or self._running.pop(key, None)
            if seat is not None:
                self._transport.revoke(*key)
                self._free(seat)
            self.report.released.append(Released(*key))

    def _reserve(self, request: Request) -> Landing | None:
        num_tokens = request.num_tokens
        if len(self._reserved) + len(self._running) >= self._max_num_seqs:
            return None
        table = self._cache.reserve(num_tokens + 1)
        if table is None:
            return None
        self._reserved[request.id, request.generation] = Seat(request, table)
        return Landing(
            request.id,
            request.generation,
            self._instance,
            self._transport.address,
            self._pool_region.key,
            self._mask_region.key,
            self._mask.layout.num_slots,
            tuple(table.runs(0, num_tokens)),
        )

    def on_event(self, event: TransportEvent) -> None:
        if not isinstance(event, Arrived):
            return
        key = (event.tag.request, event.tag.generation)
        seat = self._reserved.get(key)
        if seat is None:
            return
        seat.arrived_bytes += event.num_bytes
        if event.note:
            self._start(key, seat, event.note)

    def _start(self, key: Key, seat: Seat, frame: bytes) -> None:
        num_tokens = seat.request.num_tokens
        try:
            note = decode(frame)
        except TransportError as error:
            self.report.failed.append(Failed(*key, error=f"its hand-over is damaged: {error}", retry=True))
            return
        complete = self._mask.is_complete(seat.table.runs(0, num_tokens))
        if not isinstance(note, HandOver) or note.num_tokens != num_tokens or not complete:
            self.report.failed.append(Failed(*key, error="its hand-over arrived incomplete", retry=True))
            return
        self._running[key] = self._reserved.pop(key)
        seat.request = replace(seat.request, output=(*seat.request.output, note.token))
        self.report.started.append(Started(*key, handover_bytes=seat.arrived_bytes))

    # ---- computing

    def step(self) -> bool:
        if not self._running:
            return False
        plan = [(key, seat, self._rows(seat)) for key, seat in self._running.items()]
        logits = self._runner.run([rows for _, _, rows in plan])
        self._apply([(key, seat) for key, seat, _ in plan], logits)
        return True

    def _rows(self, seat: Seat) -> Rows:
        return Rows(seat.table, seat.request.num_tokens - 1, seat.request.output[-1:])

    def _apply(self, plan: Sequence[tuple[Key, Seat]], logits: Tensor) -> None:
        self._note_stored([seat for _, seat in plan])
        for (key, seat), choice in zip(plan, self._ending.choose(logits, [s.request for _, s in plan]), strict=True):
            if isinstance(choice, Choice):
                self.report.produced.append(
                    Produced(*key, len(seat.request.output), choice.token, choice.finish_reason)
                )
                seat.request = replace(seat.request, output=(*seat.request.output, choice.token.id))
                if choice.finish_reason is not None:
                    self._leave(key)
            else:
                self._leave(key)
                self.report.failed.append(Failed(*key, error=choice, held=False))
        for key, seat in plan:
            while key in self._running and not self._cache.grow(seat.table, seat.request.num_tokens):
                self._preempt_youngest()

    def _note_stored(self, seats: Sequence[Seat]) -> None:
        """The step has stored the KV of each seat's last token in all layers."""
        slots = [seat.table.slot(seat.request.num_tokens - 1) for seat in seats]
        self._mask.states[:, torch.tensor(slots)] = MASK_LOCAL

    def _preempt_youngest(self) -> None:
        key = next(reversed(self._running))
        self._leave(key)
        self.report.failed.append(Failed(*key, error="no KV page was left", retry=True, held=False))

    def _leave(self, key: Key) -> None:
        self._free(self._running.pop(key))

    def _free(self, seat: Seat) -> None:
        """Give the pages back, their mask absent: whoever gets them next starts with nothing."""
        self._mask.clear(seat.table.runs(0, seat.table.capacity))
        self._cache.release(seat.table)

    def load(self) -> Load:
        return Load(self._cache.pages.num_used, self._cache.pages.num_cached, len(self._running), len(self._reserved))
