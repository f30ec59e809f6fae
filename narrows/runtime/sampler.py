"""Choosing tokens. Stateless: a row's token depends on that row alone, not on its neighbours, the step, the instance.

The steps are vLLM's, in its order: min_tokens bans, repetition, frequency and presence penalties, temperature, top-k,
top-p, min-p, draw. The draw inverts the cumulative distribution, in order of token id, at a number that is a hash of
(seed, tokens so far): from the same logits a request that is preempted, moved or batched otherwise draws the same.

Legend: B rows, V vocabulary. Rows are worked on in numpy, whose one-row partition, sort and argmax are several times
quicker than torch's on a CPU.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrows.core.request import SampledToken, SamplingParams, TokenLogprob
from narrows.errors import NarrowsError

Row = npt.NDArray[np.float32]  # [V] or fewer
Ids = npt.NDArray[np.int64]

# How many of the largest logits top-p looks at before it sorts them all.
_NUCLEUS = 256
# Logits of a usual size, of which float32 keeps about six decimals, show no difference to greedy below.
_GREEDY_BELOW = 1e-5
_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler knows of one request. Token sequences may be int64 arrays, which are read without a copy."""

    params: SamplingParams
    seed: int  # params.seed, or what the client drew in its place
    prompt: Sequence[int] | Ids = ()
    output: Sequence[int] | Ids = ()  # so far
    eos_token_ids: tuple[int, ...] = field(default=())


class BrokenLogits(NarrowsError):
    """The model produced NaN, +inf or nothing but -inf.

    `rows` are the batch rows concerned; the others may be sampled again.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(f"logits of rows {list(rows)} are not finite: no token can be chosen from them")
        self.rows = rows


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """One token per row of logits [B, V] float32 (left unchanged), with its log probability where asked for.

    Temperature 0 (or below 1e-5) takes the most likely token, the lowest id among equals. Log probabilities are those
    of the model, before penalties and temperature. Raises BrokenLogits.
    """
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    assert logits.dtype == torch.float32, logits.dtype
    batch: npt.NDArray[np.float32] = logits.detach().cpu().numpy()
    best = batch.argmax(axis=1)  # NaN counts as the largest
    broken = tuple(r for r, token in enumerate(best) if not np.isfinite(batch[r, token]))
    if broken:
        raise BrokenLogits(broken)
    with np.errstate(over="ignore", divide="ignore"):  # to infinity is where an extreme penalty or temperature points
        return [_sample_row(values, row, int(token)) for values, row, token in zip(batch, rows, best, strict=True)]


def _sample_row(values: Row, row: SamplingRow, best: int) -> SampledToken:
    token = best if _is_plainly_greedy(row) else choose(values, row)
    num_top = row.params.logprobs
    return SampledToken(token, None if num_top is None else token_logprob(values, token, num_top))


def choose(values: Row, row: SamplingRow) -> int:
    """The token for one row of raw logits [V] (left unchanged), of which the largest is finite."""
    params = row.params
    values = adjusted(values, row)
    if params.temperature < _GREEDY_BELOW:
        return int(values.argmax())
    scaled = (values - values.max()) / np.float32(params.temperature)
    kept = support(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    weights = np.exp(scaled if kept is None else scaled[kept])
    drawn = draw(weights, uniform(row.seed, len(row.output)))
    return drawn if kept is None else int(kept[drawn])


def adjusted(values: Row, row: SamplingRow) -> Row:
    """Raw logits with bans and penalties applied: a new array, or the given one where there is nothing to apply."""
    params = row.params
    banned = [] if len(row.output) >= params.min_tokens else _stopping_tokens(row, len(values))
    penalized = params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    if not banned and not penalized:
        return values
    raw, values = values, values.copy()
    values[banned] = -np.inf
    if values.max() == -np.inf:  # every possible token stops: there is nothing to choose instead
        values = raw.copy()
    if penalized:
        output = np.asarray(row.output, dtype=np.int64)
        if params.repetition_penalty != 1.0:
            seen = np.concatenate([np.asarray(row.prompt, dtype=np.int64), output])
            there = values[seen]  # an id that stands twice gets the same value twice
            penalty = np.float32(params.repetition_penalty)
            values[seen] = np.where(there > 0, np.minimum(there / penalty, _LARGEST), there * penalty)
        if len(output):
            ids, counts = np.unique(output, return_counts=True)
            values[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
            values[ids] -= np.float32(params.presence_penalty)
    return values


def support(scaled: Row, *, top_k: int, top_p: float, min_p: float) -> Ids | None:
    """Ids that top-k, then top-p among these, then min-p leave, ascending; None for all. `scaled` has maximum 0.

    top-p keeps the fewest most likely tokens that hold at least its share. Among equals the lowest ids stay.
    """
    ranked = scaled
    if 0 < top_k < len(scaled):
        ranked = _largest(scaled, top_k)
    if top_p < 1.0:
        ranked = _nucleus(ranked, top_p)
    least = np.float32(math.log(min_p)) if min_p > 0.0 else np.float32(-np.inf)
    if len(ranked) == len(scaled):
        return np.flatnonzero(scaled >= least) if min_p > 0.0 else None
    cut = ranked[-1]
    ids = np.flatnonzero(scaled >= cut)
    if len(ids) > len(ranked):  # more tokens equal the last one than there is room for
        ties = ids[scaled[ids] == cut]
        ids = np.setdiff1d(ids, ties[len(ranked) - len(ids) :], assume_unique=True)
    return ids[scaled[ids] >= least]


def _nucleus(values: Row, top_p: float) -> Row:
    """The fewest largest values, descending, that hold the share `top_p` of the values' common probability."""
    share = top_p * float(np.exp(values).sum(dtype=np.float64))
    for looked_at in (min(_NUCLEUS, len(values)), len(values)):
        ranked = _largest(values, looked_at)
        held = _running(np.exp(ranked))
        if held[-1] >= share:
            return ranked[: int(np.searchsorted(held, share)) + 1]
    return ranked


def _largest(values: Row, count: int) -> Row:
    """The `count` largest values, descending."""
    if count < len(values):
        values = np.partition(values, len(values) - count)[len(values) - count :]
    return np.sort(values)[::-1].copy()


def _running(weights: Row) -> npt.NDArray[np.float64]:
    """Running sums, which torch forms four times as fast as numpy."""
    return torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()


def draw(weights: Row, at: float) -> int:
    """The first index at which the running share of the weights exceeds `at`, in [0, 1)."""
    running = _running(weights)
    return int(np.searchsorted(running, at * running[-1], side="right"))


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) with 48 random bits, a pure function of its arguments."""
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2.0**48


def token_logprob(values: Row, token: int, num_top: int) -> TokenLogprob:
    """Log probability of a token under raw logits [V], and of the `num_top` most likely, equals by id."""
    largest = values.max()
    total = float(largest) + math.log(np.exp(values - largest).sum(dtype=np.float64))
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        num_top = min(num_top, len(values))
        ids = np.flatnonzero(values >= _largest(values, num_top)[-1])
        ids = ids[np.argsort(-values[ids], kind="stable")][:num_top]
        top = tuple((int(i), float(values[i]) - total) for i in ids)
    return TokenLogprob(token, float(values[token]) - total, top)


def _is_plainly_greedy(row: SamplingRow) -> bool:
    params = row.params
    return (
        params.temperature < _GREEDY_BELOW
        and params.repetition_penalty == 1.0
        and params.frequency_penalty == 0.0
        and params.presence_penalty == 0.0
        and len(row.output) >= params.min_tokens
    )


def _stopping_tokens(row: SamplingRow, vocab: int) -> list[int]:
    return [token for token in (*row.eos_token_ids, *row.params.stop_token_ids) if token < vocab]
