"""Partial attention results into one, exactly: what lets KV be split over instances, lanes and blocks."""

import torch
from torch import Tensor

# S partial results (shards, lanes or blocks of keys), T rows, Hq query heads, D head size


def merge(
    outs: Tensor,  # [S, T, Hq, D], zeros where a part saw no key
    lses: Tensor,  # [S, T, Hq] float32, natural log, -inf where a part saw no key
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the attention over each.

    Returns out [T, Hq, D] in outs' dtype and lse [T, Hq] float32; sums run in float32. Where no part saw a key the
    result is 0 and -inf.
    """
    assert lses.dtype == torch.float32, lses.dtype
    assert outs.shape[:-1] == lses.shape, (outs.shape, lses.shape)
    largest = lses.amax(0)
    largest = largest.masked_fill(largest.isneginf(), 0.0)
    weights = torch.exp(lses - largest)
    total = weights.sum(0)  # at least 1, or 0 where no part saw a key
    shares = weights / total.clamp(min=1.0)
    return (outs.float() * shares[..., None]).sum(0).to(outs.dtype), largest + total.log()
