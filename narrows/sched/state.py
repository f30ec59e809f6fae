"""What changes while one decision is made: the loads of a group's instances, with what is being placed added."""

import numpy as np

from narrows.kv.layout import pages_for
from narrows.sched.group import GroupView, Ints, Placement


class GroupState:
    """A working copy of a GroupView's loads; belongs to one call of `decide`. Everything is [W] or a number."""

    def __init__(self, view: GroupView) -> None:
        self.nodes = view.nodes
        self.page_size = view.page_size
        self.max_num_seqs = view.max_num_seqs
        self.num_pages = view.num_pages
        self.free_pages: Ints = view.num_pages - view.used_pages
        self.kv_tokens: Ints = view.kv_tokens.copy()  # K_s
        self.batches: Ints = view.batches  # B_s, a new array
        self.num_waiting = len(view.waiting)  # before anything was admitted
        self.num_admitted = 0

    @property
    def size(self) -> int:
        """W."""
        return len(self.nodes)

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
        self.batches[placement.moe] += 1
        for member, tokens in zip(placement.members, placement.split, strict=True):
            self.kv_tokens[member] += tokens
            self.free_pages[member] -= pages_for(tokens, self.page_size)
        self.num_admitted += 1
