"""The coordinator: one state machine over all requests. No clock, no sockets, no threads; the cluster drives it.

A request's way, seen from here:

    queued ── Prefill ──▶ prefilling ── first token ──▶ handing over ── Started ──▶ decoding ──▶ ended
      ▲       decode room is found while prefill runs, or later (Reserve ▶ Reserved ▶ Push)    │
      └───────────── next generation, from prompt + output: preempted or an instance was lost ───────────┘

Two ledgers are kept apart. A *track* is a live request and ends at once, exactly once, for its caller. A *hold* is what
one attempt occupies on instances; it outlives the track until every instance has said Released or died.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId, RequestId, Role
from narrows.core.request import FinishReason, Request, is_whole
from narrows.core.wire import (
    Delivered,
    Failed,
    Heartbeat,
    Prefill,
    Produced,
    Progress,
    Push,
    Ready,
    Refused,
    Release,
    Reserve,
    Reserved,
    Started,
    ToCoordinator,
    ToInstance,
    Traced,
)
from narrows.errors import QueueFull, RequestError, Unavailable
from narrows.kv.layout import pages_for
from narrows.runtime.client import Output, Sink
from narrows.runtime.ledger import Hold, HoldKey, Member, Track, needs_decode
from narrows.sched.base import GroupPolicy, PrefillPolicy
from narrows.sched.group import Bindings, GroupView, Ints, Waiting
from narrows.sched.least_batch import LeastBatch
from narrows.sched.state import GroupState
from narrows.sched.view import ClusterView, Demand, InstanceView

MAX_LOSSES = 2  # how many lost instances or links one request survives


class Coordinator:
    """Admits, places, follows and ends requests. Messages to send collect in `outbox`, events go to `observe`."""

    def __init__(
        self,
        policy: GroupPolicy,  # of degree 1: decode attends to what one instance holds
        *,
        prefill: PrefillPolicy | None = None,  # None: the fewest requests
        replays: bool = False,  # what decode had computed is decoded again, not prefilled, when a request starts over
        max_queue: int,
        max_model_len: int,
        vocab_size: int,
        observe: Callable[[Event], None],
    ) -> None:
        self._policy = policy
        self._prefill = prefill or LeastBatch()
        self._replays = replays
        self._max_queue = max_queue
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._observe = observe
        self._tracks: dict[str, Track] = {}
        self._queue: OrderedDict[str, Track] = OrderedDict()  # not yet sent to prefill, in order
        self._roomless: OrderedDict[str, Track] = OrderedDict()  # sent to prefill, decode room not yet asked for
        self._holds: dict[HoldKey, Hold] = {}
        self._members: dict[InstanceId, Member] = {}
        self._num_placed = 0  # at decode, ever
        self.outbox: deque[tuple[InstanceId, ToInstance]] = deque()
        self.refusal: str = ""  # set when nothing can be served: new requests are refused with it

    # ---- the callers' side

    def submit(self, request: Request, sink: Sink, now_s: float) -> None:
        """Admit a request or raise RequestError, QueueFull or Unavailable, keeping nothing of it."""
        if self.refusal:
            raise Unavailable(self.refusal)
        if request.id in self._tracks:
            raise RequestError(
                "request_id", f"{request.id!r} is in use by a request that has not ended; choose another"
            )
        check_prompt(request.prompt, self._max_model_len, self._vocab_size)
        if len(self._queue) >= self._max_queue:
            raise QueueFull(f"{len(self._queue)} requests are waiting already (max_queue); try again later")
        track = Track(replace(request, arrival_s=now_s), sink)
        self._tracks[request.id] = self._queue[request.id] = track
        self._emit(EventKind.ARRIVED, track, now_s, num_prompt_tokens=len(request.prompt))
        self.schedule(now_s)

    def abort(self, request: RequestId, now_s: float, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request for its caller; unknown or ended ids are ignored."""
        track = self._tracks.get(request)
        if track is not None:
            self._end(track, now_s, reason)
            self.schedule(now_s)

    def abort_all(self, now_s: float) -> None:
        for track in list(self._tracks.values()):
            self._end(track, now_s, FinishReason.ABORT)

    def fail_all(self, error: str, now_s: float) -> None:
        """Nothing can be served any more: refuse what comes, fail what is here."""
        self.refusal = error
        for track in list(self._tracks.values()):
            self._end(track, now_s, FinishReason.ERROR, error)

    # ---- the instances' side

    def receive(self, instance: InstanceId, message: ToCoordinator, now_s: float) -> None:
        """Take in one message of an instance."""
        if isinstance(message, (Heartbeat, Refused, Traced)):
            return  # the cluster's to deal with
        if isinstance(message, Ready):
            self._members[instance] = Member(message.info)
        elif instance in self._members:
            self._progress(instance, message, now_s)
        self.schedule(now_s)

    def instance_lost(self, instance: InstanceId, reason: str, now_s: float) -> None:
        """An instance is dead for sure: it holds nothing, and its requests start over elsewhere."""
        self._members.pop(instance, None)
        unsent = [item for item in self.outbox if item[0] != instance]  # the rest is not for its successor
        self.outbox.clear()
        self.outbox.extend(unsent)
        for key, hold in list(self._holds.items()):
            if instance not in (hold.prefill, hold.decode):
                continue
            track = self._current(*key)
            needed = track is not None and (instance == hold.decode or not (track.decoding and track.prompt_done))
            self._unbind(key, instance)
            if track is not None and needed:
                self._start_over(track, now_s, f"instance {instance} was lost ({reason})", lost=True)
        self.schedule(now_s)

    def _progress(self, instance: InstanceId, progress: Progress, now_s: float) -> None:
        for reserved in progress.reserved:
            self._on_reserved(instance, reserved)
        for started in progress.started:
            self._on_started(instance, started, now_s)
        for produced in progress.produced:
            self._on_produced(instance, produced, now_s)
        for failed in progress.failed:
            self._on_failed(instance, failed, now_s)
        for delivered in progress.delivered:
            self._on_delivered(instance, delivered, now_s)
        for released in progress.released:
            self._unbind((released.request, released.generation), instance)
        self._members[instance].load = progress.load

    def _on_reserved(self, instance: InstanceId, reserved: Reserved) -> None:
        key = (reserved.request, reserved.generation)
        if reserved.landing is None:
            self._unbind(key, instance)
        track, hold = self._current(*key), self._holds.get(key)
        if track is None or hold is None or hold.prefill is None:
            return  # the hold is ending, and a landing that was made is released with it
        if reserved.landing is None:
            self._roomless[track.request.id] = track
            self._roomless.move_to_end(track.request.id, last=False)
        else:
            self.outbox.append((hold.prefill, Push(reserved.landing)))

    def _on_started(self, instance: InstanceId, started: Started, now_s: float) -> None:
        track = self._current(started.request, started.generation)
        if track is None:
            return
        if self._members[instance].info.role is Role.PREFILL:
            self._emit(EventKind.PREFILL_STARTED, track, now_s, instance=instance)
        else:
            track.decoding = True
            self._emit(EventKind.HANDOVER_DONE, track, now_s, instance=instance, num_bytes=started.handover_bytes)
            self._emit(EventKind.DECODE_STARTED, track, now_s, instance=instance)

    def _on_delivered(self, instance: InstanceId, delivered: Delivered, now_s: float) -> None:
        """Told even when the request has ended: what crossed for it belongs to the books."""
        if delivered.num_bytes:
            event = Event(EventKind.DELIVERED, RequestId(delivered.request), now_s, instance, delivered=delivered)
            self._observe(event)

    def _on_produced(self, instance: InstanceId, produced: Produced, now_s: float) -> None:
        key = (produced.request, produced.generation)
        at_decode = self._members[instance].info.role is Role.DECODE
        if at_decode and produced.finish_reason is not None and not produced.held:
            self._unbind(key, instance)
        elif at_decode and key in self._holds:
            self._holds[key].num_tokens += 1
        track = self._current(*key)
        if track is None:
            return
        if produced.index < len(track.request.output):  # known to its caller
            track.prompt_done = True
            return
        track.early[produced.index] = (instance, produced)
        while (following := track.early.pop(len(track.request.output), None)) is not None:
            self._take_token(track, *following, now_s)
            if self._current(*key) is not track:
                break

    def _take_token(self, track: Track, instance: InstanceId, produced: Produced, now_s: float) -> None:
        first, token = not track.request.output, produced.token
        track.prompt_done = True
        track.request = replace(track.request, output=(*track.request.output, token.id))
        if track.cached_tokens is None:
            track.cached_tokens = produced.cached_tokens
        self._emit(
            EventKind.FIRST_TOKEN if first else EventKind.TOKEN,
            track,
            now_s,
            instance=instance,
            token=token.id,
            logprob=token.logprob,
            cached_tokens=track.cached_tokens if first else 0,
            selected=produced.selected,
            fetched=produced.fetched,
        )
        track.sink(Output(track.request.id, (token,), cached_tokens=track.cached_tokens))
        ended = self._current(*track.key) is not track  # the sink may have taken the request back
        if produced.finish_reason is not None and not ended:
            self._end(track, now_s, produced.finish_reason)

    def _on_failed(self, instance: InstanceId, failed: Failed, now_s: float) -> None:
        key = (failed.request, failed.generation)
        if not failed.held:
            self._unbind(key, instance)
        track = self._current(*key)
        if track is None:
            return
        if failed.retry:
            self._start_over(track, now_s, failed.error, lost=not failed.preempted)
        else:
            self._end(track, now_s, FinishReason.ERROR, failed.error)

    # ---- placing

    def schedule(self, now_s: float) -> None:
        """Give decode room to what has begun, then begin what is queued; both strictly in order.

        The order is what keeps prefill pages and decode rooms from waiting for each other: whoever holds prefill
        pages got them before all that are behind, and is served decode room before them.
        """
        while self._roomless:
            track = next(iter(self._roomless.values()))
            if not self._reserve(track, now_s):
                break
            del self._roomless[track.request.id]
        while self._queue:
            track = next(iter(self._queue.values()))
            attempt = self._attempt(track)
            demand = Demand(attempt.num_tokens + 1, needs_decode(attempt))
            prefill = self._prefill.choose_prefill(self.view(), demand, now_s)
            if prefill is None:
                break
            del self._queue[track.request.id]
            self._hold(track).prefill = prefill
            self._emit(EventKind.PLACED, track, now_s, instance=prefill)
            self.outbox.append((prefill, Prefill(attempt)))
            if demand.needs_decode and (self._roomless or not self._reserve(track, now_s)):
                self._roomless[track.request.id] = track

    def _reserve(self, track: Track, now_s: float) -> bool:
        hold = self._hold(track)
        instances = [i for i in sorted(self._members) if self._members[i].info.role is Role.DECODE]
        if not instances:
            return False
        state = GroupState(self.group_view(instances))
        placement = self._policy.place(state, Waiting(hold.num_tokens, track.request.arrival_s), now_s)
        if placement is None:
            return False
        assert len(placement.members) == 1, f"{self._policy.name} spreads a request, decode can not"
        hold.decode = instances[placement.moe]
        self._num_placed += 1
        self.outbox.append((hold.decode, Reserve(hold.request)))  # as prefill got it: a token may have come since
        return True

    def group_view(self, instances: Sequence[InstanceId]) -> GroupView:
        """The decode instances as a group: what `view` says of them, request by request. Nothing waits in it."""
        index = {instance: i for i, instance in enumerate(instances)}
        infos = [self._members[instance].info for instance in instances]
        held: list[tuple[int, int, bool]] = []  # instance, tokens with the next one's place, in a step
        for key, hold in self._holds.items():
            if hold.decode in index:
                track = self._current(*key)
                held.append((index[hold.decode], hold.num_tokens, track is not None and track.decoding))
        moe, tokens, decoding = np.array(held, np.int64).reshape(-1, 3).T
        rows = np.flatnonzero(decoding)

        def total(of: Ints) -> Ints:
            return np.bincount(moe, of, len(infos)).astype(np.int64)

        return GroupView(
            nodes=np.zeros(len(infos), np.int64),
            num_pages=np.array([info.num_pages for info in infos]),
            used_pages=total(-(-tokens // infos[0].page_size)),
            kv_tokens=total(tokens - 1),
            page_size=infos[0].page_size,
            max_num_seqs=infos[0].max_num_seqs,
            active=Bindings(moe[rows], np.arange(len(rows) + 1), moe[rows], tokens[rows] - 1),
            num_placed=self._num_placed,
            arriving=total(1 - decoding),
        )

    def view(self) -> ClusterView:
        """What policies decide from: the coordinator's own books, not the instances' reports, which lag behind."""
        seqs: dict[InstanceId, int] = dict.fromkeys(self._members, 0)
        pages: dict[InstanceId, int] = dict.fromkeys(self._members, 0)
        for hold in self._holds.values():
            for instance in (hold.prefill, hold.decode):
                if instance in self._members:
                    seqs[instance] += 1
                    pages[instance] += pages_for(hold.num_tokens, self._members[instance].info.page_size)
        return ClusterView(
            tuple(
                InstanceView(
                    m.info.id, m.info.role, m.info.num_pages, pages[i], m.info.page_size, m.info.max_num_seqs, seqs[i]
                )
                for i, m in sorted(self._members.items())
            )
        )

    # ---- ledgers

    def _current(self, request: str, generation: int) -> Track | None:
        track = self._tracks.get(request)
        return track if track is not None and track.request.generation == generation else None

    def _hold(self, track: Track) -> Hold:
        attempt = self._attempt(track)
        return self._holds.setdefault(track.key, Hold(attempt, attempt.num_tokens + 1))

    def _attempt(self, track: Track) -> Request:
        """What instances are asked for. Asked before the attempt's first token has come."""
        return track.request.replayed() if self._replays else track.request

    def _unbind(self, key: HoldKey, instance: InstanceId) -> None:
        """An instance holds nothing of this attempt any more."""
        hold = self._holds.get(key)
        if hold is None:
            return
        if hold.prefill == instance:
            hold.prefill = None
        if hold.decode == instance:
            hold.decode = None
        if hold.ending:
            self._release(key, hold)
        elif hold.prefill is None and hold.decode is None:
            del self._holds[key]

    def _release(self, key: HoldKey, hold: Hold) -> None:
        """Prefill first: decode's pages may be written to until prefill has let go."""
        hold.ending = True
        instance = hold.prefill or hold.decode
        if instance is None:
            del self._holds[key]
        elif instance not in hold.released:
            hold.released.add(instance)
            self.outbox.append((instance, Release(*key)))

    def _start_over(self, track: Track, now_s: float, error: str, *, lost: bool) -> None:
        """Next generation, at the head of the queue: all tokens known so far stay."""
        track.losses += lost
        if track.losses > MAX_LOSSES:
            self._end(track, now_s, FinishReason.ERROR, f"gave up after {track.losses} attempts: {error}")
            return
        self._emit(EventKind.PREEMPTED, track, now_s)
        self._leave(track)
        track.request = replace(track.request, generation=track.request.generation + 1)
        track.decoding = track.prompt_done = False
        track.early.clear()
        self._queue[track.request.id] = track
        self._queue.move_to_end(track.request.id, last=False)

    def _leave(self, track: Track) -> None:
        self._queue.pop(track.request.id, None)
        self._roomless.pop(track.request.id, None)
        if track.key in self._holds:
            self._release(track.key, self._holds[track.key])

    def _end(self, track: Track, now_s: float, reason: FinishReason, error: str | None = None) -> None:
        """The one place where requests end."""
        del self._tracks[track.request.id]
        self._leave(track)
        self._emit(EventKind.FINISHED, track, now_s, finish_reason=reason, error=error)
        track.sink(Output(track.request.id, finish_reason=reason, cached_tokens=track.cached_tokens or 0, error=error))

    def _emit(self, kind: EventKind, track: Track, now_s: float, **facts: object) -> None:
        self._observe(Event(kind, track.request.id, now_s, **facts))  # type: ignore[arg-type]

    # ---- what others may see

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_live(self) -> int:
        return len(self._tracks)

    @property
    def num_holds(self) -> int:
        return len(self._holds)

    def members(self) -> dict[InstanceId, Member]:
        return dict(self._members)

    def has(self, role: Role) -> bool:
        return any(member.info.role is role for member in self._members.values())


def check_prompt(prompt: tuple[int, ...], max_model_len: int, vocab_size: int) -> None:
    """Raise RequestError when a prompt can not be continued by this model."""
    if not prompt:
        raise RequestError("prompt", "is empty; at least one token is needed")
    if len(prompt) >= max_model_len:
        raise RequestError(
            "prompt",
            f"has {len(prompt)} tokens; this model takes at most {max_model_len} for prompt and answer together",
        )
    if not all(map(is_whole, prompt)):
        raise RequestError("prompt", "has tokens that are not whole numbers; give token ids as Python ints")
    worst = max(prompt, key=lambda token: token if token >= 0 else vocab_size)
    if not 0 <= worst < vocab_size:
        raise RequestError("prompt", f"token {worst} is not in the vocabulary of {vocab_size} tokens")
