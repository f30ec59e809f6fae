"""How much of what decode selects has not been pushed, by the order of the push: python benchmarks/profile.py

Importance is measured on one kind of text and used on another (prose, source code; both come with Python). Half of
the KV is pushed, the first two layers included; on-demand ratio is the part of the entries selected that was not among
it, the first two layers excluded, without keeping what was fetched. `optimal` is ordered by the evaluated prompts' own
counts. `equation_1` is the profile as counted, `profile` the same smoothed along positions, as serving uses it.
"""

import argparse
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from narrows.bench.results import document, save, show
from narrows.config import EngineConfig
from narrows.kv.blocks import NUM_BLOCKS, blocks_for
from narrows.models.catalog import resolve
from narrows.profile.importance import VERSION, Group, ImportanceProfile
from narrows.profile.measuring.importance import NUM_ROWS, Counted, TextRun, count_selections
from narrows.profile.orders import on_demand_ratio, order_blocks
from narrows.profile.smoothing import smooth
from narrows.profiles import Workshop, ensure_calibration
from narrows.select.base import Selector

STATIC = ("sequential", "random", "streaming")
SHORT = {
    "prompt_tokens": "tokens",
    "sequential": "sequent.",
    "to_sequential_and_random": "/ those",
    "to_optimal": "/ optimal",
    "calibration_s": "calibr. s",
}
MODULES = ("argparse", "tarfile", "typing", "inspect", "ast", "zipfile", "subprocess", "logging/__init__")


def code_files() -> list[Path]:
    """Modules of Python's library."""
    library = Path(tarfile.__file__).parent
    return [library / f"{name}.py" for name in MODULES]


def counts_of(workshop: Workshop, selector: Selector, text: Sequence[int], length: int, most: int) -> list[Counted]:
    """Of `most` prompts spread over the text, each for itself."""
    found = []
    for i in range(most):
        # Not where calibration takes its prompts, though those are of another text.
        first = (len(text) - length - NUM_ROWS) * (2 * i + 1) // (2 * most)
        run = TextRun(workshop.model, workshop.kernels, selector, length + NUM_ROWS)
        run.prefill(text[first : first + length])
        counts = run.decode(text[first + length : first + length + NUM_ROWS])
        found.append(Counted(counts, NUM_ROWS * workshop.spec.num_kv_heads))
    return found


def compare(calibrated: Counted, evaluated: Sequence[Counted], num_blocks: int, share: float) -> dict[str, float]:
    """On-demand ratios by order, means over the evaluated prompts."""
    num_layers, num_tokens = calibrated.counts.shape
    pushed = round(num_layers * num_blocks * share)

    def ranked(counts: Any, num_queries: int) -> Any:
        group = Group.from_counts(counts, num_queries, NUM_BLOCKS)
        matrix = ImportanceProfile("", "", VERSION, (group,)).importance_for(num_tokens, num_blocks)
        return order_blocks("profile", matrix, num_layers, num_blocks)

    orders = {
        "profile": ranked(smooth(calibrated.counts), calibrated.num_queries),
        "equation_1": ranked(calibrated.counts, calibrated.num_queries),
        **{kind: order_blocks(kind, None, num_layers, num_blocks) for kind in STATIC},
    }
    ratios = {
        name: mean(on_demand_ratio(one.counts, order, pushed) for one in evaluated) for name, order in orders.items()
    }
    own = []
    for one in evaluated:
        matrix = Group.from_counts(one.counts, one.num_queries, num_blocks).matrix
        own.append(on_demand_ratio(one.counts, order_blocks("profile", matrix, num_layers, num_blocks), pushed))
    ratios["optimal"] = mean(own)
    worst = max(ratios["profile"] / ratios[name] for name in ("sequential", "random"))
    return ratios | {"to_sequential_and_random": worst, "to_optimal": ratios["profile"] / ratios["optimal"]}


def run(select: str, lengths: Sequence[int], calibrate_on: int, evaluate_on: int, share: float) -> dict[str, Any]:
    config = EngineConfig(select=select)
    workshop = Workshop(config, resolve(config.model))
    selector = workshop.selector(ensure_calibration(workshop))
    texts = {"prose": workshop.text([])[0], "code": workshop.text(code_files())[0]}
    rows: list[dict[str, Any]] = []
    for length in lengths:
        evaluated, calibrated, took = {}, {}, {}
        for kind, text in texts.items():
            began = time.perf_counter()
            calibrated[kind] = count_selections(
                workshop.model, workshop.kernels, selector, text, groups=(length,), num_prompts=calibrate_on
            )[length]
            took[kind] = time.perf_counter() - began
            evaluated[kind] = counts_of(workshop, selector, text, length, evaluate_on)
        for kind, other in (("prose", "code"), ("code", "prose")):
            for num_blocks in sorted({blocks_for(length), min(NUM_BLOCKS, length)}):
                row = {"selector": select, "from": kind, "on": other, "prompt_tokens": length, "blocks": num_blocks}
                row |= compare(calibrated[kind], evaluated[other], num_blocks, share)
                rows.append(row | {"calibration_s": took[kind]})
    about = {"model": config.model, "select": select, "select_ratio": config.select_ratio, "pushed": share}
    about |= {"calibration_prompts": calibrate_on, "evaluated_prompts": evaluate_on, "decode_steps": NUM_ROWS}
    title = f"on-demand ratio of {config.model}, {select} at {config.select_ratio:g}, {share:.0%} of KV pushed"
    show(title, [{SHORT.get(name, name): value for name, value in row.items() if name != "selector"} for row in rows])
    return document("profile", about, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--select", default="exact")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--prompts", type=int, default=4, help="calibration prompts of each length")
    parser.add_argument("--evaluate", type=int, default=2, help="evaluated prompts")
    parser.add_argument("--pushed", type=float, default=0.5, help="part of all KV blocks")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    np.seterr(all="raise")
    save(given.json, run(given.select, given.tokens, given.prompts, given.evaluate, given.pushed))
