"""Calibration of quest: the few values that the bounds of a run of keys are rounded to.

Legend: Hkv KV heads, N keys, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from narrows.profile.measuring.samples import View
from narrows.select.quest import LEVELS, SPAN

RARE = 0.01  # part of all bounds that may lie beyond the outermost value, on either side


def fit_bounds(views: Sequence[View], scale: float) -> dict[str, Tensor]:  # noqa: ARG001  (as all fits)
    """low and high [Hkv, D, LEVELS], ascending and evenly spaced."""
    runs = torch.cat([view.key[:, : view.key.shape[1] // SPAN * SPAN] for view in views], dim=1)
    runs = torch.unflatten(runs, 1, (-1, SPAN))  # [Hkv, runs, SPAN, D]
    return {"low": levels(runs.amin(2)), "high": levels(runs.amax(2))}


def levels(bounds: Tensor) -> Tensor:
    """[Hkv, D, LEVELS] for bounds [Hkv, runs, D]."""
    first, last = bounds.quantile(RARE, 1), bounds.quantile(1 - RARE, 1)
    return torch.lerp(first[..., None], last[..., None], torch.linspace(0, 1, LEVELS)).contiguous()
