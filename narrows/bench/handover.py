"""`narrows bench handover`: schemes of hand-over beside each other, on a link that is slow for the model.

For each selector a cluster on an unlimited link gives Tp, the prefill time of one prompt, and what computation alone
would take (`ideal`); for each Tt/Tp a second cluster has a link on which all KV of a prompt takes Tt. Rounds go over
ideal and all schemes in turn, with the same prompts; what is shown are medians over rounds.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from narrows.bench.figures import Case, Row, Target, differing, judge, make_row, ratio_of
from narrows.bench.oracle import Oracle
from narrows.bench.plots import Panel, draw
from narrows.bench.results import document
from narrows.bench.testbed import Sample, Testbed, Workload, open_testbed
from narrows.config import SELECTORS, EngineConfig
from narrows.core.scheme import SCHEMES, Scheme
from narrows.errors import ConfigError
from narrows.launch import console
from narrows.models.catalog import resolve

ORACLE = replace(SCHEMES["selective"], name="oracle")  # `selective`, pushing what the very prompt will select
KNOWN_SCHEMES = {**SCHEMES, ORACLE.name: ORACLE}
IDEAL = replace(SCHEMES["full"], name="ideal")
TP_REPEATS = 3
IDEAL_FIGURES = ("ttft_s", "ttst_s", "second_token_s", "tbt_s")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be compared, on links by their Tt/Tp or, where `link_gbps` is given, by their rates."""

    schemes: tuple[Scheme, ...]
    selectors: tuple[str, ...] = ("infinigen",)
    tt_over_tp: tuple[float, ...] = (6.5,)
    batches: tuple[int, ...] = (1,)
    link_gbps: tuple[float, ...] = ()
    oracles: tuple[str, ...] = (ORACLE.name,)  # names of schemes that are to know the future

    def __post_init__(self) -> None:
        if unknown := [name for name in self.selectors if name not in SELECTORS]:
            raise ConfigError(f"selector: {', '.join(unknown)} is not known; use some of {', '.join(SELECTORS)}")
        if wrong := [ratio for ratio in self.tt_over_tp if not 0.0 < ratio <= 1000.0]:
            raise ConfigError(f"tt_over_tp: {wrong[0]} is out of range; use numbers above 0, at most 1000")
        if wrong := [batch for batch in self.batches if batch < 1]:
            raise ConfigError(f"batch: {wrong[0]} is out of range; use at least 1")
        if len({scheme.name for scheme in self.schemes}) < len(self.schemes):
            raise ConfigError("scheme: a name is given twice; name each once")


def schemes_named(names: Sequence[str]) -> tuple[Scheme, ...]:
    """Raises ConfigError for a name that is none."""
    if unknown := [name for name in names if name not in KNOWN_SCHEMES]:
        raise ConfigError(f"scheme: {', '.join(unknown)} is not known; use some of {', '.join(KNOWN_SCHEMES)}")
    return tuple(KNOWN_SCHEMES[name] for name in names)


def run(config: EngineConfig, plan: Plan, workload: Workload) -> dict[str, Any]:
    """Measure and return the result document, with `targets` beside `results`.

    Raises ConfigError before anything is measured when plan, workload and model do not go together.
    """
    rows: list[Row] = []
    for selector in plan.selectors:
        rows += _run_selector(replace(config, select=selector, link_gbps=None), plan, workload)
    result = document(
        "handover",
        {
            **asdict(config),
            **asdict(workload),
            "tt_over_tp": plan.tt_over_tp,
            "batches": plan.batches,
            "selectors": plan.selectors,
            "schemes": [asdict(scheme) for scheme in plan.schemes],
        },
        rows,
    )
    return result | {"targets": [asdict(target) for target in judge(rows)], "differing": differing(rows)}


def _run_selector(config: EngineConfig, plan: Plan, workload: Workload) -> list[Row]:
    rows: list[Row] = []
    most = max(plan.batches)
    with open_testbed(config, workload, most) as free, Oracles(free, plan.oracles) as oracles:
        say(f"{config.select}: measuring Tp, the prefill of a prompt alone ({TP_REPEATS + 1} times)")
        free.warm_up([IDEAL])
        seconds = free.prefill_s(TP_REPEATS)
        prefill_s = median(seconds)
        say(
            f"{config.select}: Tp {prefill_s:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}) for "
            f"{workload.prompt_tokens} tokens, {free.documents.prefix_tokens} cached; KV {free.kv_bytes / 1e6:.0f} MB"
        )
        one = free.kv_bytes * 8e-9 / prefill_s  # the rate at which Tt is Tp
        links = [(one / rate, rate) for rate in plan.link_gbps] or [(ratio, one / ratio) for ratio in plan.tt_over_tp]
        for ratio, link_gbps in links:
            say(f"{config.select}: Tt/Tp {ratio:g} is a link of {link_gbps:.3f} Gbit/s")
            with open_testbed(replace(config, link_gbps=link_gbps), workload, most) as bed:
                bed.warm_up([s for s in plan.schemes if s.name not in plan.oracles] or [IDEAL])
                for batch in plan.batches:
                    compared = compare(bed, free, plan.schemes, batch, oracles)
                    case = Case(
                        "",
                        config.select,
                        ratio,
                        batch,
                        workload.prompt_tokens,
                        workload.output_tokens,
                        prefill_s,
                        link_gbps,
                    )
                    rows += make_rows(case, compared)
    return rows


class Oracles(contextlib.AbstractContextManager["Oracles"]):
    """Makes the profiles of schemes that are to know the future, when there is one."""

    def __init__(self, bed: Testbed, names: Sequence[str]) -> None:
        self._bed, self._names = bed, names
        self._folder = tempfile.TemporaryDirectory(prefix="narrows-oracle-")
        self._oracle: Oracle | None = None
        self._made: dict[tuple[int, int], str] = {}

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def profile_for(self, scheme: Scheme, round: int, ideal: Sample) -> str | None:
        """A profile file of the prompts of `ideal`, for a scheme that is to have one."""
        if scheme.name not in self._names:
            return None
        key = round, len(ideal.readings)
        if key not in self._made:
            if self._oracle is None:
                self._oracle = Oracle(self._bed.config, resolve(self._bed.config.model))
            prompts = [self._bed.documents.prompt(d, round) for d in range(len(ideal.readings))]
            outputs = [reading.tokens[: self._bed.workload.output_tokens] for reading in ideal.readings]
            path = Path(self._folder.name) / f"round{round}-batch{len(prompts)}.safetensors"
            self._oracle.profile(prompts, outputs).save(path)
            self._made[key] = str(path)
        return self._made[key]


def compare(
    bed: Testbed, free: Testbed, schemes: Sequence[Scheme], batch: int, oracles: Oracles
) -> dict[str, list[Sample]]:
    """Samples by scheme, and of `ideal`: rounds in turn, each beginning with another scheme."""
    samples: dict[str, list[Sample]] = {name: [] for name in (IDEAL.name, *(scheme.name for scheme in schemes))}
    rounds = bed.workload.rounds
    for round in range(rounds):
        ideal = free.measure(IDEAL, round, batch)
        samples[IDEAL.name].append(ideal)
        first = round % len(schemes)
        for scheme in (*schemes[first:], *schemes[:first]):
            sample = bed.measure(scheme, round, batch, oracles.profile_for(scheme, round, ideal))
            samples[scheme.name].append(sample)
            say(f"  round {round + 1} of {rounds}, batch {batch}, {scheme.name}: {_glance(sample, bed.workload)}")
        say(f"  round {round + 1} of {rounds}, batch {batch}, ideal: {_glance(ideal, bed.workload)}")
    return samples


def _glance(sample: Sample, workload: Workload) -> str:
    case = Case("", "", None, len(sample.readings), workload.prompt_tokens, workload.output_tokens, 0.0, None)
    row = make_row(case, [sample])
    return (
        f"TTFT {row['ttft_s']:.3f} s, TTST {row['ttst_s']:.3f} s, TBT {row['tbt_s'] * 1e3:.1f} ms, "
        f"on demand {row['on_demand_ratio']:.2f}, {row['cached_tokens']:.0f} cached"
    )


def make_rows(case: Case, compared: dict[str, list[Sample]]) -> list[Row]:
    """A row a scheme, each with the figures of `ideal` beside its own."""
    ideal = make_row(replace(case, scheme=IDEAL.name), compared[IDEAL.name])
    beside = {f"ideal_{name}": ideal[name] for name in IDEAL_FIGURES} | {"ideal_ctl_s": ideal["ctl_s"]}
    rows = [
        make_row(replace(case, scheme=name), samples) | beside
        for name, samples in compared.items()
        if name != IDEAL.name
    ]
    for row in rows:
        row["tokens_equal_ideal"] = row["tokens_sha256"] == ideal["tokens_sha256"]
    return rows


def say(text: str) -> None:
    """Progress, for whoever waits."""
    console.print(text, style="dim", soft_wrap=True)


# ---- for a person


def show(result: dict[str, Any]) -> None:
    """Print rows and verdicts."""
    rows: list[Row] = result["results"]
    output = Console(highlight=False)
    output = output if output.is_terminal else Console(width=160, highlight=False)
    for selector, ratio, batch in groups(rows):
        _show_group([r for r in rows if group_of(r) == (selector, ratio, batch)], output)
    output.print(
        "TBT: mean gap behind the second token; later: median gap once all KV is there; fetched: on-demand ratio;\n"
        "link: what crossed of what could have; ideal: computation only",
        style="dim",
    )
    verdicts = Table(title="What it is to reach", title_justify="left")
    for name in ("claim", "selector", "Tt/Tp", "batch", "measured", "asked", ""):
        verdicts.add_column(name, no_wrap=True)
    for target in (Target(**values) for values in result["targets"]):
        verdicts.add_row(
            target.claim,
            target.selector,
            f"{target.tt_over_tp:g}",
            str(target.batch),
            "not seen" if target.value is None else f"{target.value:.2f}",
            f"{'at least' if target.at_least else 'at most'} {target.bound:g}",
            {True: "[green]met[/]", False: "[red]missed[/]", None: "-"}[target.met],
        )
    for row in rows:
        if row["scheme"] in ("selective", "full"):
            over = ratio_of(row["ttst_s"], row["ideal_ttst_s"])
            verdicts.add_row(
                f"TTST, {row['scheme']} / computation only",
                row["selector"],
                f"{row['tt_over_tp']:g}",
                str(row["batch"]),
                "not seen" if over is None else f"{over:.2f}",
                "",
                "-",
            )
    output.print(verdicts)
    for wrong in result["differing"]:
        output.print(f"[red]tokens differ[/]: {wrong}")
    if not result["differing"]:
        output.print("tokens are the same for every scheme")


def group_of(row: Row) -> tuple[str, float, int]:
    return row["selector"], row["tt_over_tp"], row["batch"]


def groups(rows: Sequence[Row]) -> list[tuple[str, float, int]]:
    """What rows have in common that differ by scheme."""
    return list(dict.fromkeys(map(group_of, rows)))


def _show_group(rows: Sequence[Row], output: Console) -> None:
    selector, ratio, batch = group_of(rows[0])
    table = Table(
        title=f"{selector}, Tt/Tp {ratio:g} ({rows[0]['link_gbps']:.3f} Gbit/s), batch {batch}, "
        f"{rows[0]['prompt_tokens']} tokens of which {rows[0]['cached_tokens']:.0f} cached",
        title_justify="left",
    )
    table.add_column("scheme", no_wrap=True)
    for name in ("TTFT s", "TTST s", "to 2nd s", "TBT ms", "later ms", "fetched"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("metadata MB", "push MB", "fetch MB", "spec. MB", "link"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        after, use = row["tbt_after_delivery_s"], row["link_use"]
        table.add_row(
            row["scheme"],
            f"{row['ttft_s']:.3f}",
            f"{row['ttst_s']:.3f} ({row['ttst_min_s']:.3f}-{row['ttst_max_s']:.3f})",
            f"{row['second_token_s']:.3f}",
            f"{row['tbt_s'] * 1e3:.1f} ({row['tbt_min_s'] * 1e3:.1f}-{row['tbt_max_s'] * 1e3:.1f})",
            "-" if after is None else f"{after * 1e3:.1f}",
            f"{row['on_demand_ratio']:.2f}",
            *(f"{row[f'{path}_bytes'] / 1e6:.1f}" for path in ("metadata", "proactive", "on_demand", "speculative")),
            "-" if use is None else f"{use:.0%}",
        )
    ideal = rows[0]
    table.add_row(
        "ideal",
        f"{ideal['ideal_ttft_s']:.3f}",
        f"{ideal['ideal_ttst_s']:.3f}",
        f"{ideal['ideal_second_token_s']:.3f}",
        f"{ideal['ideal_tbt_s'] * 1e3:.1f}",
        style="dim",
    )
    output.print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """CTL curves and TTST bars, a row of panels for each selector, link and batch."""
    panels = []
    rows: list[Row] = result["results"]
    for selector, ratio, batch in groups(rows):
        group = [r for r in rows if group_of(r) == (selector, ratio, batch)]
        where = f"{selector}, Tt/Tp {ratio:g}, batch {batch}"
        panels += [ctl_panel(group, where), ttst_panel(group, where)]
    draw(path, f"Hand-over of {rows[0]['prompt_tokens']:,} tokens by scheme", panels)


def ctl_panel(rows: Sequence[Row], where: str) -> Panel:
    curves = {row["scheme"]: row["ctl_s"] for row in rows} | {"ideal": rows[0]["ideal_ctl_s"]}
    lines = {name: (range(1, len(curve) + 1), curve) for name, curve in curves.items()}
    return Panel(f"CTL: {where}", "token", "time of token i / i, s", lines)


def ttst_panel(rows: Sequence[Row], where: str) -> Panel:
    labels = [row["scheme"] for row in rows] + ["ideal"]
    bars = {
        "TTST": [*(row["ttst_s"] for row in rows), rows[0]["ideal_ttst_s"]],
        "to second token": [*(row["second_token_s"] for row in rows), rows[0]["ideal_second_token_s"]],
    }
    return Panel(f"second token: {where}", "", "s", bars=bars, labels=labels)
