"""Measure how long prefill computes on this machine: a few steps of each kind, in a few seconds."""

import time
from collections.abc import Callable

import torch

from narrows.attention.base import PagedAttention
from narrows.kernels.base import Kernels
from narrows.kv.layout import pages_for
from narrows.models.layers.decoder import Model
from narrows.profile.measuring.steps import prefill_step
from narrows.profile.timing import Timing, Work

# Few and many tokens, behind nothing and behind much, alone and together; the cheap ones first.
GRID: tuple[tuple[Work, ...], ...] = (
    (Work(16, 16),),
    (Work(64, 64),),
    (Work(32, 2048),),
    (Work(64, 64),) * 4,
    (Work(256, 256),),
    (Work(256, 4096),),
    (Work(1024, 1024),),
    (Work(512, 2048),) * 2,
)
ROUNDS = 3
_LEAST = 4  # kinds of steps that three coefficients are fitted to
_PAGE = 32

Progress = Callable[[int, int], None]  # kinds of steps measured, of all


def measure_timing(
    model: Model,
    kernels: Kernels,
    *,
    fingerprint: str,  # of the model
    setup: str,  # of the rest: see Timing
    progress: Progress | None = None,
    limit_s: float = 10.0,
) -> Timing:
    """Of each kind of step that fits the model's context the fastest of ROUNDS: others that are busy on the machine
    only ever slow a step, and serving corrects for those that stay. No further kind is begun after `limit_s`; a slow
    model is known well enough by the short ones."""
    grid = [batch for batch in GRID if max(work.context for work in batch) <= model.max_positions]
    if len(grid) < _LEAST:  # a context of a few hundred tokens
        grid = [(Work(n, c),) for c in (model.max_positions // 2, model.max_positions) for n in (max(1, c // 8), c)]
    slots = max(sum(pages_for(work.context, _PAGE) for work in batch) for batch in grid) * _PAGE
    spec = model.spec
    # One pool for all layers: what KV holds does not change how long its attention takes.
    entries = [torch.zeros(slots, spec.num_kv_heads, spec.entry_dim, dtype=model.dtype)] * spec.num_layers
    attention = PagedAttention(kernels)

    def seconds(batch: tuple[Work, ...]) -> float:
        step = prefill_step([(work.context - work.uncached, work.context) for work in batch], _PAGE)
        tokens = torch.arange(len(step.positions), dtype=torch.int32) % spec.vocab_size
        began = time.perf_counter()
        model.forward(tokens, entries, step, attention, logit_rows=step.query_start[1:] - 1)
        return time.perf_counter() - began

    seconds(grid[0])  # threads and caches wake up
    measured: list[tuple[tuple[Work, ...], float]] = []
    began = time.monotonic()
    for done, batch in enumerate(grid):
        if progress is not None:
            progress(done, len(grid))
        if len(measured) >= _LEAST and time.monotonic() - began > limit_s:
            break
        measured.append((batch, min(seconds(batch) for _ in range(ROUNDS))))
    if progress is not None:
        progress(len(grid), len(grid))
    return Timing.fit(measured, model=fingerprint, setup=setup)
