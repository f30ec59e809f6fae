"""Which KV blocks matter: the importance matrix I of SmartGen's equation 1, one per group of prompt lengths.

Legend: L layers, n tokens of a prompt, M KV blocks a layer. A KV block is a run of a prompt's tokens in one layer, all
KV heads. I[l, m] is how often the KV entries of block m in layer l are selected by a decode step, the mean over
entries, steps and calibration prompts: a frequency, 0 to 1, which orders blocks as the paper's count does and does not
depend on how many steps were measured. The first two layers are inf: always needed, always sent (section 4.1).
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from narrows.errors import ConfigError
from narrows.kv.blocks import NUM_BLOCKS, block_edges
from narrows.kv.layout import DENSE_LAYERS
from narrows.profile import file

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

KIND, VERSION = "importance", 1


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """I of prompts of about `num_tokens` tokens."""

    num_tokens: int
    matrix: FloatArray  # [L, M], M at most num_tokens; inf in the first two layers

    @classmethod
    def from_counts(
        cls,
        counts: npt.NDArray[np.integer] | npt.NDArray[np.floating],  # [L, n]
        num_queries: int,
        num_blocks: int = NUM_BLOCKS,
    ) -> "Group":
        """I from how often each token was selected: counts[l, p] over `num_queries` rows (of KV heads, steps, prompts).

        With the counts of one prompt, this is the order that knows the future of that prompt (`oracle`).
        """
        assert counts.ndim == 2 and num_queries >= 1
        edges = block_edges(counts.shape[1], num_blocks)
        matrix = np.add.reduceat(counts.astype(np.float64), edges[:-1], axis=1) / (np.diff(edges) * num_queries)
        matrix[:DENSE_LAYERS] = np.inf
        return cls(counts.shape[1], matrix.astype(np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class ImportanceProfile:
    """Importance for one model and one selector, given by their fingerprints. A value: a new profile replaces an old
    one by changing who points to it (read-copy-update)."""

    model: str
    selector: str
    version: int  # of the file's format
    groups: tuple[Group, ...]  # at least one, ascending by num_tokens, all of the same L

    def __post_init__(self) -> None:
        lengths = [group.num_tokens for group in self.groups]
        assert lengths and lengths == sorted(set(lengths)), lengths
        assert len({len(group.matrix) for group in self.groups}) == 1

    @property
    def num_layers(self) -> int:
        return len(self.groups[0].matrix)

    def match(self, num_tokens: int) -> Group:
        """The most similar group: nearest in the logarithm of the length; the shorter of two that are equally near."""
        return min(self.groups, key=lambda group: abs(math.log(num_tokens / group.num_tokens)))

    def importance_for(self, num_tokens: int, num_blocks: int) -> FloatArray:
        """I [L, num_blocks] of a prompt of `num_tokens` that is cut into `num_blocks`, from the most similar group.

        A block takes the mean of the columns that lie at the same relative position, by how much of each it covers.
        """
        matrix = self.match(num_tokens).matrix
        if matrix.shape[1] == num_blocks:
            return matrix
        columns = matrix.shape[1]
        finite = np.isfinite(matrix[:, 0])  # of a layer all or none
        below = np.zeros((len(matrix), columns + 1))  # integral of I from the start to each column
        np.cumsum(np.where(finite[:, None], matrix, 0.0), axis=1, dtype=np.float64, out=below[:, 1:])
        # An edge between columns takes part of one: the integral is linear there.
        at = np.arange(num_blocks + 1) * columns / num_blocks
        left = np.minimum(at.astype(np.int64), columns - 1)
        integral = below[:, left] + (below[:, left + 1] - below[:, left]) * (at - left)
        result: FloatArray = (np.diff(integral, axis=1) * (num_blocks / columns)).astype(np.float32)
        result[~finite] = np.inf
        return result

    def save(self, path: Path) -> None:
        """Write one file, replacing an old one by rename. Raises ConfigError when it can not be written."""
        header = {
            "model": self.model,
            "selector": self.selector,
            "num_tokens": [group.num_tokens for group in self.groups],
        }
        arrays = {f"importance.{group.num_tokens}": group.matrix for group in self.groups}
        file.write(path, KIND, self.version, header, arrays)

    @classmethod
    def load(cls, path: Path, *, model: str | None, selector: str | None) -> "ImportanceProfile":
        """Read a file for the model and selector with these fingerprints (None: whichever it is for).

        Raises ConfigError when the file is for others, damaged, truncated or of another version.
        """
        header, arrays = file.read(path, KIND, VERSION)
        for name, wanted in (("model", model), ("selector", selector)):
            if wanted is not None and header[name] != wanted:
                raise ConfigError(
                    f"profile: {path} was made with another {name} ({header[name]}, now {wanted}); "
                    f"use the {name} it was made with, or make it anew with: narrows profile {KIND}"
                )
        groups = tuple(Group(n, arrays[f"importance.{n}"]) for n in header["num_tokens"])
        return cls(header["model"], header["selector"], VERSION, groups)
