"""`narrows simulate`: a scenario in, a table, JSON, pictures and a timeline out."""

import json
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from narrows.bench.results import document
from narrows.bench.results import show as show_rows
from narrows.core.ids import InstanceId
from narrows.core.trace import Span
from narrows.errors import ConfigError
from narrows.metrics.trace import write_chrome_trace
from narrows.sched.decide import COMPILED_FROM
from narrows.sim.cluster_file import PARTS, Scenario, make_scenario, read_scenario
from narrows.sim.names import nearest
from narrows.sim.report import grid_of, row_of, waiting
from narrows.sim.run import Listeners, Outcome, simulate
from narrows.sim.setup import make_setup

COLUMNS = 600  # of a picture over time
NAME = "simulate"
FILES = (("workload", "trace"), ("costs", "file"))  # settings that name a file
SHOWN = (
    *("policy", "ttft_mean_s", "ttst_mean_ms", "tpot_mean_ms", "tpot_p99_ms", "slo_attainment", "tokens_per_s"),
    *("batch_cv", "kv_cv", "attention_us", "moe_us", "cp_us", "spread_requests", "preemptions", "max_queue"),
)

Row = dict[str, Any]


def read(file: Path | None, given: Mapping[str, Any], settings: Sequence[str]) -> tuple[Scenario, list[str]]:
    """The scenario of a TOML file, or of the JSON that an earlier run wrote, with `given` ("table.key" to value) and
    `settings` (texts "table.key=value") on top; and the policies to run it under. Raises ConfigError."""
    policies: list[str] = []
    if file is None:
        scenario = Scenario()
    elif file.suffix == ".json":
        scenario, policies = _read_json(file)
    else:
        scenario = read_scenario(file)
    changes: dict[str, dict[str, Any]] = defaultdict(dict)
    for place, value in [*given.items(), *map(_setting, settings)]:
        table, _, key = place.partition(".")
        if table not in PARTS:
            raise ConfigError(f"{table}: unknown table{nearest(table, PARTS)}")
        known = PARTS[table].__dataclass_fields__
        if key not in known:
            raise ConfigError(f"{place}: unknown setting{nearest(key, known)}")
        changes[table][key] = str(Path(value).resolve()) if (table, key) in FILES and value is not None else value
    if "name" in changes["policy"]:
        policies = [name.strip() for name in str(changes["policy"].pop("name")).split(",")]
    if {"trace", "mix"} & set(changes["workload"]):  # the one that is given stands for both
        changes["workload"] = {"trace": None, "mix": None} | changes["workload"]
    parts = {table: replace(getattr(scenario, table), **values) for table, values in changes.items() if values}
    scenario = replace(scenario, **parts)
    policies = policies or [scenario.policy.name]
    return replace(scenario, policy=replace(scenario.policy, name=policies[0])), policies


def _setting(text: str) -> tuple[str, Any]:
    place, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"set: {text!r} has no value; write it like cluster.nodes=4")
    try:
        return place.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return place.strip(), value.strip()


def _read_json(file: Path) -> tuple[Scenario, list[str]]:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"scenario: {file} can not be read: {error.strerror or error}; name a file that exists"
        ) from None
    except ValueError as error:
        raise ConfigError(f"scenario: {file} is not JSON: {error}") from None
    if not isinstance(said, dict) or said.get("name") != NAME or not isinstance(said.get("config"), dict):
        raise ConfigError(f"scenario: {file} is no result of narrows simulate; give one, or a TOML file")
    config = said["config"]
    for field in ("scenario", "policies"):
        if field not in config:
            raise ConfigError(f"{file}: config.{field}: missing; give a file as narrows simulate wrote it")
    try:
        return make_scenario(config["scenario"]), [str(name) for name in config["policies"]]
    except ConfigError as error:
        raise ConfigError(f"{file}: config.scenario: {error}") from None


def config_of(scenario: Scenario, policies: Sequence[str]) -> dict[str, Any]:
    """All settings, so that a run can be repeated from anywhere: files by their whole path."""
    tables = {table: {k: v for k, v in asdict(getattr(scenario, table)).items() if v is not None} for table in PARTS}
    for table, key in FILES:
        if key in tables[table]:
            folder = Path() if scenario.path is None else scenario.path.parent
            tables[table][key] = str((folder / tables[table][key]).resolve())
    return {"scenario": tables, "policies": list(policies)}


def run(
    scenario: Scenario, policies: Sequence[str], *, png: Path | None = None, trace: Path | None = None
) -> dict[str, Any]:
    """Simulate under each policy and return the result document. With several policies pictures and timelines are one
    a policy, named after it. Raises ConfigError, for what is wrong with a policy's name before anything is run."""
    rows: list[Row] = []
    requests = scenario.trace()
    setups = [make_setup(replace(scenario, policy=replace(scenario.policy, name=name)), requests) for name in policies]
    if len(requests) >= COMPILED_FROM:
        from narrows.sched import compiled  # numba is slow to import

        compiled.prepare(lambda text: Console(stderr=True).print(text, style="dim"))
    for policy, setup in zip(policies, setups, strict=True):
        spans: dict[InstanceId, list[Span]] = defaultdict(list)
        began_s = time.perf_counter()
        collect = None if trace is None else partial(_collect, spans)
        with _progress(policy, len(requests)) as progress:
            outcome = simulate(setup, Listeners(progress=progress, trace=collect))
        rows.append(row_of(outcome, policy, scenario.decode.tpot_slo_ms) | {"wall_s": time.perf_counter() - began_s})
        if png is not None:
            plot(outcome, _of(png, policy, policies), policy, scenario.decode.tpot_slo_ms)
        if trace is not None:
            write_chrome_trace(_of(trace, policy, policies), spans)
    return document(NAME, config_of(scenario, policies), rows)


def _collect(spans: dict[InstanceId, list[Span]], name: InstanceId, span: Span) -> None:
    spans[name].append(span)


def _of(file: Path, policy: str, policies: Sequence[str]) -> Path:
    return file if len(policies) == 1 else file.with_stem(f"{file.stem}-{policy.replace(':', '')}")


@contextmanager
def _progress(what: str, total: int) -> Iterator[Any]:
    """A bar where a person watches, else one line."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn(f"simulating {what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_interactive)
    if not console.is_interactive:
        console.print(f"simulating {what}: {total} requests ...", style="dim", soft_wrap=True)
    task = bar.add_task("", total=total)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show(result: dict[str, Any]) -> None:
    """Print the rows: each figure a line where there are few policies."""
    rows: list[Row] = result["results"]
    said = result["config"]["scenario"]
    title = (
        f"{said['model']['name']} on {said['cluster']['nodes']} x {said['cluster']['instances_per_node']} "
        f"{said['hardware']['name']}, {rows[0]['requests']} requests"
    )
    show_rows(title, [{"figure": name} | {row["policy"]: _text(row[name]) for row in rows} for name in SHOWN[1:]])


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def plot(outcome: Outcome, path: Path, title: str, slo_tpot_ms: float) -> None:
    """TPOT and TTFT by arrival, the queue, and batch and KV of each decode instance over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 11), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, 2)
    requests = outcome.metrics()
    tpots = [(m.arrival_s, m.tpot_s * 1e3) for m in requests if m.tpot_s is not None]
    ttfts = [(m.arrival_s, m.ttft_s) for m in requests if m.ttft_s is not None]
    for axes, points, label in ((grid[0, 0], tpots, "TPOT, ms"), (grid[0, 1], ttfts, "TTFT, s")):
        if points:
            axes.plot(*zip(*points, strict=True), ".", markersize=3, color="#0072B2")
        axes.set(xlabel="arrival, s", ylabel=label, title=f"{label.split(',')[0]} by arrival")
        axes.set_ylim(bottom=0)
    grid[0, 0].axhline(slo_tpot_ms, color="#D55E00", linewidth=1, linestyle="--", label=f"SLO {slo_tpot_ms:g} ms")
    grid[0, 0].set_ylim(top=max(grid[0, 0].get_ylim()[1], 1.05 * slo_tpot_ms))  # setting the bottom fixed the top
    grid[0, 0].legend(fontsize=8, frameon=False)
    queue = waiting(outcome)
    if queue:
        grid[1, 0].step(*zip(*queue, strict=True), where="post", color="#0072B2", linewidth=1)
    grid[1, 0].set(xlabel="time, s", ylabel="requests", title="waiting, for prefill or room at decode")
    values = grid_of(outcome, COLUMNS)
    for name, array, axes in (("batch", values.batch, grid[2, 0]), ("KV, tokens", values.kv_tokens, grid[2, 1])):
        extent = (0, values.end_s, len(values.names) - 0.5, -0.5)
        image = axes.imshow(array, aspect="auto", interpolation="nearest", cmap="viridis", extent=extent)
        figure.colorbar(image, ax=axes)
        axes.set(xlabel="time, s", ylabel="decode instance", title=f"{name} of each instance")
    middle = grid[1, 1]
    times = [(i + 0.5) / COLUMNS * values.end_s for i in range(COLUMNS)]
    for label, part, colour in (
        ("most", values.kv_tokens.max(axis=0), "#D55E00"),
        ("mean", values.kv_tokens.mean(axis=0), "#0072B2"),
    ):
        middle.plot(times, part, label=label, color=colour, linewidth=1)
    middle.set(xlabel="time, s", ylabel="tokens", title="KV of the fullest instance and on average")
    middle.legend(fontsize=8, frameon=False)
    for axes in grid[:2].flat:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize=11)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise ConfigError(f"png: {path} can not be written: {error.strerror or error}; name another file") from error
