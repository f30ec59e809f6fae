"""What changes while one decision is made: the loads of a group's instances, with what is being placed added."""

import numpy as np
import numpy.typing as npt

from narrows.kv.layout import pages_for
from narrows.sched.group import GroupView, Ints, Placement


class GroupState:
    """A working copy of a GroupView's loads; belongs to one call of `decide`. Everything is [W] or a number."""

    def __init__(self, view: GroupView) -> None:
        self.nodes = view.nodes
        self.page_size = view.page_size
        self.max_num_seqs = view.max_num_seqs
        self.cross_nodes = view.cross_nodes
        self.num_pages = view.num_pages
        self.free_pages: Ints = view.num_pages - view.used_pages
        self.kv_tokens: Ints = view.kv_tokens.copy()  # K_s
        self.batches: Ints = view.batches  # B_s, a new array
        self.num_waiting = len(view.waiting)  # before anything was admitted
        self.num_admitted = 0
        self.num_placed = view.num_placed  # ever, those of this decision included
        # Of B_s: those in no step yet, placed earlier or by this decision.
        self.arriving: Ints = np.zeros_like(self.batches) if view.arriving is None else view.arriving.copy()

    @property
    def size(self) -> int:
        """W."""
        return len(self.nodes)

    @property
    def capacities(self) -> Ints:
        """Tokens that a new shard at each instance may have: those of its free pages."""
        return self.free_pages * self.page_size

    @property
    def able(self) -> npt.NDArray[np.bool_]:
        """Which instances could be a new request's MoE binding: a place in the batch, and a page for its next token."""
        return (self.batches < self.max_num_seqs) & (self.free_pages > 0)

    def members_of(self, node: int) -> Ints:
        """The instances of a node."""
        return np.flatnonzero(self.nodes == node)

    def can_allocate(self, placement: Placement) -> bool:
        """CanAllocate of Algorithm 1: every member has the pages of its shard, and the MoE binding a place in its
        batch."""
        return int(self.batches[placement.moe]) < self.max_num_seqs and all(
            pages_for(tokens, self.page_size) <= int(self.free_pages[member])
            for member, tokens in zip(placement.members, placement.split, strict=True)
        )

    def commit(self, placement: Placement) -> None:
        """The placement is made: its loads count from now on."""
        assert placement.split[placement.members.index(placement.moe)] > 0, "no slot for the next token at the binding"
        self.batches[placement.moe] += 1
        self.arriving[placement.moe] += 1
        for member, tokens in zip(placement.members, placement.split, strict=True):
            self.kv_tokens[member] += tokens
            self.free_pages[member] -= pages_for(tokens, self.page_size)
        self.num_admitted += 1
        self.num_placed += 1
