"""Makes the calibration file of a selection algorithm by running the model on prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from narrows.errors import ConfigError
from narrows.kernels import load as load_kernels
from narrows.kernels.base import Kernels
from narrows.models.catalog import resolve
from narrows.models.fingerprint import folder_fingerprint
from narrows.models.load import load_model
from narrows.profile.measuring.bounds import fit_bounds
from narrows.profile.measuring.hashes import fit_hash
from narrows.profile.measuring.partial_keys import fit_partial_keys
from narrows.profile.measuring.samples import SHORTEST, Sample, collect
from narrows.select.calibration import save
from narrows.select.registry import NEEDS_CALIBRATION

LONGEST = 2048  # tokens of a prompt that are used
MOST = 4096  # of all prompts together
NUM_ROWS = 128  # queries of a prompt
SKIPPED = 4  # first keys of a prompt, attention sinks: unlike all others, they would bend what is fitted

Fit = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
FITS: dict[str, Fit] = {"infinigen": fit_partial_keys, "hata": fit_hash, "quest": fit_bounds}


def calibrate(
    name: str,
    model: str | Path,
    prompts: Sequence[Sequence[int]],
    out: Path,
    progress: Callable[[int, int], None] = lambda done, of: None,
    *,
    kernels: Kernels | None = None,
) -> None:
    """Write the calibration file of algorithm `name` for a model (a name or folder; see models.catalog).

    Prompts are token ids; the first MOST tokens are used, in pieces of LONGEST. `progress` hears (done, of all).
    Raises ConfigError where the algorithm needs none or the prompts are too short.
    """
    if name not in NEEDS_CALIBRATION:
        raise ConfigError(f"select: {name} needs no calibration; {', '.join(sorted(NEEDS_CALIBRATION))} do")
    used = pieces(prompts)
    if sum(map(len, used)) < 2 * SHORTEST:
        raise ConfigError(f"prompts: too short to calibrate with; give at least {2 * SHORTEST} tokens in one prompt")
    folder = resolve(model)
    kernels = kernels or load_kernels()
    loaded = load_model(folder, torch.bfloat16, kernels)
    num_layers = loaded.spec.num_layers
    samples = collect(
        loaded, kernels, used, num_rows=NUM_ROWS, progress=lambda done, of: progress(done, of + num_layers)
    )
    total = (len(samples) + 1) * num_layers
    layers = []
    for layer in range(num_layers):
        layers.append(fit_layer(FITS[name], samples, layer, loaded.spec.head_dim**-0.5))
        progress(total - num_layers + layer + 1, total)
    arrays = {key: torch.stack([part[key] for part in layers]).contiguous() for key in layers[0]}
    save(out, name, folder_fingerprint(folder), arrays)


def pieces(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """At most MOST tokens of the prompts, in pieces of at most LONGEST and at least SHORTEST."""
    found: list[list[int]] = []
    left = MOST
    for prompt in prompts:
        for start in range(0, len(prompt), LONGEST):
            piece = list(prompt[start : start + min(LONGEST, left)])
            if len(piece) >= SHORTEST:
                found.append(piece)
                left -= len(piece)
    return found


@torch.inference_mode()
def fit_layer(fit: Fit, samples: Sequence[Sample], layer: int, scale: float) -> dict[str, Tensor]:
    """The arrays of one layer, KV heads first."""
    num_kv_heads = samples[0].layers[layer].key.shape[1]
    heads = []
    for head in range(num_kv_heads):
        queries, keys, attention = [], [], []
        for sample in samples:
            part = sample.layers[layer]
            query = part.query.float().unflatten(1, (num_kv_heads, -1))[:, head]  # [S, G, D]
            key = part.key[:, head].float()
            scores = torch.einsum("sgd,td->sgt", query, key) * scale
            scores.masked_fill_((torch.arange(len(key)) > sample.positions[:, None])[:, None], float("-inf"))
            queries.append(query.flatten(0, 1))
            keys.append(key[SKIPPED:])
            attention.append(scores.softmax(-1).sum((0, 1))[SKIPPED:])
        heads.append(fit(torch.cat(queries), torch.cat(keys), torch.cat(attention)))
    return {key: torch.stack([head[key] for head in heads]) for key in heads[0]}
