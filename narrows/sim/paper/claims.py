"""Published results beside ours."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from narrows.sim.calibration import used

NEAR = 0.2  # a ratio that is off by no more counts as reproduced
HOLDS = "holds"


@dataclass(frozen=True, slots=True)
class Claim:
    """One published result. A number of `unit` (x: a ratio), or the text of an ordering, where `ours` is "holds" or
    what is found instead. `ours` None: not simulated. `used_for_calibration` ones do not count as reproduced."""

    claim: str
    where: str
    paper: float | str
    ours: float | str | None
    used_for_calibration: bool = False
    unit: str = "x"

    @property
    def is_ordering(self) -> bool:
        return isinstance(self.paper, str)

    @property
    def is_right(self) -> bool:
        """Whether the ordering holds, or the number is within NEAR."""
        if isinstance(self.paper, str):
            return self.ours == HOLDS
        return isinstance(self.ours, float | int) and abs(self.ours / self.paper - 1) <= NEAR

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "claim": self.claim,
            "where": self.where,
            "paper": self.paper,
            "ours": self.ours,
            "used_for_calibration": self.used_for_calibration,
            "unit": "" if self.is_ordering else self.unit,
        }


def number(
    claim: str, where: str, paper: float, ours: float | None, unit: str = "x", *, chose: str | None = None
) -> Claim:
    """A published number; `chose` names it in calibration where a constant was chosen by it."""
    assert chose is None or used(chose), chose
    return Claim(claim, where, paper, ours, chose is not None, unit)


def ordering(claim: str, where: str, **values: float) -> Claim:
    """That these values rise from the first to the last."""
    names, found = list(values), list(values.values())
    rising = all(a < b for a, b in pairwise(found))
    said = " < ".join(f"{name} {value:.4g}" for name, value in sorted(values.items(), key=lambda item: item[1]))
    return Claim(claim, where, " < ".join(names), HOLDS if rising else said)


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of the work, run in a process of its own; `weight` is about how many seconds it takes."""

    name: str
    run: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Score:
    """How many are right, of how many that were not used for calibration."""

    orderings: tuple[int, int]
    ratios: tuple[int, int]
    others: tuple[int, int]  # numbers with a unit


def score(claims: Sequence[Claim]) -> Score:
    free = [claim for claim in claims if not claim.used_for_calibration and claim.ours is not None]

    def count(chosen: Sequence[Claim]) -> tuple[int, int]:
        return sum(claim.is_right for claim in chosen), len(chosen)

    numbers = [claim for claim in free if not claim.is_ordering]
    return Score(
        count([claim for claim in free if claim.is_ordering]),
        count([claim for claim in numbers if claim.unit == "x"]),
        count([claim for claim in numbers if claim.unit != "x"]),
    )


@dataclass(frozen=True, slots=True)
class Paper:
    """What a paper's command does: the tasks, and the claims from their results by name."""

    tasks: Sequence[Task]
    claims: Callable[[dict[str, Any]], Sequence[Claim]]
    config: dict[str, Any] = field(default_factory=dict)
