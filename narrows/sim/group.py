"""A simulated decode group: instances that step together, as fast as the slowest of them, one token a request a step.

    waiting ──decide──▶ arriving ──its KV has come──▶ active ──last token──▶ gone
       ▲      (external: at once)                        └──stuck──▶ preempted, to be prefilled again

Who goes where, grows or is stuck is sched's to decide (decide_by_groups), pages are kv's. A decision holds until
something changes: requests arrive or end, KV comes, or pages become so few that a next token may find none. The steps
until then are made at once (a *stretch*); should something come in their midst, those that have begun stay and the rest
is taken back. What results is what deciding before each step gives, see `reuse`.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from narrows.core.events import EventKind
from narrows.core.ids import InstanceId
from narrows.core.trace import COMPUTE, Span
from narrows.kv.cache import KVCache
from narrows.kv.table import BlockTable
from narrows.sched.base import GroupPolicy
from narrows.sched.decide import AGING_S
from narrows.sched.group import Bindings, Decision, GroupView, Ints, Placement, Waiting
from narrows.sched.hierarchy import Hierarchy, decide_by_groups, fits_when_empty_by_groups
from narrows.sim.cost import Cost, Floats, StepLoad
from narrows.sim.handover import HandOver
from narrows.sim.loop import Loop, Timer
from narrows.sim.request import Life
from narrows.sim.roster import Roster, Seat
from narrows.sim.series import Series
from narrows.sim.steps import Steps, load_of, time_steps

LONGEST = 4096  # steps of a stretch, so that what is taken back is not much


class GroupHooks(Protocol):
    """Whoever follows requests."""

    def placed(self, life: Life, group: "DecodeGroup") -> HandOver | None:
        """Room is made. Returns its hand-over, or None when its KV is here."""
        ...

    def finished(self, life: Life) -> None: ...

    def preempted(self, life: Life, since_s: float) -> None:
        """Found no room for its next token and holds nothing here any more."""
        ...


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Instances and what each has."""

    num_instances: int
    per_node: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    cross_nodes: bool = False

    @property
    def nodes(self) -> Ints:
        return np.arange(self.num_instances) // self.per_node

    def empty(self) -> GroupView:
        nothing, nobody = np.zeros(self.num_instances, np.int64), np.zeros(0, np.int64)
        return GroupView(
            nodes=self.nodes,
            num_pages=nothing + self.num_pages,
            used_pages=nothing,
            kv_tokens=nothing,
            page_size=self.page_size,
            max_num_seqs=self.max_num_seqs,
            active=Bindings(nobody, np.zeros(1, np.int64), nobody, nobody),
            cross_nodes=self.cross_nodes,
        )


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a group works. `reuse`: steps that share a decision while requests wait (NanoCP's multi-step execution,
    section 6.1); while nobody waits a decision is used as long as it could not come out otherwise, unless `fast` is
    off, which is the plain version that tests compare with."""

    reuse: int = 1
    fast: bool = True
    two_batch_overlap: bool = False
    aging_s: float = AGING_S
    hierarchy: Hierarchy | None = None


class DecodeGroup:
    """See the module's text. `policy` places, `cost` times, `hooks` are told."""

    def __init__(
        self,
        loop: Loop,
        shape: GroupShape,
        names: Sequence[InstanceId],
        policy: GroupPolicy,
        cost: Cost,
        hooks: GroupHooks,
        options: GroupOptions | None = None,
        *,
        record: Callable[[GroupView, Decision, float], Any] | None = None,
        trace: Callable[[InstanceId, Span], Any] | None = None,
    ) -> None:
        self.names = tuple(names)
        self.shape = shape
        self.options = options or GroupOptions()
        self.series = Series(self.names)
        self.caches = [
            KVCache(shape.num_pages, shape.page_size, reuse_prefixes=False) for _ in range(shape.num_instances)
        ]
        self.num_placed = 0
        self.num_spread = 0  # placements on several instances, and those that became so
        self.num_decisions = 0
        self._loop = loop
        self._policy = policy
        self._cost = cost
        self._hooks = hooks
        self._record = record
        self._trace = trace
        self._nodes = shape.nodes
        self._waiting: list[tuple[float, int, Life]] = []  # by since_s, then index
        self._arriving: dict[Life, Seat] = {}
        self._joining: list[Seat] = []
        # Between a decision and the end of its steps shards include the room of the token that the next step makes.
        self._active = Roster(self.names)
        # The stretch that is going on.
        self._timer: Timer | None = None
        self._asked = False  # to decide at this moment
        self._deciding = False  # what comes now is looked at behind the decision
        self._again = False
        self._began_s = 0.0
        self._ends: list[float] = []
        self._times: Steps | None = None
        self._load: StepLoad | None = None
        self._kv: Ints = np.zeros((0, shape.num_instances), np.int64)
        self._own_at: Ints = np.zeros(0, np.int64)
        self._fetching = 0

    # ---- what others do

    def enqueue(self, life: Life, since_s: float) -> None:
        """A request waits for room."""
        insort(self._waiting, (since_s, life.index, life), key=lambda item: item[:2])
        self.wake()

    def arrived(self, life: Life) -> None:
        """What decode begins with has come: it takes part from the next step on."""
        self._joining.append(self._arriving.pop(life))
        self.wake()

    def put(self, life: Life, placement: Placement, order: int) -> None:
        """Take a request that was placed from outside, as the `order`th."""
        seat = self._take(life, placement, life.arrival.time_s)
        seat.order = order
        if seat.handover is None:
            self._joining.append(seat)
        self.wake()

    def home(self, life: Life) -> InstanceId:
        """The MoE binding of a request whose KV is on its way."""
        return self.names[self._arriving[life].placement.moe]

    def holdings(self) -> Iterator[tuple[int, int, bool]]:
        """(order, tokens that there is room for, whether it takes part in steps) of every request here that was put."""
        for seat in (*self._arriving.values(), *self._joining):
            yield seat.order, sum(seat.placement.split), False
        active = self._active
        held = np.add.reduceat(active.shards, active.starts[:-1]) if len(active) else ()
        for seat, tokens in zip(active.seats, held, strict=True):
            yield seat.order, int(tokens), True

    def fits(self, num_tokens: int) -> bool:
        """Whether a request that grows so long fits the empty group."""
        request = Waiting(num_tokens, 0.0)
        return fits_when_empty_by_groups(self.shape.empty(), self._policy, request, self.options.hierarchy)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._arriving or self._joining or len(self._active))

    def view(self) -> GroupView:
        """What policies decide from, all steps that have ended counted."""
        arriving = (*self._arriving.values(), *self._joining)
        kv = np.bincount(self._active.members, self._active.shards, self.shape.num_instances).astype(np.int64)
        moe = np.zeros_like(kv)
        for seat in arriving:
            moe[seat.placement.moe] += 1
            for member, tokens in zip(seat.placement.members, seat.placement.split, strict=True):
                kv[member] += tokens
            kv[seat.placement.moe] -= 1  # the next token's slot is still empty
        return GroupView(
            nodes=self._nodes,
            num_pages=np.full(len(self._nodes), self.shape.num_pages),
            used_pages=np.array([cache.pages.num_used for cache in self.caches]),
            kv_tokens=kv,
            page_size=self.shape.page_size,
            max_num_seqs=self.shape.max_num_seqs,
            active=self._active.bindings(),
            waiting=tuple(Waiting(life.room, since_s) for since_s, _, life in self._waiting),
            num_placed=self.num_placed,
            cross_nodes=self.shape.cross_nodes,
            arriving=moe if arriving else None,
        )

    # ---- deciding

    def wake(self) -> None:
        """Something has changed: decide when the step that has begun is over, or now."""
        if self._deciding:
            self._again = True
        elif self._timer is None and not self._fetching:
            if not self._asked:
                self._asked = True
                self._loop.at(self._loop.now_s, self._decide, rank=1)
        elif self._timer is not None:
            step = bisect_left(self._ends, self._loop.now_s)
            if self._waiting and self.options.reuse > 1:
                step = (step // self.options.reuse + 1) * self.options.reuse - 1
            self._end_with(step)

    def _end_with(self, step: int) -> None:
        """The stretch ends with this step of it, unless it ends earlier anyway."""
        assert self._timer is not None
        if step + 1 < len(self._ends):
            del self._ends[step + 1 :]
            self._timer.cancelled = True
            self._timer = self._loop.at(self._ends[-1], self._finish, rank=1)

    def settle(self) -> None:
        """Book the steps that have ended by now, so that `view` has them; the stretch goes on."""
        done = min(bisect_right(self._ends, self._loop.now_s), len(self._ends) - 1)
        if self._timer is not None and done > 0:
            self._book(done)

    def _decide(self) -> None:
        self._asked, self._deciding, self._again = False, True, False
        self._join()
        if len(self._active) or self._waiting:
            self._follow()
        self._deciding = False
        if self._again:  # while it was decided, something came: it counts from the next step on
            self.wake()

    def _follow(self) -> None:
        """Decide, and do what is decided."""
        view, now_s = self.view(), self._loop.now_s
        decision = decide_by_groups(
            view, self._policy, now_s, aging_s=self.options.aging_s, hierarchy=self.options.hierarchy
        )
        self.num_decisions += 1
        if self._record is not None:
            self._record(view, decision, now_s)
        before = len(self._active)
        self._apply(decision)
        changed = decision.grown or decision.stuck or (self._policy.rebalances and len(self._active) > before)
        if len(self._active):
            self._begin(1 if changed else LONGEST)
        else:
            self._again = self._again or bool(decision.stuck)  # while they were, nobody was admitted
            assert not self._waiting or self._arriving or self._joining or self._again, "waits in an empty group"

    def _join(self) -> None:
        """Requests whose KV has come are active. The slot of their next token is given back: the decision gives it."""
        for seat in self._joining:
            placement = seat.placement
            split = list(placement.split)
            at = placement.members.index(placement.moe)
            split[at] -= 1
            table = seat.tables[placement.moe]
            table.num_tokens -= 1
            if split[at] % self.shape.page_size == 0:
                self.caches[placement.moe].pages.release([table.pages.pop()])
            self._append(seat, split)
        self._joining.clear()

    def _append(self, seat: Seat, split: Sequence[int]) -> None:
        self._active.append(seat, split)
        seat.life.tell(EventKind.DECODE_STARTED, self._loop.now_s, self.names[seat.placement.moe])

    def _apply(self, decision: Decision) -> None:
        self._active.rebind(decision.moe)
        for row, instance in decision.grown:
            self.num_spread += len(self._active.seats[row].tables) == 1
            self._active.grow(row, instance, BlockTable(self.shape.page_size))
        self._make_room(decision.stuck)
        self._preempt(decision.stuck)
        taken = [self._waiting[index] for index, _ in decision.admitted]
        for index, _ in reversed(decision.admitted):
            del self._waiting[index]
        for (since_s, _, life), (_, placement) in zip(taken, decision.admitted, strict=True):
            seat = self._take(life, placement, since_s)
            if seat.handover is None and life not in self._arriving:
                self._append(seat, placement.split)

    def _make_room(self, stuck: Sequence[int]) -> None:
        """A slot for the next token of everyone, at the MoE binding."""
        active = self._active
        own = active.own
        going = np.ones(len(active), np.bool_)
        going[list(stuck)] = False
        self._extend(own, np.flatnonzero(going & (active.shards[own] % self.shape.page_size == 0)), 1)
        active.add(own[going], 1)

    def _extend(self, own: Ints, rows: Ints, tokens: int) -> None:
        """Pages for so many more tokens of these requests at their MoE bindings, which stand at `own`."""
        active = self._active
        for row in rows.tolist():
            instance, held = int(active.moe[row]), int(active.shards[own[row]])
            roomy = self.caches[instance].grow(active.seats[row].tables[instance], held + tokens)
            assert roomy, f"{self.names[instance]} has not the pages that were counted on"

    def _take(self, life: Life, placement: Placement, since_s: float) -> Seat:
        seat = Seat(life, since_s, placement)
        for member, tokens in zip(placement.members, placement.split, strict=True):
            table = self.caches[member].reserve(tokens)
            assert table is not None, f"a placement gave {self.names[member]} pages that it has not"
            seat.tables[member] = table
        self.num_placed += 1
        self.num_spread += len(placement.members) > 1
        self._arriving[life] = seat
        seat.handover = self._hooks.placed(life, self)
        if seat.handover is None:
            del self._arriving[life]
        return seat

    def _preempt(self, rows: Sequence[int]) -> None:
        for seat in self._remove(rows):
            seat.life.start_over(self._loop.now_s)
            self._hooks.preempted(seat.life, seat.since_s)

    def _remove(self, rows: Sequence[int]) -> list[Seat]:
        """These hold nothing any more."""
        if not len(rows):
            return []
        gone = self._active.remove(rows)
        for seat in gone:
            for member, table in seat.tables.items():
                self.caches[member].release(table)
        return gone

    # ---- stepping

    def _begin(self, most: int) -> None:
        """Steps until something may change, at most so many."""
        active = self._active
        self._began_s = self._loop.now_s
        remote = [row for row, seat in enumerate(active.seats) if seat.handover is not None and not seat.handover.ended]
        steps = 1 if remote else self._num_steps(most)
        width, rows = len(self._nodes), active.rows
        further = np.arange(steps)[:, None]
        self._own_at = active.own
        self._load = load_of(self._nodes, active.moe, rows, active.members, active.shards)
        self._kv = self._load.kv_tokens + further * self._load.moe_batch
        halves = [(self._load, self._kv)]
        if self.options.two_batch_overlap and len(active) > 1:
            halves = []
            for part in self._micro_batches():
                chosen, index = part[rows], np.cumsum(part) - 1  # the place of a request in its micro-batch
                members, shards = active.members[chosen], active.shards[chosen]
                load = load_of(self._nodes, active.moe[part], index[rows[chosen]], members, shards)
                halves.append((load, load.kv_tokens + further * np.bincount(active.moe[part], minlength=width)))
        self._times = time_steps(self._cost, halves)
        if remote:
            self._fetch(remote)
        else:
            self._ends = np.cumsum(np.concatenate([[self._began_s], self._times.total_s]))[1:].tolist()
            self._timer = self._loop.at(self._ends[-1], self._finish, rank=1)

    def _micro_batches(self) -> list[Any]:
        """Masks [R]: every second request of those of each instance, and the others."""
        even = np.zeros(len(self._active), np.bool_)
        even[np.argsort(self._active.moe, kind="stable")[::2]] = True
        return [even, ~even]

    def _num_steps(self, most: int) -> int:
        """How many steps the decision is good for; it is when nothing comes and nobody ends, and no pool could run out:
        every instance has a page more than requests that could take one before each of them."""
        if not self.options.fast:
            return 1
        active = self._active
        most = min(most, int(active.left.min()))
        if self._waiting:
            most = min(most, self.options.reuse)
        free = np.array([cache.pages.num_free for cache in self.caches])
        width, page_size = len(self._nodes), self.shape.page_size
        batch = np.bincount(active.moe, minlength=width)
        shards = active.shards[active.own]

        def roomy(steps: int) -> bool:
            """Whether the decisions before all these steps' tokens but the first are as this one."""
            pages = -(-(shards + steps - 1) // page_size) - -(-shards // page_size)
            needed = np.bincount(active.moe, pages, width)
            return bool((needed + batch + 1 <= free).all())

        if most > 1 and not roomy(most):
            low, high = 1, most  # good for `low` (the present decision), not for `high`
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if roomy(middle) else (low, middle)
            most = low
        return most

    def _fetch(self, rows: Sequence[int]) -> None:
        """A step that waits for KV: fetches run beside attention (or before it, where lanes are not parallel)."""
        assert self._times is not None
        compute_s, attention_s = float(self._times.total_s[0]), float(self._times.attention_s[0])
        parallel = True
        waited_s = 0.0

        def done() -> None:
            nonlocal waited_s
            self._fetching -= 1
            waited_s = self._loop.now_s - self._began_s
            if not self._fetching:
                end()

        def end() -> None:
            exposed_s = max(0.0, waited_s - attention_s) if parallel else waited_s
            self._ends = [max(self._began_s + compute_s + exposed_s, self._loop.now_s)]
            self._timer = self._loop.at(self._ends[0], self._finish, rank=1)

        self._fetching = 1  # so that none of them ends the step before all are asked for
        for row in rows:
            seat = self._active.seats[row]
            handover = seat.handover
            assert handover is not None
            parallel = parallel and handover.model.scheme.parallel_lanes
            self._fetching += 1
            context = seat.life.arrival.num_tokens - int(self._active.left[row])
            fetched = seat.fetches[self._active.num_stretches] = handover.fetch(context, done)
            if fetched[1] == 0:
                self._fetching -= 1
            handover.grant()
        self._fetching -= 1
        if not self._fetching:
            end()

    def _finish(self) -> None:
        """The stretch is over."""
        self._timer, self._deciding = None, True
        self._book(len(self._ends))
        self._ends = []
        for seat in self._remove(np.flatnonzero(self._active.left == 0).tolist()):
            seat.life.finish(self._loop.now_s)
            self._hooks.finished(seat.life)
        self._decide()

    def _book(self, steps: int) -> None:
        """The stretch's first `steps` steps have ended: their tokens, pages and figures."""
        assert self._times is not None and self._load is not None
        ends_s = np.array(self._ends[:steps])
        ended = len(self._ends) == steps
        self._note(steps, ends_s)
        self._active.step(ends_s)
        # The token of the last step has its slot; those of the steps before it have theirs from here.
        further = steps - 1 if ended else steps
        own, page_size = self._own_at, self.shape.page_size
        before = self._active.shards[own]
        self._extend(own, np.flatnonzero(-(-(before + further) // page_size) > -(-before // page_size)), further)
        self._active.add(own, further)
        if not ended:
            self._began_s = self._ends[steps - 1]
            self._ends = self._ends[steps:]
            self._kv = self._kv[steps:]
            self._times = self._times.behind(steps)

    def _note(self, steps: int, ends_s: Floats) -> None:
        assert self._times is not None and self._load is not None
        free = np.array([cache.pages.num_free for cache in self.caches])
        self.series.note(
            self._began_s, ends_s, self._load, self._kv[:steps], free, len(self._waiting), self._times.first(steps)
        )
        if self._trace is not None:
            name = f"{steps} step{'s' if steps > 1 else ''}, {len(self._active)} requests"
            for instance in np.flatnonzero(self._load.attention_batch).tolist():
                self._trace(self.names[instance], Span(COMPUTE, name, self._began_s, float(ends_s[-1])))
