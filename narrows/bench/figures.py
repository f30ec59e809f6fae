"""What samples of hand-overs say, and whether it is enough: pure functions from readings to rows to verdicts."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from narrows.bench.testbed import Reading, Sample
from narrows.metrics.definitions import ctl_s

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """What is the same for all samples of a row."""

    scheme: str
    selector: str
    tt_over_tp: float | None  # None: the link is not limited
    batch: int
    prompt_tokens: int
    output_tokens: int
    prefill_s: float  # Tp of one prompt, nothing else running
    link_gbps: float | None


def make_row(case: Case, samples: Sequence[Sample]) -> Row:
    """Medians over rounds of means over a batch. Lists are by token: the second (on_demand_ratios), the gap before the
    third (gaps_s), the first (ctl_s)."""
    n = case.output_tokens
    rounds = [[_cut(reading, n) for reading in sample.readings] for sample in samples]
    ttst = [_mean(r.metrics.ttst_s for r in readings) for readings in rounds]
    tbt = [_mean(gap for r in readings for gap in r.metrics.tbt_s) for readings in rounds]
    ratios = _by_token([_on_demand(readings) for readings in rounds])
    delivered = [[d for r in readings for d in r.metrics.delivered] for readings in rounds]

    def by_path(name: str) -> float:
        return float(median(sum(getattr(d, name) for d in ones) for ones in delivered))

    return asdict(case) | {
        "cached_tokens": median(_mean(r.metrics.cached_tokens for r in readings) for readings in rounds),
        "ttft_s": median(_mean(r.metrics.ttft_s for r in readings) for readings in rounds),
        "ttst_s": median(ttst),
        "ttst_min_s": min(ttst),
        "ttst_max_s": max(ttst),
        "second_token_s": median(_mean(r.metrics.second_token_s for r in readings) for readings in rounds),
        "tbt_s": median(tbt),
        "tbt_min_s": min(tbt),
        "tbt_max_s": max(tbt),
        "tbt_after_delivery_s": _median([_tbt_after_delivery(sample.readings) for sample in samples]),
        "tokens_until_delivery": _median([_tokens_until_delivery(sample.readings) for sample in samples]),
        "handover_s": _median([_handover(readings) for readings in rounds]),
        "ctl_s": _by_token([ctl_s([r.metrics for r in readings]) for readings in rounds]),
        "gaps_s": _by_token([_gaps(readings) for readings in rounds]),
        "on_demand_ratio": fmean(ratios) if ratios else 0.0,
        "on_demand_ratios": ratios,
        "metadata_bytes": by_path("metadata_bytes"),
        "proactive_bytes": by_path("proactive_bytes"),
        "on_demand_bytes": by_path("on_demand_bytes"),
        "speculative_bytes": by_path("speculative_bytes"),
        "wasted_bytes": by_path("wasted_bytes"),
        "pushed_share": median(_mean(d.pushed_blocks / max(1, d.num_blocks) for d in ones) for ones in delivered),
        "full_share": median(_mean(float(d.full) for d in ones) for ones in delivered),
        "link_use": _median([_link_use(sample.readings, case.link_gbps) for sample in samples]),
        "preemptions": sum(r.metrics.num_preemptions for readings in rounds for r in readings),
        "tokens_sha256": hashlib.sha256(
            json.dumps([[r.tokens for r in readings] for readings in rounds]).encode()
        ).hexdigest(),
    }


def _cut(reading: Reading, num_tokens: int) -> Reading:
    """The reading as if the request had ended after so many tokens."""
    metrics = reading.metrics
    metrics = replace(
        metrics, token_times_s=metrics.token_times_s[:num_tokens], on_demand=metrics.on_demand[: num_tokens - 1]
    )
    return replace(reading, metrics=metrics, tokens=reading.tokens[:num_tokens])


def _on_demand(readings: Sequence[Reading]) -> list[float]:
    """Of each token behind the first: entries fetched / entries selected, over the batch."""
    ratios = []
    for tokens in zip(*(r.metrics.on_demand for r in readings), strict=False):
        selected = sum(s for s, _ in tokens)
        ratios.append(sum(f for _, f in tokens) / selected if selected else 0.0)
    return ratios


def _gaps(readings: Sequence[Reading]) -> list[float]:
    return [fmean(gaps) for gaps in zip(*(r.metrics.tbt_s for r in readings), strict=False)]


def _tbt_after_delivery(readings: Sequence[Reading]) -> float | None:
    """The median gap between tokens that came after all KV of the whole batch had, while all of it still ran: steps
    of equally many requests are compared, none of which fetches."""
    delivered = [reading.delivered_s for reading in readings]
    from_s, until_s = max((at or math.inf for at in delivered), default=math.inf), min(r.ended_s for r in readings)
    gaps = []
    for reading in readings:
        times = [at for at in reading.metrics.token_times_s[1:] if from_s <= at <= until_s]
        gaps += [later - earlier for earlier, later in pairwise(times)]
    return median(gaps) if gaps else None


def _tokens_until_delivery(readings: Sequence[Reading]) -> float | None:
    """Tokens that had come when all KV had been delivered; None where that never was."""
    if any(r.delivered_s is None for r in readings):
        return None
    return _mean(sum(at < (r.delivered_s or 0.0) for at in r.metrics.token_times_s) for r in readings)


def _handover(readings: Iterable[Reading]) -> float | None:
    """From the start of prefill until decode could begin."""
    times = [r.handed_s - r.started_s for r in readings if r.handed_s is not None]
    return fmean(times) if times else None


def _link_use(readings: Sequence[Reading], link_gbps: float | None) -> float | None:
    """What crossed / what could have, from the first prefill's start until all was delivered or no more was sent."""
    if link_gbps is None:
        return None
    end_s = max(r.ended_s if r.delivered_s is None else r.delivered_s for r in readings)
    seconds = end_s - min(r.started_s for r in readings)
    return sum(r.metrics.total_bytes for r in readings) * 8e-9 / (link_gbps * seconds)


def _mean(values: Iterable[float | None]) -> float:
    """Of figures that every measured request has."""
    known = [value for value in values if value is not None]
    assert known, "a measured request has too few tokens"
    return fmean(known)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _by_token(lists: Sequence[Sequence[float]]) -> list[float]:
    return [median(values) for values in zip(*lists, strict=False)]


# ---- whether it is enough


@dataclass(frozen=True, slots=True)
class Target:
    """One claim about one case. `met` None: at this Tt/Tp nothing is asked, or there is nothing to judge by."""

    claim: str
    selector: str
    tt_over_tp: float
    batch: int
    value: float | None
    bound: float
    at_least: bool
    met: bool | None


SLOW_LINK, FAST_LINK = 6.5, 1.0  # Tt/Tp from which and up to which something is asked
NOISE = 1.05  # what counts as no worse
SLOW_CLAIMS: tuple[tuple[str, str, str, str, float, bool], ...] = (
    # claim, over, under (schemes), figure, bound, at least
    ("TTST, full / selective", "full", "selective", "ttst_s", 4.3, True),
    ("second token, full / selective", "full", "selective", "second_token_s", 1.0, True),
    ("TTST, partial / selective", "partial", "selective", "ttst_s", 1.2, True),
    ("TBT, partial / selective", "partial", "selective", "tbt_s", 1.3, True),
    ("TBT when all is delivered, selective / full", "selective", "full", "tbt_after_delivery_s", 1.05, False),
)
FAST_CLAIMS = (
    ("TTST, auto / full", "auto", "full", "ttst_s", NOISE, False),
    ("second token, auto / full", "auto", "full", "second_token_s", NOISE, False),
)


def judge(rows: Sequence[Row]) -> list[Target]:
    """The ratios that matter, for every selector, link and batch that has both schemes."""
    targets = []
    for selector, ratio, batch in dict.fromkeys((r["selector"], r["tt_over_tp"], r["batch"]) for r in rows):
        if ratio is None:
            continue
        by_scheme = {
            row["scheme"]: row
            for row in rows
            if (row["selector"], row["tt_over_tp"], row["batch"]) == (selector, ratio, batch)
        }
        for claims, asked in ((SLOW_CLAIMS, ratio >= SLOW_LINK), (FAST_CLAIMS, ratio <= FAST_LINK)):
            for claim, over, under, figure, bound, at_least in claims:
                if over not in by_scheme or under not in by_scheme:
                    continue
                value = ratio_of(by_scheme[over][figure], by_scheme[under][figure])
                met = None if value is None or not asked else (value >= bound if at_least else value <= bound)
                targets.append(Target(claim, selector, ratio, batch, value, bound, at_least, met))
    return targets


def ratio_of(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def differing(rows: Sequence[Row]) -> list[str]:
    """Cases whose tokens differ from those of others with the same prompts and selector: there must be none."""
    seen: dict[tuple[str, int, int], Row] = {}
    wrong = []
    for row in rows:
        first = seen.setdefault((row["selector"], row["batch"], row["prompt_tokens"]), row)
        if row["tokens_sha256"] != first["tokens_sha256"]:
            wrong.append(f"{_name(row)} and {_name(first)}")
    return wrong


def _name(row: Row) -> str:
    return f"{row['scheme']} at Tt/Tp {row['tt_over_tp']} (selector {row['selector']}, batch {row['batch']})"
