"""Synthetic lengths in the manner of NanoCP's evaluation: many short chats, a few long issues.

NanoCP mixes ShareGPT-4o (short) and software-engineering traces of GitHub issues (long) so that 1 % or 5 % of the
requests are long (sections 2.1 and 6.1). It publishes no lengths, so ours are log-normal, cut at a least and a most.
The parameters are ours, chosen so that what the text does say comes out; calibration has them with the arithmetic:

| lengths  | tokens of | median  | sigma | cut at         | mean    |
| -------- | --------- | ------- | ----- | -------------- | ------- |
| sharegpt | prompt    | 150     | 1.0   | 4 .. 8,192     | 247     |
| github   | prompt    | 140,000 | 1.0   | 16 K .. 1 M    | 200,000 |
| both     | output    | 970     | 0.5   | 4 .. 8,192     | 1,100   |

Prompt and output of a request are independent. Means are of the cut distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.errors import ConfigError
from narrows.sim import names
from narrows.sim.calibration import constant


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(normal(log(median), sigma)), drawn again where it falls outside least..most; whole numbers."""

    median: float
    sigma: float
    least: int
    most: int

    def __post_init__(self) -> None:
        if not (0 < self.least <= self.median <= self.most):
            raise ConfigError(f"median: {self.median} is not between least {self.least} and most {self.most}")
        if not 0 <= self.sigma <= 10:
            raise ConfigError(f"sigma: {self.sigma} is not allowed; use a number from 0 to 10")

    def draw(self, count: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """[count] lengths."""
        values = np.empty(count)
        missing = np.arange(count)
        while len(missing):
            values[missing] = np.rint(self.median * np.exp(self.sigma * random.standard_normal(len(missing))))
            outside = (values[missing] < self.least) | (values[missing] > self.most)
            missing = missing[outside]
        return values.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of prompts and outputs of one kind of request."""

    prompt: LogNormal
    output: LogNormal


OUTPUT = LogNormal(constant("output_median"), constant("output_sigma"), 4, 8192)
SHAREGPT = Lengths(LogNormal(constant("short_prompt_median"), constant("short_prompt_sigma"), 4, 8192), OUTPUT)
GITHUB = Lengths(LogNormal(constant("long_prompt_median"), constant("long_prompt_sigma"), 16_000, 1_000_000), OUTPUT)

# Share of long requests, by count.
MIXES = {"sharegpt": 0.0, "issue1": 0.01, "issue5": 0.05, "github": 1.0}


def mix(
    name: str, count: int, seed: int, *, short: Lengths = SHAREGPT, long: Lengths = GITHUB
) -> Sequence[tuple[int, int]]:
    """(prompt, output) lengths of `count` requests of a mix. Exactly its share of them, rounded, is long, at places
    drawn by the seed. The same seed gives the same short requests at whatever share."""
    share = names.find(MIXES, name, "mix")
    if count < 1:
        raise ConfigError(f"count: {count} is not allowed; use at least 1 request")
    random = np.random.default_rng((seed, 1))
    prompts, outputs = short.prompt.draw(count, random), short.output.draw(count, random)
    num_long = round(share * count)
    at = random.permutation(count)[:num_long]
    prompts[at], outputs[at] = long.prompt.draw(num_long, random), long.output.draw(num_long, random)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))
