"""One hand-over at the side that sends: which KV is ready, sent, fetched; and what goes next. Integers only.

Every KV block is sent at most once by a push, proactive or speculative, most important first among those whose tokens
are computed. Entries that decode fetched are remembered, so that a push leaves them out.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from narrows.kv.layout import DENSE_LAYERS
from narrows.transfer.plan import Ints, spread

_NONE = np.empty(0, np.int64)


class Delivery:
    """`order` lists all blocks, the most important first. Until `push` says how many, none is to be pushed."""

    def __init__(self, num_layers: int, num_kv_heads: int, edges: Ints, order: Ints) -> None:
        self.num_layers = num_layers
        self.num_blocks = len(edges) - 1
        self.num_tokens = int(edges[-1])
        assert len(order) == num_layers * self.num_blocks, (len(order), num_layers, self.num_blocks)
        self._edges = edges
        self._order = self._pending = np.asarray(order, dtype=np.int64)
        self._proactive = np.zeros(len(order), dtype=bool)
        self._stored = np.zeros(num_layers, dtype=np.int64)
        self._fetched = np.zeros((num_layers, self.num_tokens, num_kv_heads), dtype=bool)
        self._sent = np.zeros((num_layers, self.num_tokens), dtype=bool)
        self.pushed = 0  # blocks sent so far

    @property
    def num_left(self) -> int:
        """Blocks not pushed yet."""
        return len(self._pending)

    def push(self, num_blocks: int) -> None:
        """So many of the most important blocks are to be pushed before decode begins, those already sent included."""
        self._proactive[self._order[:num_blocks]] = True

    def store(self, layer: int, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is computed in this layer."""
        self._stored[layer] = num_tokens

    def has_dense(self) -> bool:
        """Whether the first layers, which decode reads whole, have been taken."""
        return not bool((self._pending < DENSE_LAYERS * self.num_blocks).any())

    def take(self, max_tokens: int, *, proactive: bool, dense: bool = False) -> tuple[Ints, Ints, Ints]:
        """The next ready blocks of at most `max_tokens` tokens together, at least one, as KV entries (layers, tokens,
        heads), sorted.

        `proactive`: only what is to be pushed before decode begins; `dense`: only the first layers. Entries that decode
        has fetched are left out; blocks of which nothing is left are skipped.
        """
        while True:
            chosen, entries = self._take(max_tokens, proactive=proactive, dense=dense)
            if len(entries[0]) or not chosen:
                return entries

    def _take(self, max_tokens: int, *, proactive: bool, dense: bool) -> tuple[int, tuple[Ints, Ints, Ints]]:
        pending = self._pending
        layers, blocks = np.divmod(pending, self.num_blocks)
        ready = self._edges[blocks + 1] <= self._stored[layers]
        if proactive:
            ready &= self._proactive[pending]
        if dense:
            ready &= layers < DENSE_LAYERS
        chosen = np.flatnonzero(ready)
        if not len(chosen):
            return 0, (_NONE, _NONE, _NONE)
        sizes = np.cumsum(self._edges[blocks[chosen] + 1] - self._edges[blocks[chosen]])
        chosen = chosen[: max(1, int(np.searchsorted(sizes, max_tokens, side="right")))]
        self._pending = np.delete(pending, chosen)
        self.pushed += len(chosen)
        taken = np.sort(pending[chosen])
        layers, blocks = np.divmod(taken, self.num_blocks)
        first, stop = self._edges[blocks], self._edges[blocks + 1]
        tokens = spread(first, stop)
        layers = np.repeat(layers, stop - first)
        self._sent[layers, tokens] = True
        which, heads = np.nonzero(~self._fetched[layers, tokens])
        return len(chosen), (layers[which], tokens[which], heads)

    def take_layer(self, layer: int) -> Ints:
        """Tokens of a layer that are stored and not sent, all heads: for a hand-over that sends everything anyway."""
        stop = int(self._stored[layer])
        tokens = np.flatnonzero(~self._sent[layer, :stop])
        if len(tokens):
            self._sent[layer, :stop] = True
            if self._sent.all():
                self.pushed, self._pending = len(self._order), _NONE
        return tokens

    def fetch(self, layer: int, positions: Sequence[npt.NDArray[np.int64]]) -> int:
        """Decode fetches these positions of each KV head; returns how many of them it was sent already."""
        repeats = 0
        for head, tokens in enumerate(positions):
            repeats += int((self._sent[layer, tokens] | self._fetched[layer, tokens, head]).sum())
            self._fetched[layer, tokens, head] = True
        return repeats
