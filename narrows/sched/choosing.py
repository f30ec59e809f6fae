"""What policies share: the instance to take when one is enough, and the CP groups of a node."""

from collections.abc import Iterator

import numpy as np

from narrows.kv.layout import pages_for
from narrows.sched.group import Ints, Placement, Waiting
from narrows.sched.state import GroupState


def with_room(state: GroupState, request: Waiting) -> Ints:
    """The instances that can take a whole request, ascending."""
    num_pages = pages_for(request.num_tokens, state.page_size)
    return np.flatnonzero((state.batches < state.max_num_seqs) & (state.free_pages >= num_pages))


def whole(instance: int, request: Waiting) -> Placement:
    """All of a request on one instance: degree 1."""
    return Placement(instance, (instance,), (request.num_tokens,))


def least(state: GroupState, request: Waiting, *keys: Ints) -> Placement | None:
    """All of it on the instance with room whose key [W] is smallest; further keys break ties, then the lowest id."""
    able = with_room(state, request)
    if not len(able):
        return None
    order = np.lexsort([key[able] for key in reversed(keys)])  # stable: the lowest instance of equal ones first
    return whole(int(able[order[0]]), request)


def cp_groups(nodes: Ints, degree: int) -> Ints:
    """Runs of `degree` consecutive instances inside each node: group g is bounds[g] to bounds[g + 1], not included.
    What a node has beyond a multiple is a smaller group."""
    places = np.arange(len(nodes)) - np.searchsorted(nodes, nodes)  # in the node
    return np.append(np.flatnonzero(places % degree == 0), len(nodes))


def node_orders(state: GroupState) -> Iterator[list[int]]:
    """For each node with a place in a batch, that with the fewest requests first: its instances in the order in which
    members are taken: the smallest batch, which becomes the MoE binding, then by KV load (NanoCP, section 4.2.3)."""
    able, owned = state.able, np.bincount(state.nodes, weights=state.batches)
    for node in np.argsort(owned, kind="stable"):
        inside = state.members_of(int(node))
        bindings = inside[able[inside]]
        if len(bindings):
            moe = smallest(state, bindings)
            others = inside[inside != moe]
            yield [moe, *others[np.argsort(state.kv_tokens[others], kind="stable")].tolist()]


def smallest(state: GroupState, instances: Ints) -> int:
    """The one of them with the smallest batch, of equal ones the least KV, then the lowest id."""
    return int(instances[np.lexsort([state.kv_tokens[instances], state.batches[instances]])[0]])


def placed(moe: int, shares: list[tuple[int, int]]) -> Placement:
    """A placement of (member, tokens), ascending; who holds none is no member."""
    members, split = zip(*(share for share in shares if share[1]), strict=True)
    return Placement(moe, members, split)
