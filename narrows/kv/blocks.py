"""How a prompt is cut into KV blocks: M equal runs of its tokens in one layer, all KV heads (SmartGen, section 4.1)."""

import numpy as np
import numpy.typing as npt

NUM_BLOCKS = 1024  # a layer (the paper's 1K)
LEAST_TOKENS = 8  # of a block: smaller ones cost more frames and mask updates and order nothing better


def block_edges(num_tokens: int, num_blocks: int = NUM_BLOCKS) -> npt.NDArray[np.int64]:
    """Edges [M + 1] of M = min(num_blocks, num_tokens) blocks: block m holds tokens edges[m] to edges[m + 1] - 1.

    Their sizes differ by at most one token.
    """
    assert num_tokens >= 1 and num_blocks >= 1, (num_tokens, num_blocks)
    count = min(num_blocks, num_tokens)
    return np.arange(count + 1, dtype=np.int64) * num_tokens // count


def blocks_for(num_tokens: int, most: int = NUM_BLOCKS) -> int:
    """M of a prompt: `most`, fewer for a prompt that has less than LEAST_TOKENS for each."""
    return max(1, min(most, -(-num_tokens // LEAST_TOKENS)))
