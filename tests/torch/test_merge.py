"""Merging partial attention: any partition of the keys gives the attention over all of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.attention.merge import merge

T, HQ, D = 3, 2, 4


def attention(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Textbook softmax attention in float64: scores [T, Hq, K], values [K, Hq, D]."""
    if scores.shape[-1] == 0:
        return torch.zeros(T, HQ, D), torch.full((T, HQ), float("-inf"))
    weights = torch.softmax(scores.double(), dim=-1)
    out = torch.einsum("thk,khd->thd", weights, values.double())
    return out.float(), scores.double().exp().sum(-1).log().float()


@given(
    owner=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
)
@settings(deadline=None)
def test_any_partition_merges_to_the_whole(owner: list[int], seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(T, HQ, len(owner), generator=generator) * scale
    values = torch.randn(len(owner), HQ, D, generator=generator)
    parts = [attention(scores[..., mine], values[mine]) for mine in (torch.tensor(owner) == s for s in range(5))]
    out, lse = merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    whole_out, whole_lse = attention(scores, values)
    torch.testing.assert_close(out, whole_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_scores_beyond_the_range_of_exp() -> None:
    """Two keys of scores 1000 and 999: shares e/(e+1) and 1/(e+1), lse 1000 + ln(1 + 1/e)."""
    outs = torch.tensor([1.0, 0.0]).view(2, 1, 1, 1)
    out, lse = merge(outs, torch.tensor([1000.0, 999.0]).view(2, 1, 1))
    assert out.item() == pytest.approx(0.7310586, abs=1e-6)
    assert lse.item() == pytest.approx(1000.3133, abs=1e-3)


def test_nothing_seen_anywhere_is_zero_and_not_nan() -> None:
    out, lse = merge(torch.zeros(3, T, HQ, D), torch.full((3, T, HQ), float("-inf")))
    assert torch.equal(out, torch.zeros(T, HQ, D))
    assert torch.equal(lse, torch.full((T, HQ), float("-inf")))


def test_keeps_the_dtype_and_a_single_part_as_it_is() -> None:
    outs = torch.randn(1, T, HQ, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    lses = torch.zeros(1, T, HQ)
    out, lse = merge(outs, lses)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, outs[0])
    assert torch.equal(lse, lses[0])
