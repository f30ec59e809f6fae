"""`narrows simulate --paper`: a paper's tasks in processes of their own, then its numbers beside ours."""

import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from narrows.bench.results import document
from narrows.sim import calibration
from narrows.sim.paper.claims import Claim, Paper, Score, score

PAPERS = ("nanocp", "smartgen")


def paper_named(name: str, *, quick: bool = False) -> Paper:
    from narrows.sim.paper import nanocp, smartgen

    return {"nanocp": nanocp.paper, "smartgen": smartgen.paper}[name](quick)


def run(name: str, *, quick: bool = False, processes: int | None = None) -> tuple[dict[str, Any], list[Claim]]:
    """All claims and the result document; as many processes as cores unless told."""
    paper = paper_named(name, quick=quick)
    claims = list(paper.claims(_work(name, paper, processes or os.cpu_count() or 1)))
    constants = {
        key: {"value": c.value, "unit": c.unit, "source": c.source, "claims": list(c.claims)}
        for key, c in calibration.ALL.items()
    }
    config = {"paper": name, "quick": quick} | paper.config | {"constants": constants}
    return document("simulate --paper", config, [claim.row() for claim in claims]), claims


def _work(name: str, paper: Paper, processes: int) -> dict[str, Any]:
    """Results by the name of the task, the longest begun first."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn(f"simulating {name}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_interactive)
    if not console.is_interactive:
        console.print(f"simulating {name}: {len(paper.tasks)} tasks ...", style="dim", soft_wrap=True)
    total = bar.add_task("", total=sum(task.weight for task in paper.tasks))
    tasks = sorted(paper.tasks, key=lambda task: -task.weight)
    found: dict[str, Any] = {}
    with bar:
        if processes == 1:
            for task in tasks:
                found[task.name] = task.run(*task.arguments)
                bar.update(total, advance=task.weight, description=task.name)
            return found
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(task.run, *task.arguments): task for task in tasks}
            for future in as_completed(futures):
                task = futures[future]
                found[task.name] = future.result()
                bar.update(total, advance=task.weight, description=task.name)
    return found


def show(name: str, claims: list[Claim]) -> None:
    """Print the claims and how many are right."""
    table = Table(title=f"{name}: published numbers and ours", title_justify="left")
    for heading in ("claim", "where", "paper", "ours", ""):
        table.add_column(heading, justify="right" if heading in ("paper", "ours") else "left", overflow="fold")
    for claim in claims:
        mark = "calibrated" if claim.used_for_calibration else "" if claim.is_right else "off"
        table.add_row(claim.claim, claim.where, _text(claim, claim.paper), _text(claim, claim.ours), mark)
    console = Console()
    console = Console(width=console.width if console.is_terminal else 160)
    console.print(table)
    console.print(summary(score(claims)), highlight=False)


def _text(claim: Claim, value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.4g} {claim.unit}"


def summary(found: Score) -> str:
    (orders, all_orders), (ratios, all_ratios), (others, all_others) = found.orderings, found.ratios, found.others
    return (
        f"orderings right: {orders} of {all_orders}; ratios within 20 %: {ratios} of {all_ratios}; other numbers "
        f"within 20 %: {others} of {all_others} (those used for calibration are left out)"
    )
