"""Metadata as short codes: every nibble of a code says one of 16 things about a key (or a run of keys), and a query
adds up what each contributes to q.k. The common half of infinigen, hata and quest, which differ in what a nibble says.

Legend: R requests, Hq query heads, Hkv KV heads, D head size, J nibbles of a code (even).
"""

from torch import Tensor

from narrows.kernels.base import Kernels, PagedBatch
from narrows.kernels.scores import TOKENS, Budget, CodeLayout, open_scores
from narrows.select.base import KVIndex, MetadataLayout
from narrows.select.fingerprint import check_ratio, fingerprint

# First tokens of a request, always read: they draw attention whatever they say, and their keys are unlike all others,
# so that what 16 values can say of a key does not fit them.
SINKS = 4


class CodeSelector:
    """All of a selector but `describe`."""

    name = ""
    looks_ahead = False
    alpha = float("inf")  # entries so far below the best score are left out

    def __init__(
        self,
        kernels: Kernels,
        ratio: float,
        decode: Tensor,  # [L, Hkv, D, J * 16] or [L, Hkv, 2, D, 16], see kernels.scores
        content: object,  # all that metadata and scores depend on, for the fingerprint
        layout: CodeLayout = TOKENS,
    ) -> None:
        self.ratio = check_ratio(ratio)
        nibbles = decode.shape[3] // (16 if decode.dim() == 4 else 1)
        codes_per_row = layout.tokens_per_row // layout.tokens_per_code
        self.metadata = MetadataLayout(codes_per_row * nibbles // 2, layout.tokens_per_row)
        self.fingerprint = fingerprint(self.name, ratio, self.alpha, SINKS, content)
        self._kernels = kernels
        self._scores = open_scores(kernels)
        self._decode = decode.contiguous().unbind(0)
        self._layout = layout

    def describe(self, layer: int, entries: Tensor, slots: Tensor, metadata: Tensor) -> None:
        raise NotImplementedError

    def select(
        self, layer: int, query: Tensor, metadata: Tensor, batch: PagedBatch, *, scale: float, window: int | None
    ) -> KVIndex:
        budget = Budget(self.ratio, window, SINKS, self.alpha)
        scores, num = self._scores.codes(query, self._decode[layer], metadata, self._layout, batch, budget, scale=scale)
        return KVIndex(self._kernels.top_k(scores, num), num)
