"""What a run comes to: one row of figures, and values over time on an even grid."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from narrows.metrics.summary import Distribution, summarize
from narrows.sim.cost import Floats
from narrows.sim.run import Outcome
from narrows.sim.series import Samples

MEANS = ("batch_cv", "kv_cv")
LAYER = ("attention", "moe", "cp", "other")


def row_of(outcome: Outcome, policy: str, slo_tpot_ms: float) -> dict[str, Any]:
    """Figures of a run under their names with units. Means and CVs are over the tokens that decode steps made (see
    sim.series); those of a layer are of its slowest instance, `cp_mean_us` of all instances."""
    requests = outcome.metrics()
    summary = summarize(requests)
    tpots = [measured.tpot_s for measured in requests if measured.tpot_s is not None]
    row: dict[str, Any] = {
        "policy": policy,
        "requests": summary.num_requests,
        "simulated_s": outcome.end_s,
        "tokens_per_s": summary.tokens_per_s,
    }
    for name, unit, factor in (("ttft", "s", 1.0), ("ttst", "ms", 1e3), ("tpot", "ms", 1e3), ("tbt", "ms", 1e3)):
        found: Distribution | None = getattr(summary, f"{name}_s")
        for part in ("mean", "p50", "p99"):
            row[f"{name}_{part}_{unit}"] = None if found is None else getattr(found, part) * factor
    row["slo_attainment"] = sum(tpot <= slo_tpot_ms / 1e3 for tpot in tpots) / len(tpots) if tpots else None
    row |= {name: _over_tokens(outcome, name) for name in MEANS}
    for name in (*LAYER, "cp_mean"):
        value = _over_tokens(outcome, f"{name}_s")
        row[f"{name}_us"] = None if value is None else value * 1e6
        if name in LAYER:
            peaks = [peak for group in outcome.groups if (peak := group.series.peak(f"{name}_s")) is not None]
            row[f"{name}_max_us"] = max(peaks) * 1e6 if peaks else None
    steps = sum(group.series.num_steps for group in outcome.groups)
    row |= {
        "step_ms": sum(group.series.step_s for group in outcome.groups) / steps * 1e3 if steps else None,
        "steps": steps,
        "decisions": sum(group.num_decisions for group in outcome.groups),
        "preemptions": summary.num_preemptions,
        "spread_requests": sum(group.num_spread for group in outcome.groups),
        "max_batch": max(group.series.max_batch for group in outcome.groups),
        "max_kv_tokens": max(group.series.max_kv_tokens for group in outcome.groups),
        "max_queue": max((queue for _, queue in waiting(outcome)), default=0),
        "cached_share": summary.num_cached_tokens / summary.num_prompt_tokens,
        "prefill_busy": _mean([instance.busy_s / outcome.end_s for instance in outcome.prefill if outcome.end_s]),
        "link_busy": _mean([instance.link.busy_s / outcome.end_s for instance in outcome.prefill if outcome.end_s]),
        "handover_gb": summary.handover_bytes / 1e9,
        "delivered_gb": sum(measured.total_bytes for measured in requests) / 1e9,
    }
    return row


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _over_tokens(outcome: Outcome, name: str) -> float | None:
    """Mean over the tokens of all groups."""
    parts = [(group.series.mean(name), group.series.num_tokens) for group in outcome.groups]
    known = [(mean, tokens) for mean, tokens in parts if mean is not None]
    return sum(mean * tokens for mean, tokens in known) / sum(tokens for _, tokens in known) if known else None


def waiting(outcome: Outcome) -> list[tuple[float, int]]:
    """Requests that wait, for prefill or for room at decode, at each time that this is looked at."""
    at_prefill = list(outcome.queue)
    times = [(time_s, 0, queue) for time_s, queue in at_prefill]
    for i, group in enumerate(outcome.groups, start=1):
        samples = group.series.samples()
        times += [(s, i, q) for s, q in zip(samples.start_s.tolist(), samples.queue.tolist(), strict=True)]
    now = [0] * (len(outcome.groups) + 1)
    seen = []
    for time_s, place, queue in sorted(times):
        now[place] = queue
        seen.append((time_s, sum(now)))
    return seen


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Values at evenly spaced times, [W, columns]; 0 where no step is going on."""

    end_s: float
    names: tuple[str, ...]  # of the W instances
    batch: Floats
    kv_tokens: Floats


def grid_of(outcome: Outcome, columns: int) -> Grid:
    """Batch and KV of each decode instance over the whole run."""
    times = (np.arange(columns) + 0.5) / columns * outcome.end_s
    parts = [group.series.samples() for group in outcome.groups]
    names = [str(name) for group in outcome.groups for name in group.names]
    batch = np.concatenate([_at(times, samples, samples.batch) for samples in parts], axis=1)
    kv = np.concatenate([_at(times, samples, samples.kv_tokens) for samples in parts], axis=1)
    return Grid(outcome.end_s, tuple(names), batch.T, kv.T)


def _at(times: Floats, samples: Samples, values: Any) -> Floats:
    """The sample that holds at each time, [columns, W]."""
    if not len(samples.start_s):
        return np.zeros((len(times), values.shape[1]))
    index = np.maximum(np.searchsorted(samples.start_s, times, side="right") - 1, 0)
    holds = (samples.start_s[index] <= times) & (times < samples.end_s[index])
    found: Floats = np.where(holds[:, None], values[index], 0)
    return found
