"""What the figures share: options, the paper's links, the table of claims."""

import argparse
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from narrows.bench.figures import Row, ratio_of
from narrows.bench.handover import Plan, run, schemes_named
from narrows.bench.plots import Panel, draw
from narrows.bench.results import document, save
from narrows.bench.testbed import Workload
from narrows.config import EngineConfig
from narrows.errors import NarrowsError

WORST = 6.5  # Tt/Tp
# The paper's links of 15, 25 and 32 Gbps: its section 3.1 gives Tt/Tp of up to 7.1 and 4.7 for the first two; the third
# follows from its bandwidth.
TT_OVER_TP = {15: 7.1, 25: 4.7, 32: 4.7 * 25 / 32}


@dataclass(frozen=True, slots=True)
class Options:
    """How a figure is made. `quick`: small enough to see that it works, its numbers mean little."""

    config: EngineConfig
    workload: Workload
    selector: str
    quick: bool
    json_file: Path | None
    png: Path | None

    def rows(
        self,
        schemes: Sequence[Any],
        *,
        tt_over_tp: Sequence[float] = (WORST,),
        batches: Sequence[int] = (1,),
        selectors: Sequence[str] = (),
        link_gbps: Sequence[float] = (),
        oracles: Sequence[str] = ("oracle", "optimal"),
        workload: Workload | None = None,
        **settings: Any,
    ) -> list[Row]:
        """Measured rows; schemes by name or as they are."""
        named = tuple(schemes_named([s])[0] if isinstance(s, str) else s for s in schemes)
        plan = Plan(
            named,
            tuple(selectors or (self.selector,)),
            tuple(tt_over_tp),
            tuple(batches),
            tuple(link_gbps),
            tuple(oracles),
        )
        result = run(replace(self.config, **settings), plan, workload or self.workload)
        for wrong in result["differing"]:
            raise NarrowsError(f"tokens differ, which must never be: {wrong}")
        return result["results"]


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement of the paper's text and what is measured here; `paper` as it is written there."""

    text: str
    paper: str
    ours: float | None
    unit: str = "x"


def main(figure: str, about: str, make: Callable[[Options], tuple[list[Row], list[Claim], list[Panel]]]) -> None:
    """Run one figure as a program."""
    options = parse(about)
    try:
        rows, claims, panels = make(options)
    except NarrowsError as error:
        raise SystemExit(f"{figure}: {error}") from error
    show(f"{figure}: {about}", claims)
    config = {"quick": options.quick, "selector": options.selector, "model": options.config.model}
    result = document(figure, config, rows)
    result["claims"] = [{"claim": c.text, "paper": c.paper, "ours": c.ours, "unit": c.unit} for c in claims]
    save(options.json_file, result)
    if options.png is not None:
        draw(options.png, f"{figure}: {about}", panels)


def parse(about: str) -> Options:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="short prompts, one round: to see that it works")
    parser.add_argument("--rounds", type=int, help="interleaved repetitions (default: 3; 1 with --quick)")
    parser.add_argument("--prompt-tokens", type=int, help="default: 8000; 512 with --quick")
    parser.add_argument("--output-tokens", type=int, help="default: 64; 8 with --quick")
    parser.add_argument("--selector", default="infinigen")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, dest="json_file")
    parser.add_argument("--png", type=Path)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    workload = Workload(512, 8, rounds=1, follow_tokens=32) if given.quick else Workload()
    wanted = {name: getattr(given, name) for name in ("rounds", "prompt_tokens", "output_tokens")}
    workload = replace(workload, **{name: value for name, value in wanted.items() if value is not None})
    config = EngineConfig(model=given.model, threads=given.threads)
    return Options(config, workload, given.selector, given.quick, given.json_file, given.png)


def show(title: str, claims: Iterable[Claim]) -> None:
    output = Console(highlight=False)
    output = output if output.is_terminal else Console(width=140, highlight=False)
    table = Table(title=title, title_justify="left")
    for name in ("what", "paper", "measured"):
        table.add_column(name)
    for claim in claims:
        table.add_row(claim.text, claim.paper, "-" if claim.ours is None else f"{claim.ours:.3g} {claim.unit}".strip())
    output.print(table)


def pick(rows: Iterable[Row], **wanted: Any) -> Row:
    """The one row with these values."""
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return row


def over(rows: Sequence[Row], figure: str, above: str, below: str, **wanted: Any) -> float | None:
    """Figure of scheme `above` / the same of scheme `below`."""
    return ratio_of(pick(rows, scheme=above, **wanted)[figure], pick(rows, scheme=below, **wanted)[figure])


def growth(rows: Sequence[Row], figure: str, scheme: str, axis: str, first: Any, last: Any) -> float | None:
    """How often a figure of a scheme is larger at the end of an axis than at its start."""
    return ratio_of(
        pick(rows, scheme=scheme, **{axis: last})[figure], pick(rows, scheme=scheme, **{axis: first})[figure]
    )


def curves(
    rows: Sequence[Row], figure: str, axis: str, title: str, x_label: str, y_label: str, scale: float = 1.0
) -> Panel:
    """A figure of each scheme over an axis."""
    lines = {
        scheme: (
            [r[axis] for r in rows if r["scheme"] == scheme],
            [r[figure] * scale for r in rows if r["scheme"] == scheme],
        )
        for scheme in dict.fromkeys(row["scheme"] for row in rows)
    }
    return Panel(title, x_label, y_label, lines)


def bars(
    rows: Sequence[Row], figure: str, title: str, y_label: str, labels: dict[Any, str], axis: str, scale: float = 1.0
) -> Panel:
    """A figure of each scheme at each of an axis' values."""
    values = {
        scheme: [pick(rows, scheme=scheme, **{axis: value})[figure] * scale for value in labels]
        for scheme in dict.fromkeys(row["scheme"] for row in rows)
    }
    return Panel(title, "", y_label, bars=values, labels=list(labels.values()))


def by_token(rows: Sequence[Row], figure: str, title: str, y_label: str, first: int, scale: float = 1.0) -> Panel:
    """A list of each row over the number of the token, which begins at `first`."""
    lines = {
        row["scheme"]: (range(first, first + len(row[figure])), [value * scale for value in row[figure]])
        for row in rows
    }
    return Panel(title, "token", y_label, lines)
