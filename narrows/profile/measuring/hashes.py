"""Training of hata: projections whose signs are a key's bits, and how much of each bit a query asks for.

Legend: Hkv KV heads, S queries of a step, G heads of a group, N keys, D head size, b bits.

A score made of bits is trained to give the attention that q.k gives: the loss is the divergence of the two softmaxes.
Signs have no gradient, so bits go forward as signs and backward as tanh.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from narrows.profile.measuring.partial_keys import skew
from narrows.profile.measuring.samples import View

BITS = 64  # and no more than 2 for each element of a key
STEPS = 60
WARM_UP = 5
QUERIES = 32  # of a step
RATE = 0.05  # of the mean size of what is trained
BETAS = 0.9, 0.98
RIDGE = 0.01


@torch.enable_grad()
def fit_hash(views: Sequence[View], scale: float, bits: int = BITS) -> dict[str, Tensor]:
    """encode [Hkv, D, b], bias [Hkv, 1, b] and decode [Hkv, D, b].

    A key's bits are `key @ encode + bias > 0`; `query @ decode` is what each bit adds to q.k where it is set, and
    takes away where it is not.
    """
    bits = min(bits, 2 * views[0].key.shape[2])
    random = torch.Generator().manual_seed(0)
    trained = [x.requires_grad_() for x in begin(views, bits, random)]
    encode, bias, decode = trained
    rates = [RATE * float(encode.detach().abs().mean()), RATE, RATE * float(decode.detach().abs().mean())]
    moments = [(torch.zeros_like(x), torch.zeros_like(x)) for x in trained]
    for step in range(STEPS):
        view = views[int(torch.randint(len(views), (1,), generator=random))]
        rows = torch.randperm(len(view.seen), generator=random)[:QUERIES]
        view = View(view.query[:, rows], view.key, view.seen[rows])
        slopes = torch.autograd.grad(divergence(view, encode, bias, decode, scale), trained)
        part = min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / STEPS)) / 2
        with torch.no_grad():
            for x, slope, rate, (first, second) in zip(trained, slopes, rates, moments, strict=True):
                # Adam (Kingma and Ba, ICLR 2015).
                first.lerp_(slope, 1 - BETAS[0])
                second.lerp_(slope.square(), 1 - BETAS[1])
                unbiased = second / (1 - BETAS[1] ** (step + 1))
                x -= part * rate * first / (1 - BETAS[0] ** (step + 1)) / (unbiased.sqrt() + 1e-8)
    return {"encode": encode.detach(), "bias": bias.detach(), "decode": decode.detach()}


def divergence(view: View, encode: Tensor, bias: Tensor, decode: Tensor, scale: float) -> Tensor:
    """Cross entropy of the attention by bits against that by q.k, the mean over all queries: their divergence but for
    a constant."""
    projected = view.key @ encode + bias
    soft = torch.tanh(projected)
    signs = soft + (torch.where(projected > 0, 1.0, -1.0) - soft).detach()
    weights = torch.einsum("hsgd,hdb->hsgb", view.query, decode) * scale
    scores = view.hide(torch.einsum("hsgb,hnb->hsgn", weights, signs))
    wanted = view.attention(scale)
    met = (wanted * scores.masked_fill(scores.isinf(), 0.0)).sum(-1)
    return (scores.logsumexp(-1) - met).mean()


def begin(views: Sequence[View], bits: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """encode, bias and decode to begin with: random mixtures of the skewed coordinates (see partial_keys), more of
    those that matter more, and what these bits tell of the key by least squares."""
    query = torch.cat([view.query.flatten(1, 2) for view in views], dim=1)
    keys = torch.cat([view.key for view in views], dim=1)
    heads = []
    for queries, key in zip(query, keys, strict=True):
        _, backward, mean, spread = skew(queries, key)
        size = max(bits, len(spread))
        mixture = torch.linalg.qr(torch.randn(size, size, generator=random)).Q[: len(spread), :bits]
        mixture = torch.nn.functional.normalize(mixture * spread.sqrt()[:, None], dim=0)
        encode = backward / spread @ mixture
        bias = -(mean @ encode)[None]
        signs = torch.where(key @ encode + bias > 0, 1.0, -1.0)
        told = signs.T @ signs / len(key) + RIDGE * torch.eye(bits)
        decode = torch.linalg.solve(told, signs.T @ (key - mean) / len(key)).T
        heads.append((encode, bias, decode))
    encodes, biases, decodes = map(torch.stack, zip(*heads, strict=True))
    return encodes, biases, decodes
