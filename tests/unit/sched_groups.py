"""For tests of scheduling: a decode group that executes decisions token by token, and random ones of it."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from narrows.sched.group import Bindings, Decision, GroupView, Ints, Waiting


def ints(*values: int) -> Ints:
    return np.array(values, np.int64)


def pages(tokens: int, page_size: int) -> int:
    return (tokens + page_size - 1) // page_size


def bind(*requests: tuple[int, dict[int, int]]) -> Bindings:
    """Bindings of requests given as (MoE binding, tokens by member)."""
    starts = [0]
    for _, shards in requests:
        starts.append(starts[-1] + len(shards))
    return Bindings(
        ints(*(moe for moe, _ in requests)),
        ints(*starts),
        ints(*(member for _, shards in requests for member in sorted(shards))),
        ints(*(shards[member] for _, shards in requests for member in sorted(shards))),
    )


@dataclass
class Group:
    """Requests as [MoE binding, tokens by member]; pools as numbers of pages. What a decision breaks is asserted."""

    nodes: list[int]
    num_pages: list[int]
    page_size: int
    max_num_seqs: int
    cross_nodes: bool = False
    active: list[tuple[int, dict[int, int]]] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)
    arriving: list[int] | None = None

    def used(self) -> list[int]:
        return [
            sum(pages(shards.get(i, 0), self.page_size) for _, shards in self.active) for i in range(len(self.nodes))
        ]

    def kv_tokens(self) -> list[int]:
        return [sum(shards.get(i, 0) for _, shards in self.active) for i in range(len(self.nodes))]

    def batches(self) -> list[int]:
        return [sum(moe == i for moe, _ in self.active) for i in range(len(self.nodes))]

    def view(self) -> GroupView:
        return GroupView(
            ints(*self.nodes),
            ints(*self.num_pages),
            ints(*self.used()),
            ints(*self.kv_tokens()),
            self.page_size,
            self.max_num_seqs,
            bind(*self.active),
            tuple(self.waiting),
            cross_nodes=self.cross_nodes,
            arriving=None if self.arriving is None else ints(*self.arriving),
        )

    def execute(self, decision: Decision) -> list[int]:
        """One step: who is stuck leaves, who is admitted comes, each stores one token. Returns indices of those who
        stayed and, behind them, the admitted ones (R + j)."""
        grown, stuck, old = dict(decision.grown), set(decision.stuck), self.active
        self.active = []
        for row, (_, shards) in enumerate(old):
            moe = int(decision.moe[row])
            if row in grown:
                assert moe == grown[row] and moe not in shards
                assert self.cross_nodes or self.nodes[moe] == self.nodes[next(iter(shards))]
                shards = {**shards, moe: 0}
            assert moe in shards
            if row not in stuck:
                self.active.append((moe, {**shards, moe: shards[moe] + 1}))
        for _, placement in decision.admitted:
            assert placement.moe in placement.members and list(placement.members) == sorted(set(placement.members))
            assert self.cross_nodes or len({self.nodes[i] for i in placement.members}) == 1
            self.active.append((placement.moe, dict(zip(placement.members, placement.split, strict=True))))
        for index, placement in decision.admitted:
            assert sum(placement.split) == self.waiting[index].num_tokens and min(placement.split) > 0
        taken = {index for index, _ in decision.admitted}
        self.waiting = [request for index, request in enumerate(self.waiting) if index not in taken]
        assert all(used <= there for used, there in zip(self.used(), self.num_pages, strict=True)), "out of pages"
        assert all(size <= self.max_num_seqs for size in self.batches()), "a batch is too large"
        return [row for row in range(len(old)) if row not in stuck] + [len(old) + j for j in range(len(taken))]


@st.composite
def groups(draw: st.DrawFn, max_waiting: int = 6, max_active: int = 12) -> Group:
    """Any group at any moment: empty, nearly full, with uneven pools and nodes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    group = Group(
        nodes,
        draw(st.lists(st.integers(0, 10), min_size=len(nodes), max_size=len(nodes))),
        draw(st.sampled_from([1, 4, 16])),
        draw(st.integers(1, 6)),
        draw(st.booleans()),
    )
    page_size = group.page_size
    for _ in range(draw(st.integers(0, max_active))):
        node = draw(st.sampled_from(nodes))
        inside = [i for i in range(len(nodes)) if group.cross_nodes or nodes[i] == node]
        members = draw(st.lists(st.sampled_from(inside), min_size=1, max_size=3, unique=True))
        used, batches = group.used(), group.batches()
        shards = {i: draw(st.integers(0, min(40, (group.num_pages[i] - used[i]) * page_size))) for i in members}
        moe = draw(st.sampled_from(members))
        if sum(shards.values()) and batches[moe] < group.max_num_seqs:
            group.active.append((moe, shards))
    lengths = draw(st.lists(st.integers(1, 12 * page_size), max_size=max_waiting))
    ages = sorted(draw(st.lists(st.integers(0, 10), min_size=len(lengths), max_size=len(lengths))))
    group.waiting = [Waiting(n, float(since)) for n, since in zip(lengths, ages, strict=True)]
    return group
