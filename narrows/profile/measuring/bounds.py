"""Calibration of quest: the few values that the bounds of a run of keys are rounded to.

Legend: N keys, D head size.
"""

import torch
from torch import Tensor

from narrows.select.quest import LEVELS, SPAN

RARE = 0.01  # part of all bounds that may lie beyond the outermost value, on either side


def fit_bounds(query: Tensor, key: Tensor, attention: Tensor) -> dict[str, Tensor]:
    """low and high [D, LEVELS] of one KV head, ascending and evenly spaced, from its keys [N, D] in order."""
    runs = key[: len(key) // SPAN * SPAN].unflatten(0, (-1, SPAN))
    return {"low": levels(runs.amin(1)), "high": levels(runs.amax(1))}


def levels(bounds: Tensor) -> Tensor:
    """[D, LEVELS] for bounds [runs, D]."""
    first, last = bounds.quantile(RARE, 0), bounds.quantile(1 - RARE, 0)
    return torch.lerp(first[:, None], last[:, None], torch.linspace(0, 1, LEVELS)).contiguous()
