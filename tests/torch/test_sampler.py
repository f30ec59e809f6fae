"""Sampling against a plain full-sort reference, hand calculations and the distribution it must have."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.core.request import FinishReason, SamplingParams, TokenLogprob
from narrows.runtime.sampler import BrokenLogits, SamplingRow, adjusted, draw, sample, support, uniform
from narrows.runtime.stopping import finish_reason

GREEDY = SamplingParams(temperature=0.0)


def one(values: list[float] | torch.Tensor, **fields: object) -> int:
    """The token for one row of logits; keywords that SamplingRow knows go there, others to SamplingParams."""
    of_row = {name: fields.pop(name) for name in ("seed", "prompt", "output", "eos_token_ids") if name in fields}
    row = SamplingRow(SamplingParams(**fields), **{"seed": 0} | of_row)  # type: ignore[arg-type]
    (sampled,) = sample(torch.as_tensor(values, dtype=torch.float32)[None], [row])
    return sampled.id


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---- greedy, penalties, bans


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    assert one([0.0, 3.0, 1.0, 3.0], temperature=0.0) == 1
    assert one([-5.0, -5.0], temperature=0.0) == 0
    logits = random_logits(7, 1000)
    assert [s.id for s in sample(logits, [SamplingRow(GREEDY, 0)] * 7)] == logits.argmax(-1).tolist()


def test_penalties_by_hand() -> None:
    """Prompt 0 1, output 1 2 2. Repetition 2 halves positive and doubles negative logits of 0, 1, 2; then output
    tokens lose 0.5 for each time they stand there and 0.25 once."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    logits = np.array([4.0, -3.0, 6.0, 5.0], dtype=np.float32)
    got = adjusted(logits, SamplingRow(params, 0, prompt=(0, 1, 0), output=(1, 2, 2)))
    assert got.tolist() == [2.0, -6.0 - 0.5 - 0.25, 3.0 - 1.0 - 0.25, 5.0]
    assert logits.tolist() == [4.0, -3.0, 6.0, 5.0], "the model's logits stay"


def test_penalties_change_greedy_choices() -> None:
    assert one([5.0, 4.0], temperature=0.0, repetition_penalty=1.5, prompt=(0,)) == 1
    assert one([5.0, 4.0], temperature=0.0, presence_penalty=2.0, prompt=(0,)) == 0, "presence is over output only"
    assert one([5.0, 4.0], temperature=0.0, presence_penalty=2.0, output=(0,)) == 1
    assert one([5.0, 4.0], temperature=0.0, frequency_penalty=0.5, output=(0, 0)) == 0
    assert one([5.0, 4.0], temperature=0.0, frequency_penalty=0.5, output=(0, 0, 0)) == 1
    assert one([4.0, 5.0], temperature=0.0, presence_penalty=-2.0, output=(0,)) == 0
    assert one([5.0, 4.0], temperature=0.0, repetition_penalty=1.5, prompt=np.array([0])) == 1


def test_end_and_stop_tokens_wait_for_min_tokens() -> None:
    logits = [9.0, 8.0, 7.0, 6.0]
    asked = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1, 10**6), "eos_token_ids": (0,)}
    assert one(logits, **asked, output=()) == 2
    assert one(logits, **asked, output=(2,)) == 2
    assert one(logits, **asked, output=(2, 2)) == 0
    assert one(logits, **asked | {"temperature": 1e-3}, output=()) == 2
    everything = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (0, 1, 2, 3)}
    assert one(logits, **everything, output=()) == 0, "where all tokens stop, there is nothing to ban"


# ---- what top-k, top-p and min-p leave


def naive_support(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """A full stable sort and a walk down it, in float64."""
    ranked = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if top_k > 0:
        ranked = ranked[:top_k]
    weights = [math.exp(float(scaled[i])) for i in ranked]
    kept, held = [], 0.0
    for i, weight in zip(ranked, weights, strict=True):
        if held >= top_p * sum(weights):
            break
        kept.append(i)
        held += weight
    return sorted(i for i in kept if min_p == 0.0 or math.exp(float(scaled[i])) >= min_p)


@given(
    # Few distinct values, so that ties stand at every cut.
    values=st.lists(st.sampled_from([0.0, -0.5, -1.0, -2.0, -30.0]), min_size=1, max_size=30),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 29, 100]),
    top_p=st.sampled_from([1.0, 0.999, 0.77, 0.43, 0.011]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 0.99]),
)
@settings(deadline=None, max_examples=300)
def test_support_with_ties(values: list[float], top_k: int, top_p: float, min_p: float) -> None:
    scaled = np.array(values, dtype=np.float32)
    scaled -= scaled.max()
    kept = support(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
    got = list(range(len(values))) if kept is None else kept.tolist()
    assert got == naive_support(scaled, top_k, top_p, min_p)


@pytest.mark.parametrize("scale", [0.3, 3.0])  # flat: beyond the first look at the largest; peaked: within it
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.9, 0.0), (700, 0.95, 0.0), (40, 1.0, 0.0), (0, 0.5, 0.02)])
def test_support_of_a_large_vocabulary(scale: float, top_k: int, top_p: float, min_p: float) -> None:
    scaled = random_logits(1, 5000, scale=scale)[0].numpy()
    scaled = scaled - scaled.max()
    kept = support(scaled, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept is not None
    assert kept.tolist() == naive_support(scaled, top_k, top_p, min_p)


@pytest.mark.parametrize(("vocab", "top_p", "num_kept"), [(270, 0.961, 260), (300, 0.8534, 257), (300, 0.8531, 256)])
def test_a_nucleus_about_as_large_as_the_first_look(vocab: int, top_p: float, num_kept: int) -> None:
    """Equally likely tokens: the first ceil(top_p * vocab) stay."""
    kept = support(np.zeros(vocab, dtype=np.float32), top_k=0, top_p=top_p, min_p=0.0)
    assert kept is not None
    assert kept.tolist() == list(range(num_kept))


def test_only_kept_tokens_are_drawn() -> None:
    logits = random_logits(1, 300)[0]
    best = logits.argsort(descending=True).tolist()
    drawn = {one(logits, top_k=3, temperature=5.0, seed=seed) for seed in range(200)}
    assert drawn == set(best[:3])
    assert {one(logits, top_p=1e-6, temperature=5.0, seed=seed) for seed in range(20)} == {best[0]}
    assert {one(logits, min_p=1.0, temperature=5.0, seed=seed) for seed in range(20)} == {best[0]}


# ---- the draw


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws of a softmax at temperature 0.7, 7 degrees of freedom: 24.3 is the 0.1 % point."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 1.5])
    params = SamplingParams(temperature=0.7)
    num = 20_000
    rows = [SamplingRow(params, seed=step // 100, output=(0,) * (step % 100)) for step in range(num)]
    counts = np.bincount([s.id for s in sample(logits.expand(num, -1), rows)], minlength=8)
    expected = torch.softmax(logits.double() / 0.7, -1).numpy() * num
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_uniform_is_uniform_in_seed_and_in_step() -> None:
    """Chi-square over 16 bins, 15 degrees of freedom: 37.7 is the 0.1 % point; neighbours are not correlated."""
    for numbers in ([uniform(seed, 3) for seed in range(8000)], [uniform(-(2**63), step) for step in range(8000)]):
        counts = np.bincount((np.array(numbers) * 16).astype(int), minlength=16)
        assert ((counts - 500.0) ** 2 / 500.0).sum() < 37.7
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / math.sqrt(8000)


def test_uniform_is_blake2b_whatever_the_version() -> None:
    """`printf 42:7 | b2sum -l 48` says b6c8df849bcd, here read from its last byte to its first."""
    assert uniform(42, 7) == 0xCD9B84DFC8B6 / 2**48


def test_the_draw_inverts_the_running_sum() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0, 1.0, 0.0], dtype=np.float32)
    assert [draw(weights, at) for at in (0.0, 0.24, 0.25, 0.74, 0.75)] == [1, 1, 3, 3, 4]
    assert draw(weights, 1.0 - 2.0**-48) == 4, "the last number still finds a token that has weight"


def test_a_row_does_not_depend_on_its_neighbours_bit_by_bit() -> None:
    vocab = 1003  # odd, so that rows begin at every alignment
    logits = random_logits(12, vocab)
    kinds = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.3, "logprobs": 0},
        {"top_p": 0.8, "logprobs": 2},
        {"top_k": 5, "min_p": 0.1},
        {"repetition_penalty": 1.2, "temperature": 0.4},
        {"top_p": 0.99, "temperature": 3.0},
    ]
    rows = [
        SamplingRow(SamplingParams(**kinds[i % 6]), seed=i, prompt=(1, 2), output=(3,) * i)  # type: ignore[arg-type]
        for i in range(12)
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(12)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])


def test_seed_and_number_of_tokens_decide_and_what_they_were_does_not() -> None:
    logits = torch.zeros(10_000)
    tokens = [one(logits, seed=seed, output=output) for seed in (1, 2) for output in ((), (5,), (5, 5))]
    assert len(set(tokens)) == 6
    assert one(logits, seed=1, output=(5,)) == one(logits, seed=1, output=(9,), prompt=(1, 2, 3))


def test_extreme_logits() -> None:
    assert one([-1e38, 1e38, 0.0], temperature=0.01) == 1
    assert one([1e38, 1e38], temperature=100.0, seed=4) in (0, 1)
    assert one([-math.inf, 0.0, -math.inf], temperature=1.0) == 1
    assert one([1.0, 0.0], temperature=1e-300) == 0
    assert one([1.0, 2.0], temperature=1e-4, repetition_penalty=1e-300, prompt=(0,)) == 0
    assert one([-math.inf, 0.0], temperature=1.0, min_tokens=1, eos_token_ids=(1,)) == 1


def test_broken_logits_are_named_and_not_sampled_from() -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = math.nan
    logits[2, 0] = math.inf
    with pytest.raises(BrokenLogits, match=r"rows \[1, 2\]") as caught:
        sample(logits, [SamplingRow(GREEDY, 0)] * 3)
    assert caught.value.rows == (1, 2)
    with pytest.raises(BrokenLogits):
        sample(torch.full((1, 4), -math.inf), [SamplingRow(GREEDY, 0)])


# ---- log probabilities


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(1, 200)
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=1.7, logprobs=4)
    (sampled,) = sample(logits, [SamplingRow(params, 3, prompt=tuple(range(50)))])
    assert sampled.logprob is not None
    expected = torch.log_softmax(logits.double(), -1)[0]
    assert sampled.logprob.token == sampled.id
    assert sampled.logprob.logprob == pytest.approx(expected[sampled.id].item(), abs=1e-5)
    best = expected.topk(4)
    assert [token for token, _ in sampled.logprob.top] == best.indices.tolist()
    assert [value for _, value in sampled.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_of_equals_are_ordered_by_id_and_stay_within_the_vocabulary() -> None:
    (sampled,) = sample(torch.zeros(1, 4), [SamplingRow(SamplingParams(temperature=0.0, logprobs=3), 0)])
    quarter = pytest.approx(-math.log(4), abs=1e-6)
    assert sampled.logprob is not None
    assert [token for token, _ in sampled.logprob.top] == [0, 1, 2]
    assert all(value == quarter for _, value in sampled.logprob.top)
    (sampled,) = sample(torch.zeros(1, 2), [SamplingRow(SamplingParams(temperature=0.0, logprobs=20), 0)])
    assert sampled.logprob is not None
    assert len(sampled.logprob.top) == 2
    (sampled,) = sample(torch.zeros(1, 2), [SamplingRow(SamplingParams(temperature=0.0, logprobs=0), 0)])
    assert sampled.logprob == TokenLogprob(0, pytest.approx(-math.log(2), abs=1e-6))


# ---- when a request ends


@pytest.mark.parametrize(
    ("fields", "output", "expected"),
    [
        ({}, (), None),
        ({}, (5, 6), None),
        ({}, (5, 2), FinishReason.STOP),
        ({"ignore_eos": True}, (5, 2), None),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, (5, 2), FinishReason.STOP),
        ({"stop_token_ids": (7, 8)}, (8,), FinishReason.STOP),
        ({"min_tokens": 2}, (5, 2), None),
        ({"min_tokens": 2}, (5, 5, 2), FinishReason.STOP),
        ({"max_tokens": 2}, (5,), None),
        ({"max_tokens": 2}, (5, 5), FinishReason.LENGTH),
        ({"max_tokens": 2}, (5, 2), FinishReason.STOP),
        ({"max_tokens": 2, "min_tokens": 2}, (5, 2), FinishReason.LENGTH),
        ({}, (5,) * 5, None),
        ({}, (5,) * 6, FinishReason.LENGTH),
        ({"max_tokens": 100}, (5,) * 6, FinishReason.LENGTH),
    ],
)
def test_finish_reason(fields: dict[str, object], output: tuple[int, ...], expected: FinishReason | None) -> None:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    got = finish_reason(params, output, num_prompt=4, eos_token_ids=(2,), max_model_len=10)
    assert got is expected
