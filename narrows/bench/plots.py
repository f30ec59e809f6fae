"""Pictures of benchmark results: panels of lines or bars, drawn without a display."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from narrows.errors import ConfigError

# One colour a scheme in all pictures, apart for colour-blind readers too (Okabe and Ito's palette).
COLOURS = {
    "full": "#D55E00",
    "partial": "#E69F00",
    "selective": "#0072B2",
    "auto": "#56B4E9",
    "profile": "#0072B2",
    "oracle": "#009E73",
    "optimal": "#009E73",
    "random": "#CC79A7",
    "streaming": "#B59F00",
    "sequential": "#999999",
    "ideal": "#000000",
}
_MORE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#B59F00")
_COLUMNS = 2


@dataclass(frozen=True, slots=True)
class Panel:
    """`lines`: name to (x, y) points. `bars`: name to a value for each of `labels`; None where there is none."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)
    bars: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    labels: Sequence[str] = ()
    from_zero: bool = True


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write a PNG, two panels a row. Raises ConfigError when it can not be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 0.5 + 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, panels, strict=False):
        _fill(axes, panel)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(title, fontsize=11)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise ConfigError(f"png: {path} can not be written: {error.strerror or error}; name another file") from error


def _fill(axes, panel: Panel) -> None:  # type: ignore[no-untyped-def]
    colours = colours_of([*panel.lines, *panel.bars])
    for name, (x, y) in panel.lines.items():
        style = {"linestyle": "--", "linewidth": 1.2} if name == "ideal" else {"linewidth": 1.8}
        marker = "o" if len(x) <= 8 else None
        axes.plot(x, y, label=name, color=colours[name], marker=marker, markersize=4, **style)
    width = 0.8 / max(1, len(panel.bars))
    for i, (name, values) in enumerate(panel.bars.items()):
        at = [place + (i + 0.5) * width - 0.4 for place in range(len(values))]
        shown = [0.0 if value is None else value for value in values]
        drawn = axes.bar(at, shown, width * 0.92, label=name, color=colours[name])
        texts = ["-" if value is None else f"{value:.3g}" for value in values]
        axes.bar_label(drawn, texts, fontsize=7, padding=1)
    if panel.bars:
        axes.set_xticks(range(len(panel.labels)), panel.labels)
        axes.margins(y=0.12)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(axis="y", color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(panel.lines) + len(panel.bars) > 1:
        axes.legend(fontsize=8, frameon=False)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Every name's colour: its own, else one that no other has, as long as there are some."""
    chosen = {name: COLOURS[name] for name in names if name in COLOURS}
    free = [colour for colour in _MORE if colour not in chosen.values()] or list(_MORE)
    others = [name for name in names if name not in chosen]
    return chosen | {name: free[i % len(free)] for i, name in enumerate(others)}
