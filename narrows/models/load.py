"""From a name or path to a model that can run."""

from pathlib import Path

import torch

from narrows.errors import ModelError
from narrows.kernels.base import Kernels
from narrows.models.catalog import resolve
from narrows.models.gguf.cache import Progress
from narrows.models.layers.decoder import Model
from narrows.models.registry import BUILDERS
from narrows.models.spec import read_spec
from narrows.models.weights import open_weights

# What old checkpoints store though it is computed.
_COMPUTED = "rotary_emb.inv_freq"


def load_model(
    name_or_path: str | Path,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    max_positions: int | None = None,
    progress: Progress | None = None,
) -> Model:
    """Load a catalog name, a Hugging Face folder or a GGUF file (see catalog.resolve) for the given kernels.

    `max_positions` shortens the rope tables of a model that will be served with less than its full context. A wrong
    or incomplete folder raises ModelError naming what is wrong; so does a tensor that the architecture does not use,
    since leaving it out would change what the model says.
    """
    folder = resolve(name_or_path, progress=progress)
    spec = read_spec(folder)
    weights = open_weights(folder, dtype)
    positions = spec.max_positions if max_positions is None else min(max_positions, spec.max_positions)
    model = BUILDERS[spec.architecture](spec, weights, kernels, positions)
    for name in weights.leftovers():
        if not name.endswith(_COMPUTED) and not (spec.tied and name == "lm_head.weight"):
            raise ModelError(f"{folder}: tensor {name} is not part of {spec.architecture} as config.json describes it")
    return model
