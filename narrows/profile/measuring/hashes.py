"""Training of hata: projections whose signs are a key's bits, and how much of each bit a query asks for.

Legend: N keys, S queries (of all heads of a group), D head size, b bits.
"""

import torch
from torch import Tensor

from narrows.profile.measuring.partial_keys import skew

BITS = 128
ROUNDS = 15
RIDGE = 1e-4


def fit_hash(query: Tensor, key: Tensor, attention: Tensor, bits: int = BITS) -> dict[str, Tensor]:
    """encode [D, b], bias [1, b] and decode [D, b] of one KV head, all float32.

    A key's bits are `key @ encode + bias > 0`; `query @ decode` is what each bit adds to q.k where it is set, and
    takes away where it is not.
    """
    forward, backward, mean, _ = skew(query, key)
    coordinates = (key - mean) @ backward
    weights = (attention / attention.mean() + 1e-3).clamp(max=50.0).sqrt()
    weights = weights / weights.sum()
    middle = weights @ coordinates
    x = coordinates - middle
    dims = x.shape[1]
    size = max(bits, dims)
    random = torch.Generator().manual_seed(0)
    projection = torch.linalg.qr(torch.randn(size, size, generator=random)).Q[:dims, :bits]
    offset = torch.zeros(bits)
    for _ in range(ROUNDS):
        signs = (x @ projection + offset).sign()
        back = regress(signs, x, weights)
        left = x - signs @ back
        wanted = (left @ back.T + signs * back.square().sum(1)).sign()
        ones = torch.cat([x, torch.ones(len(x), 1)], dim=1)
        solved = regress(ones, wanted, weights)
        projection, offset = solved[:-1], solved[-1]
    back = regress((x @ projection + offset).sign(), x, weights)
    encode = backward @ projection
    bias = offset - mean @ encode - middle @ projection
    return {"encode": encode.contiguous(), "bias": bias[None], "decode": (forward @ back.T).contiguous()}


def regress(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """The matrix that takes x [N, a] to y [N, b] with least weighted squared error."""
    weighted = x * weights[:, None]
    return torch.linalg.solve(x.T @ weighted + RIDGE * torch.eye(x.shape[1]), weighted.T @ y)
