"""Makes the calibration file of a selection algorithm by running the model on prompts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from narrows.errors import ConfigError
from narrows.kernels import load as load_kernels
from narrows.kernels.base import Kernels
from narrows.models.catalog import resolve
from narrows.models.fingerprint import folder_fingerprint
from narrows.models.layers.rope import rope_tables
from narrows.models.load import load_model
from narrows.profile.measuring.bounds import fit_bounds
from narrows.profile.measuring.hashes import fit_hash
from narrows.profile.measuring.partial_keys import fit_partial_keys
from narrows.profile.measuring.samples import SHORTEST, View, collect, views
from narrows.select.calibration import save
from narrows.select.registry import NEEDS_CALIBRATION

LONGEST = 1024  # tokens of a prompt that are used
MOST = 2048  # of all prompts together
NUM_ROWS = 128  # queries of a prompt
NUM_VIEWS = 3  # of each prompt, at other positions of the context
FARTHEST = 32768  # positions that calibration covers, where the model has more

Fit = Callable[[Sequence[View], float], dict[str, Tensor]]
FITS: dict[str, Fit] = {"infinigen": fit_partial_keys, "hata": fit_hash, "quest": fit_bounds}


def calibrate(
    name: str,
    model: str | Path,
    prompts: Sequence[Sequence[int]],
    out: Path,
    progress: Callable[[int, int], object] = lambda done, of: None,  # noqa: ARG005
    *,
    kernels: Kernels | None = None,
) -> None:
    """Write the calibration file of algorithm `name` for a model (a name or folder; see models.catalog).

    Prompts are token ids; the first MOST tokens are used, in pieces of LONGEST. `progress` hears (done, of all), in
    layers run and layers fitted. Raises ConfigError where the algorithm needs none or the prompts are too short.
    """
    if name not in NEEDS_CALIBRATION:
        raise ConfigError(f"select: {name} needs no calibration; {', '.join(sorted(NEEDS_CALIBRATION))} do")
    used = pieces(prompts)
    if sum(map(len, used)) < 2 * SHORTEST:
        raise ConfigError(f"prompts: too short to calibrate with; give at least {2 * SHORTEST} tokens in one prompt")
    folder = resolve(model)
    kernels = kernels or load_kernels()
    loaded = load_model(folder, torch.bfloat16, kernels)
    spec = loaded.spec
    total = (len(used) + 1) * spec.num_layers

    def tell(done: int, _of: int = 0) -> None:
        progress(done, total)

    samples = collect(loaded, kernels, used, num_rows=NUM_ROWS, foresight=False, progress=tell)
    rope = rope_tables(spec.rope, spec.head_dim, min(spec.max_positions, FARTHEST))
    layers = []
    with one_thread():
        for layer in range(spec.num_layers):
            layers.append(FITS[name](views(samples, layer, rope, NUM_VIEWS), spec.head_dim**-0.5))
            tell(total - spec.num_layers + layer + 1)
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread: its others would wait for each other longer than such small matrices take, the more so
    where other processes use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
