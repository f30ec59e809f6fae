"""What a scheduler knows of a decode group, and what it decides: arrays, immutable, complete, without a clock.

Legend: W instances of the group, R active requests in order of their admission, T members of all their KV bindings
together, Q waiting requests, oldest first.

    GroupView ──▶ decide(view, policy, now_s) ──▶ Decision ──▶ lower(view, decision) ──▶ routing tables

A request's *KV binding* is the set of instances that hold shards of its KV and attend for it; its *MoE binding* is the
one of them that projects, merges, runs the rest of the layer and stores the KV of new tokens (NanoCP, section 4.2).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Bindings:
    """Requests and where they are. Row r's KV binding is members[starts[r]:starts[r + 1]], ascending; shard i of it
    holds shards[i] tokens, the next one's not included. `moe[r]` is one of the members."""

    moe: Ints  # [R]
    starts: Ints  # [R + 1]
    members: Ints  # [T]
    shards: Ints  # [T] tokens

    @property
    def num_requests(self) -> int:
        return len(self.moe)

    @property
    def degrees(self) -> Ints:
        """CP degrees [R]."""
        return np.diff(self.starts)

    @property
    def rows(self) -> Ints:
        """The request of each member [T]."""
        return np.repeat(np.arange(self.num_requests), self.degrees)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for room at decode. `num_tokens` are those whose KV must be held, the next one's included;
    `cached` are tokens of its prefix that each instance of the group holds already, None: nobody holds any. One that
    was preempted keeps its `since_s`, hence its place in the line."""

    num_tokens: int
    since_s: float
    cached: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupView:
    """One decode group at one moment. Instances of one node stand together."""

    nodes: Ints  # [W] the node of each instance, from 0, ascending
    num_pages: Ints  # [W] of each pool
    used_pages: Ints  # [W]
    kv_tokens: Ints  # [W] K_s: tokens whose KV is held; what attention reads in a step
    page_size: int  # tokens
    max_num_seqs: int  # of one instance's MoE batch
    active: Bindings
    waiting: tuple[Waiting, ...] = ()
    num_placed: int = 0  # requests this group ever took in: what rotating policies turn by
    cross_nodes: bool = False  # KV bindings may reach over nodes
    # [W] requests placed earlier whose KV is on its way, by MoE binding; their pages and tokens are in the loads above,
    # they are in no step yet. None: there are none.
    arriving: Ints | None = None

    @property
    def batches(self) -> Ints:
        """B_s: requests whose MoE binding each instance is, those on their way included, [W]. A new array."""
        bound = np.bincount(self.active.moe, minlength=len(self.nodes))
        return bound if self.arriving is None else bound + self.arriving


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: its MoE binding, its KV binding (ascending) and the tokens of each shard. They add up to
    `Waiting.num_tokens`; the slot of the next token is at the MoE binding, so that shard has at least one."""

    moe: int
    members: tuple[int, ...]
    split: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """Of one step. A request in `grown` gets that instance as a further member and MoE binding, where its new tokens
    are stored: none of its members had room for the next one. One in `stuck` finds no room on its node (where bindings
    may cross nodes: in the group), keeps its MoE binding in `moe`, takes no part in the step and must be preempted."""

    moe: Ints  # [R] the MoE binding of each active request from now on
    admitted: tuple[tuple[int, Placement], ...] = ()  # (index in `waiting`, where it goes)
    grown: tuple[tuple[int, int], ...] = ()  # (row, instance)
    stuck: tuple[int, ...] = ()  # rows

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, Decision)
            and np.array_equal(self.moe, other.moe)
            and (self.admitted, self.grown, self.stuck) == (other.admitted, other.grown, other.stuck)
        )
