"""In which order the KV blocks of a prompt are worth sending: pure functions to block ids.

Block m of layer l, of M blocks a layer, has id l * M + m: ids ascend in the order of memory addresses, since the KV
pool lies layer by layer and a prompt's tokens lie in order.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from narrows.kv.blocks import block_edges
from narrows.kv.layout import DENSE_LAYERS
from narrows.profile.importance import FloatArray, IntArray

Order = Literal["profile", "sequential", "random", "streaming"]
SINK_BLOCKS = 4  # at one token a block these are the four tokens that StreamingLLM keeps (section 3.2 there)


def order_blocks(
    kind: Order,
    importance: FloatArray | None,  # [L, M], for "profile" only
    num_layers: int,
    num_blocks: int,
    seed: int = 0,  # for "random" only
) -> IntArray:
    """Ids [L * M] of all blocks, the most urgent first. The first two layers come first in every order.

    profile     by importance, equal ones in order of addresses (SmartGen, section 4.1). With the importance of the
                very prompt this is the order `oracle`.
    sequential  by address, so layer by layer: what the paper's partial transfer pushes, "the first sequential Kr KV
                blocks (i.e., in memory address order)" (section 5.1).
    random      a permutation that depends on `seed` alone.
    streaming   the prompt's first blocks of every layer, then the most recent ones, of all layers alike: what the
                static selection of StreamingLLM would keep.
    """
    ids = np.arange(num_layers * num_blocks, dtype=np.int64)
    first, rest = np.split(ids, [min(DENSE_LAYERS, num_layers) * num_blocks])
    if kind == "profile":
        assert importance is not None and importance.shape == (num_layers, num_blocks)
        rest = rest[np.argsort(-importance.reshape(-1)[len(first) :], kind="stable")]
    elif kind == "random":
        rest = np.random.default_rng(seed).permutation(rest)
    elif kind == "streaming":
        sinks = min(SINK_BLOCKS, num_blocks)
        columns = np.concatenate([np.arange(sinks), np.arange(num_blocks - 1, sinks - 1, -1)])
        rest = rest.reshape(-1, num_blocks)[:, columns].T.reshape(-1)
    else:
        assert kind == "sequential", kind
    return np.concatenate([first, rest])


def on_demand_ratio(
    counts: npt.NDArray[np.integer],  # [L, n]: how often decode selected each of a prompt's tokens
    order: IntArray,  # [L * M], from order_blocks
    num_pushed: int,  # of its blocks, the first
) -> float:
    """Entries selected that were not pushed / entries selected, the first two layers excluded; 0 if there are none.

    As a static figure: every selection of an absent entry counts, though a real hand-over keeps what it has fetched.
    """
    num_layers, num_tokens = counts.shape
    num_blocks = len(order) // num_layers
    remote = np.ones(num_layers * num_blocks, dtype=np.bool_)
    remote[order[:num_pushed]] = False
    per_block = np.add.reduceat(counts, block_edges(num_tokens, num_blocks)[:-1], axis=1)[DENSE_LAYERS:]
    fetched = per_block[remote.reshape(num_layers, num_blocks)[DENSE_LAYERS:]].sum()
    return float(fetched / max(1, per_block.sum()))
