"""The machine-readable contract of all benchmarks: name, config, rows, environment."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def environment() -> dict[str, Any]:
    """What a reader must know of the machine."""
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def document(name: str, config: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A result as it is written."""
    return {"name": name, "config": config, "results": list(rows), "environment": environment()}


def save(json_file: Path | None, result: dict[str, Any]) -> None:
    """Write a result, if a file is asked for."""
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=2) + "\n")


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table, numbers to three digits."""
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, justify="left" if isinstance(rows[0].get(name), str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in names))
    console = Console()
    Console(width=console.width if console.is_terminal else 140).print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
