"""The importance of a profile as a picture, drawn as SmartGen's figure 5."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from narrows.errors import ConfigError
from narrows.kv.layout import DENSE_LAYERS
from narrows.profile.importance import ImportanceProfile

_ROWS = 256  # of a panel: finer ones would be less than a pixel


def draw(profile: ImportanceProfile, path: Path, title: str) -> None:
    """Write a PNG: layers on x, position in the prompt on y, colour is how often an entry is selected; one panel a
    length group. The first two layers, which are always sent, are hatched. Raises ConfigError when it can not be
    written."""
    groups, num_layers = profile.groups, profile.num_layers
    figure = Figure(figsize=(1.6 + 2.9 * len(groups), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    most = max(float(np.max(group.matrix[DENSE_LAYERS:], initial=0.0)) for group in groups)
    image = None
    for axes, group in zip(panels, groups, strict=True):
        matrix = profile.importance_for(group.num_tokens, min(_ROWS, group.matrix.shape[1]))
        shown = np.ma.masked_invalid(matrix).T
        image = axes.imshow(
            shown,
            aspect="auto",
            interpolation="nearest",
            cmap="viridis",
            vmin=0.0,
            vmax=max(most, 1e-6),
            extent=(-0.5, num_layers - 0.5, group.num_tokens, 0),
        )
        axes.axvspan(-0.5, min(DENSE_LAYERS, num_layers) - 0.5, facecolor="0.9", edgecolor="0.6", hatch="///", lw=0)
        axes.set_title(f"{group.num_tokens:,} tokens", fontsize=10)
        axes.set_xlabel("layer")
    panels[0].set_ylabel("token position")
    assert image is not None
    figure.colorbar(image, ax=list(panels), label="selection frequency", fraction=0.05)
    figure.suptitle(title, fontsize=11)
    try:
        figure.savefig(path, format="png", dpi=130)
    except OSError as error:
        raise ConfigError(f"png: {path} can not be written: {error.strerror or error}; name another file") from error
