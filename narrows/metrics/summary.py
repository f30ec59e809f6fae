"""Many requests in a few numbers."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from narrows.metrics.definitions import RequestMetrics, ctl_s


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles (linear interpolation between the nearest values) of `count` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Of the values that are not None; None when there are none."""
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return None
    p50, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
    return Distribution(known.size, float(known.mean()), p50, p90, p99, float(known.max()))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's figures. Distributions are over requests, except tbt_s, which is over all gaps of all requests."""

    num_requests: int
    finish_reasons: dict[str, int]  # requests that have not ended are not in it
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    num_preemptions: int
    handover_bytes: int
    tokens_per_s: float | None  # all tokens over the time from the first arrival to the last token
    ttft_s: Distribution | None
    ttst_s: Distribution | None
    second_token_s: Distribution | None
    tbt_s: Distribution | None
    tpot_s: Distribution | None
    ctl_s: list[float]

    def to_json(self) -> dict[str, Any]:
        """Nested plain values, under the fields' names."""
        return asdict(self)


def summarize(requests: Iterable[RequestMetrics]) -> Summary:
    """Figures over all given requests, ended or not."""
    requests = list(requests)
    num_tokens = sum(request.num_tokens for request in requests)
    duration_s = 0.0
    if num_tokens:
        last_s = max(request.token_times_s[-1] for request in requests if request.token_times_s)
        duration_s = last_s - min(request.arrival_s for request in requests)
    return Summary(
        num_requests=len(requests),
        finish_reasons=dict(Counter(str(r.finish_reason) for r in requests if r.finish_reason is not None)),
        num_prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        num_cached_tokens=sum(request.cached_tokens for request in requests),
        num_tokens=num_tokens,
        num_preemptions=sum(request.num_preemptions for request in requests),
        handover_bytes=sum(request.handover_bytes for request in requests),
        tokens_per_s=num_tokens / duration_s if duration_s > 0.0 else None,
        ttft_s=distribution(request.ttft_s for request in requests),
        ttst_s=distribution(request.ttst_s for request in requests),
        second_token_s=distribution(request.second_token_s for request in requests),
        tbt_s=distribution(gap for request in requests for gap in request.tbt_s),
        tpot_s=distribution(request.tpot_s for request in requests),
        ctl_s=ctl_s(requests),
    )
