"""The active requests of a decode group: who holds how many tokens where, and which steps made whose tokens.

Arrays are those of sched.group.Bindings; each change makes new ones, so a view that was given away stays as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from narrows.core.ids import InstanceId
from narrows.kv.table import BlockTable
from narrows.sched.group import Bindings, Ints, Placement
from narrows.sim.cost import Floats
from narrows.sim.handover import HandOver
from narrows.sim.request import Life, Tokens


@dataclass(slots=True, eq=False)
class Seat:
    """A request's place: its tables by instance, as long as it has one."""

    life: Life
    since_s: float
    placement: Placement
    tables: dict[int, BlockTable] = field(default_factory=dict)
    handover: HandOver | None = None  # None: all KV is here
    order: int = 0
    homes: list[tuple[int, int]] = field(default_factory=list)  # (stretch, instance): its MoE binding from there on
    fetches: dict[int, tuple[int, int]] = field(default_factory=dict)  # stretch of a step: (selected, fetched)


class Roster:
    """R requests in the order of their joining. `left` [R] counts the tokens that each still needs."""

    def __init__(self, names: Sequence[InstanceId]) -> None:
        self.seats: list[Seat] = []
        self.moe: Ints = np.zeros(0, np.int64)
        self.starts: Ints = np.zeros(1, np.int64)
        self.members: Ints = np.zeros(0, np.int64)
        self.shards: Ints = np.zeros(0, np.int64)
        self.left: Ints = np.zeros(0, np.int64)
        self._names = names
        self._stretches: list[Floats] = []  # ends of the steps of each

    def __len__(self) -> int:
        return len(self.seats)

    @property
    def rows(self) -> Ints:
        """The request of each member."""
        return np.repeat(np.arange(len(self.moe)), np.diff(self.starts))

    @property
    def own(self) -> Ints:
        """Where in `members` each request's MoE binding stands, [R]."""
        return np.flatnonzero(self.members == self.moe[self.rows])

    @property
    def num_stretches(self) -> int:
        return len(self._stretches)

    def bindings(self) -> Bindings:
        return Bindings(self.moe, self.starts, self.members, self.shards)

    def append(self, seat: Seat, split: Sequence[int]) -> None:
        """A request takes part from now on, with so many tokens at each member of its placement."""
        seat.homes = [(len(self._stretches), seat.placement.moe)]
        self.seats.append(seat)
        self.moe = np.append(self.moe, seat.placement.moe)
        self.members = np.append(self.members, seat.placement.members)
        self.shards = np.append(self.shards, split)
        self.starts = np.append(self.starts, len(self.members))
        self.left = np.append(self.left, seat.life.num_left)

    def rebind(self, moe: Ints) -> None:
        """Other MoE bindings from the next step on."""
        for row in np.flatnonzero(moe != self.moe).tolist():
            self.seats[row].homes.append((len(self._stretches), int(moe[row])))
        self.moe = moe.copy()

    def grow(self, row: int, instance: int, table: BlockTable) -> None:
        """A further member, still without tokens."""
        self.seats[row].tables[instance] = table
        first, last = self.starts[row], self.starts[row + 1]
        at = int(first + np.searchsorted(self.members[first:last], instance))
        self.members = np.insert(self.members, at, instance)
        self.shards = np.insert(self.shards, at, 0)
        self.starts = self.starts + (np.arange(len(self.starts)) > row)

    def add(self, at: Ints, tokens: int) -> None:
        """So many more tokens at these members."""
        self.shards = self.shards.copy()
        self.shards[at] += tokens

    def step(self, ends_s: Floats) -> None:
        """Everyone has a token more at each of these times."""
        self._stretches.append(ends_s)
        self.left = self.left - len(ends_s)

    def remove(self, rows: Sequence[int]) -> list[Seat]:
        """These leave; what they have is told to their lives, their tables are still theirs."""
        gone = [self.seats[row] for row in rows]
        for row, seat in zip(rows, gone, strict=True):
            seat.life.log += self._tokens(seat)
            seat.life.produced = seat.life.arrival.num_output - int(self.left[row])
        staying = np.ones(len(self.seats), np.bool_)
        staying[list(rows)] = False
        degrees = np.diff(self.starts)
        entries = np.repeat(staying, degrees)
        self.seats = [seat for seat, stays in zip(self.seats, staying.tolist(), strict=True) if stays]
        self.moe, self.left = self.moe[staying], self.left[staying]
        self.members, self.shards = self.members[entries], self.shards[entries]
        self.starts = np.concatenate([[0], np.cumsum(degrees[staying])])
        return gone

    def _tokens(self, seat: Seat) -> list[Tokens]:
        """What a request has had since it joined: a run of steps for each of its homes, those that fetched apart."""
        runs: list[Tokens] = []
        ends = [first for first, _ in seat.homes[1:]] + [len(self._stretches)]
        for (first, instance), last in zip(seat.homes, ends, strict=True):
            cuts = [i for i in range(first, last) if i in seat.fetches] if seat.fetches else []
            for start, stop in zip([first, *(i + 1 for i in cuts)], [*cuts, last], strict=True):
                if start < stop:
                    runs.append(Tokens(np.concatenate(self._stretches[start:stop]), self._names[instance]))
                if stop < last:
                    runs.append(Tokens(self._stretches[stop], self._names[instance], *seat.fetches[stop]))
        return runs
