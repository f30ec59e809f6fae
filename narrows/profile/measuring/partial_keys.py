"""Calibration of infinigen: a skewed basis for each KV head, and 16 values for each part of a key in it.

Legend: Hkv KV heads, N keys, S queries (of all heads of a group), D head size, J nibbles of a code, one for each part.

The skew. With q = Cq^(1/2) a and k = Ck^(1/2) b, where a and b are white, q.k = a' Cq^(1/2) Ck^(1/2) b; the SVD of the
matrix in between gives coordinates that contribute to q.k independently, in falling order. InfiniGen's SVD is that of
the queries alone; this one also knows where keys differ. A vector that is the same for all keys moves all scores of a
query alike, so keys are first moved to their mean.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from narrows.profile.measuring.samples import View

NIBBLES = 10
VALUES = 16  # of a nibble
LARGEST_PART = 16  # coordinates
MOST_KEYS = 3072  # that k-means looks at
ROUNDS = 8  # of k-means
RIDGE = 1e-4


def fit_partial_keys(views: Sequence[View], scale: float, nibbles: int = NIBBLES) -> dict[str, Tensor]:
    """encode [Hkv, D, J * 16], bias [Hkv, 1, J * 16] and decode [Hkv, D, J * 16].

    A key's code has in each part the value with the largest `key @ encode + bias`; `query @ decode` is what each value
    adds to q.k.
    """
    query = torch.cat([view.query.flatten(1, 2) for view in views], dim=1)
    key = torch.cat([view.key for view in views], dim=1)
    attention = torch.cat([view.attention(scale).sum((1, 2)) for view in views], dim=1)
    heads = [_fit_head(*head, nibbles) for head in zip(query, key, attention, strict=True)]
    return {name: torch.stack([head[name] for head in heads]) for name in heads[0]}


def _fit_head(query: Tensor, key: Tensor, attention: Tensor, nibbles: int) -> dict[str, Tensor]:
    """query [S, D], key [N, D], and what attention [N] the keys got of all queries."""
    forward, backward, mean, spread = skew(query, key)
    step = -(-len(key) // MOST_KEYS)
    coordinates = (key[::step] - mean) @ backward
    # Between all keys alike and only those attended to: the rest must still be told apart from them.
    weights = (attention[::step] / attention.mean() + 1e-3).clamp(max=50.0).sqrt()
    dims = len(spread)
    encode, decode = torch.zeros(2, dims, nibbles, VALUES)
    bias = torch.zeros(nibbles, VALUES)
    for part, (first, end) in enumerate(parts(spread, nibbles)):
        values = k_means(coordinates[:, first:end], weights)
        encode[:, part] = backward[:, first:end] @ values.T
        decode[:, part] = forward[:, first:end] @ values.T
        bias[part] = -(mean @ encode[:, part]) - values.square().sum(1) / 2
    return {"encode": encode.flatten(1), "bias": bias.flatten()[None], "decode": decode.flatten(1)}


def skew(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """forward [D, D], backward [D, D], mean [D] and spread [D] for which

        query . (key - mean) = (query @ forward) . ((key - mean) @ backward)

    The i-th coordinate on the right has variance spread[i]^2, falling, on the left 1; each side's are uncorrelated."""
    mean = key.mean(0)
    root_q, inverse_q = roots(query)
    root_k, inverse_k = roots(key - mean)
    left, spread, right = torch.linalg.svd(root_q @ root_k)
    return inverse_q @ left, inverse_k @ right.T * spread, mean, spread


def roots(x: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of x's second moments, and its inverse."""
    moments = x.T @ x / len(x) + RIDGE * torch.eye(x.shape[1])
    values, vectors = torch.linalg.eigh(moments)
    return vectors * values.sqrt() @ vectors.T, vectors * values.rsqrt() @ vectors.T


def parts(spread: Tensor, count: int) -> list[tuple[int, int]]:
    """Cut coordinates into at most `count` runs so that rounding each run to one of 16 values loses least.

    By what is known of Gaussian sources: d coordinates coded together with 4 bits keep about their geometric mean
    variance times 2^(-8/d); what is in no run is lost.
    """
    variance = spread.double().square().tolist()
    size = len(variance)
    logs = [0.0, *accumulate(math.log(max(v, 1e-30)) for v in variance)]
    rest = [sum(variance[i:]) for i in range(size + 1)]

    def loss(first: int, end: int) -> float:
        dims = end - first
        mean = math.exp((logs[end] - logs[first]) / dims)
        overhead = {1: 2.4, 2: 1.9}.get(dims, 1.5 if dims <= 6 else 1.3)  # of few dims and values over the bound
        return float(min(rest[first] - rest[end], overhead * dims * mean * 2.0 ** (-8 / dims)))

    losses = {(i, j): loss(i, j) for i in range(size) for j in range(i + 1, min(size, i + LARGEST_PART) + 1)}
    best, cuts = rest, list[dict[int, int]]()
    for _ in range(count):
        now, cut = list(best), dict[int, int]()
        for (i, j), lost in losses.items():
            if lost + best[j] < now[i]:
                now[i], cut[i] = lost + best[j], j
        best, cuts = now, [cut, *cuts]
    runs, at = list[tuple[int, int]](), 0
    for cut in cuts:
        if at in cut:
            runs.append((at, cut[at]))
            at = cut[at]
    return runs


def k_means(x: Tensor, weights: Tensor) -> Tensor:
    """VALUES centres [VALUES, d] of the weighted points x [N, d]. The same every time."""
    random = torch.Generator().manual_seed(0)
    centres = x[torch.multinomial(weights, VALUES, generator=random, replacement=len(x) < VALUES)]
    for _ in range(ROUNDS):
        nearest = (x @ centres.T - centres.square().sum(1) / 2).argmax(1)
        total = torch.zeros(VALUES).index_add_(0, nearest, weights)
        sums = torch.zeros(VALUES, x.shape[1]).index_add_(0, nearest, x * weights[:, None])
        fresh = x[torch.multinomial(weights, VALUES, generator=random, replacement=True)]
        centres = torch.where(total[:, None] > 0, sums / total.clamp(min=1e-30)[:, None], fresh)
    return centres
