"""Metadata as short codes: every nibble of a code says one of 16 things about a key (or a run of keys), and a query
adds up what each contributes to q.k. The common half of infinigen, hata and quest, which differ in what a nibble says.

Legend: T tokens, R requests, Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size, J nibbles of a code (even).
"""

import torch
from torch import Tensor

from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.scores import TOKENS, CodeLayout, open_scores
from narrows.select.base import KVIndex, MetadataLayout
from narrows.select.budget import begin, budget, check_ratio, choose, fingerprint

# First tokens of a request, always read: they draw attention whatever they say, and their keys are unlike all others,
# so that what 16 values can say of a key does not fit them.
SINKS = 4


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """[..., J] of 0..15 to [..., J / 2] uint8, the even nibble in the low half."""
    packed: Tensor = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return packed.byte()


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., J / 2] uint8 to [..., J] of 0..15."""
    return (packed[..., None] >> packed.new_tensor([0, 4]) & 15).flatten(-2)


class CodeSelector:
    """What a code selector does once `tables` and `describe` say what its nibbles mean."""

    name = ""
    looks_ahead = False
    alpha: float | None = None  # entries so far below the best score are left out; None: none are

    def __init__(
        self, kernels: Kernels, ratio: float, nibbles: int, content: object, layout: CodeLayout = TOKENS
    ) -> None:
        """`content` is all that metadata and scores depend on, for the fingerprint."""
        self.ratio = check_ratio(ratio)
        codes_per_row = layout.tokens_per_row // layout.tokens_per_code
        self.metadata = MetadataLayout(codes_per_row * nibbles // 2, layout.tokens_per_row)
        self.fingerprint = fingerprint(self.name, ratio, self.alpha, SINKS, content)
        self._kernels = kernels
        self._scores = open_scores(kernels)
        self._layout = layout

    def tables(self, layer: int, query: Tensor) -> Tensor:
        """What each nibble adds to the scores of query [R, Hkv, G, D] float32: R * Hq * J * 16 numbers."""
        raise NotImplementedError

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        raise NotImplementedError

    def select(
        self, layer: int, query: Tensor, metadata: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> KVIndex:
        grouped = torch.unflatten(query.float(), 1, (metadata.shape[1], -1)) * scale
        num = budget(batch, self.ratio, window)
        scores, close = self._scores.codes(
            self.tables(layer, grouped).reshape(*query.shape[:2], -1, 16),
            metadata,
            self._layout,
            batch,
            begin(batch, window),
            sinks=SINKS,
            alpha=float("inf") if self.alpha is None else self.alpha,
        )
        if self.alpha is not None and self.ratio < 1.0:
            # Means over the queries of each KV head; the neediest of them speaks for the layer.
            close = torch.unflatten(close, 1, (metadata.shape[1], -1)).double().mean(2).amax(1)
            num = num.minimum(1 + SINKS + close.ceil().int())
        return choose(self._kernels, scores, num)
