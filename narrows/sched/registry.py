"""Policies by name: `least-batch`, `uniform-cp:4`, `segment:65536`."""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass

from narrows.errors import ConfigError
from narrows.sched.base import GroupPolicy
from narrows.sched.dual_balanced import DualBalanced
from narrows.sched.dynamo_cost import DynamoCost
from narrows.sched.elastic_cp import ElasticCP
from narrows.sched.least_batch import LeastBatch
from narrows.sched.least_cache import LeastCache
from narrows.sched.round_robin import RoundRobin
from narrows.sched.segment import Segment
from narrows.sched.sglang_tokens import SGLangTokens
from narrows.sched.uniform_cp import UniformCP
from narrows.sched.vllm_score import VllmScore


@dataclass(frozen=True, slots=True)
class Parameter:
    """What may stand behind a name and a colon; the policy has a default where nothing does."""

    name: str
    kind: type[int] | type[float]
    least: float
    most: float = math.inf

    def read(self, text: str) -> int | float | None:
        """Its value; None: it is not one, or out of range."""
        try:
            value = self.kind(text)
        except ValueError:
            return None
        return value if self.least <= value <= self.most and math.isfinite(value) else None

    @property
    def wanted(self) -> str:
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} of at least {self.least:g}" + ("" if self.most == math.inf else f", at most {self.most:g}")


@dataclass(frozen=True, slots=True)
class Known:
    """A policy that can be named. `local`: every request it places is on one instance."""

    make: Callable[..., GroupPolicy]
    local: bool
    parameter: Parameter | None = None


POLICIES = {
    "dual-balanced": Known(DualBalanced, local=False),
    "round-robin": Known(RoundRobin, local=True),
    "least-batch": Known(LeastBatch, local=True),
    "least-cache": Known(LeastCache, local=True),
    "vllm": Known(VllmScore, local=True),
    "sglang-tokens": Known(SGLangTokens, local=True),
    "dynamo-cost": Known(DynamoCost, local=True, parameter=Parameter("WEIGHT", float, 0.0)),
    "uniform-cp": Known(UniformCP, local=False, parameter=Parameter("DEGREE", int, 2)),
    "segment": Known(Segment, local=False, parameter=Parameter("TOKENS", int, 1)),
    "elastic-cp": Known(ElasticCP, local=False, parameter=Parameter("MARK", float, 0.0, 1.0)),
}


def make_policy(text: str, *, local: bool = False) -> GroupPolicy:
    """The policy of a name, or of a name and a parameter: `uniform-cp:4`. `local`: only those of degree 1.

    Raises ConfigError naming the field `policy`, what is wrong, the nearest known name and all that can be used.
    """
    name, colon, value = text.partition(":")
    hint = f"known are {', '.join(map(form, POLICIES))}"
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"policy: {text!r} is not known; the nearest is {near!r}; {hint}")
    if local and not POLICIES[name].local:
        usable = ", ".join(form(name) for name, known in POLICIES.items() if known.local)
        raise ConfigError(
            f"policy: {text!r} spreads a request's KV over several instances, which decode can not attend over yet; "
            f"use one of {usable}"
        )
    known = POLICIES[name]
    if not colon:
        return known.make()
    if known.parameter is None:
        raise ConfigError(f"policy: {text!r}: {name!r} takes no parameter, leave out {colon + value!r}; {hint}")
    number = known.parameter.read(value)
    if number is None:
        wanted = known.parameter.wanted
        raise ConfigError(f"policy: {text!r}: {value!r} is no {known.parameter.name}, which is {wanted}; {hint}")
    return known.make(number)


def form(name: str) -> str:
    """How a policy may be written: `uniform-cp[:DEGREE]`."""
    parameter = POLICIES[name].parameter
    return name if parameter is None else f"{name}[:{parameter.name}]"
