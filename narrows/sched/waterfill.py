"""WaterFill: tokens go to the least loaded first, so that the peak is as low as can be (NanoCP, section 4.2.3)."""

from collections.abc import Sequence
from itertools import pairwise


def waterfill(
    loads: Sequence[int], capacities: Sequence[int], tokens: int, binding: int | None = None
) -> tuple[int, ...] | None:
    """Split `tokens` over k instances that hold `loads` tokens and have room for `capacities` more.

    The largest load afterwards, over all k, is the least possible in whole tokens; so is then the second largest, and
    so on. Tokens that do not divide evenly go one each to the first in the order given. At least one goes to the
    position `binding`, the MoE binding, where the next token is stored. None: they do not fit. O(k log k).
    """
    assert len(loads) == len(capacities) and tokens >= 0 and min(capacities, default=0) >= 0
    if binding is not None:
        if capacities[binding] < 1 or tokens < 1:
            return None
        loads = [load + (i == binding) for i, load in enumerate(loads)]
        capacities = [capacity - (i == binding) for i, capacity in enumerate(capacities)]
        rest = waterfill(loads, capacities, tokens - 1)
        return None if rest is None else tuple(share + (i == binding) for i, share in enumerate(rest))
    if sum(capacities) < tokens:
        return None
    if tokens == 0:
        return (0,) * len(loads)
    level = _level(loads, capacities, tokens)
    # All that lies below the last layer is full; the layer itself is shared out from the first on.
    shares = [min(capacity, max(0, level - 1 - load)) for load, capacity in zip(loads, capacities, strict=True)]
    left = tokens - sum(shares)
    for i, (load, capacity) in enumerate(zip(loads, capacities, strict=True)):
        if left and load < level and shares[i] < capacity:
            shares[i] += 1
            left -= 1
    return tuple(shares)


def _level(loads: Sequence[int], capacities: Sequence[int], tokens: int) -> int:
    """The least level up to which `tokens` of at least 1 fit: what lies below it grows with it, by one for each
    instance between its load, where it begins to take, and load + capacity, where it is full."""
    turns = sorted(
        [(load, 1) for load in loads] + [(load + room, -1) for load, room in zip(loads, capacities, strict=True)]
    )
    taking = taken = 0
    for (height, change), (above, _) in pairwise(turns):
        taking += change
        if taken + taking * (above - height) >= tokens:
            return height + -(-(tokens - taken) // taking)
        taken += taking * (above - height)
    raise AssertionError("they fit")
