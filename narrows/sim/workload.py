"""What arrives when: requests as lengths, and how they are spaced in time."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from narrows.errors import ConfigError

HASH_BLOCK = 512  # prompt tokens that one prefix id stands for, in Mooncake's format and in ours


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `prefix_ids` has one id for each `HASH_BLOCK` tokens of the prompt, the last block's part included;
    equal ids at equal places mean an equal prefix. Empty: nothing is shared."""

    time_s: float
    num_prompt: int
    num_output: int
    prefix_ids: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output

    def cached_tokens(self, held: Set[int]) -> int:
        """Tokens of the prompt's beginning whose blocks are all in `held`, at most all but one: prefill needs a token
        to compute."""
        blocks = 0
        for prefix in self.prefix_ids:
            if prefix not in held:
                break
            blocks += 1
        return min(blocks * HASH_BLOCK, self.num_prompt - 1)


Trace = tuple[Arrival, ...]


def rate_of(trace: Trace) -> float:
    """Requests a second: how many follow the first, over the time they take. inf where all come at once."""
    span = trace[-1].time_s - trace[0].time_s if trace else 0.0
    return (len(trace) - 1) / span if span > 0 else float("inf")


def rescaled(trace: Trace, rate: float) -> Trace:
    """The same requests in the same pattern at another mean rate (requests a second), from time 0."""
    _positive("rate", rate)
    if not trace:
        return trace
    now = rate_of(trace)
    if now == float("inf"):
        raise ConfigError(
            "rate: all requests of this trace come at once, so they have no pattern; use poisson arrivals"
        )
    first, factor = trace[0].time_s, now / rate
    return tuple(replace(arrival, time_s=(arrival.time_s - first) * factor) for arrival in trace)


def constant_times(count: int, rate: float) -> Iterator[float]:
    """Evenly spaced, from 0."""
    _positive("rate", rate)
    return (index / rate for index in range(count))


def gamma_times(count: int, rate: float, cv: float, seed: int) -> Iterator[float]:
    """Gaps from a gamma distribution with this coefficient of variation: 1 is Poisson, more is burstier, 0 constant."""
    _positive("rate", rate)
    if not 0 <= cv <= 100:
        raise ConfigError(f"cv: {cv} is not allowed; use a number from 0 (even) over 1 (Poisson) to 100 (bursts)")
    if cv == 0:
        return constant_times(count, rate)
    shape = 1 / cv**2
    gaps = np.random.default_rng((seed, 0)).gamma(shape, 1 / (shape * rate), count)
    return iter(np.cumsum(gaps).tolist())


def poisson_times(count: int, rate: float, seed: int) -> Iterator[float]:
    """Gaps from an exponential distribution."""
    return gamma_times(count, rate, 1.0, seed)


def spaced(trace: Trace, times: Iterator[float]) -> Trace:
    """The trace's requests in their order, at other times."""
    return tuple(replace(arrival, time_s=time) for arrival, time in zip(trace, times, strict=True))


def arrivals(lengths: Sequence[tuple[int, int]], times: Iterator[float]) -> Trace:
    """Requests of (prompt, output) lengths at these times."""
    return tuple(Arrival(time, prompt, output) for (prompt, output), time in zip(lengths, times, strict=True))


def _positive(field: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{field}: {value} is not allowed; use a number above 0")
