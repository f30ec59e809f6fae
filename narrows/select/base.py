"""The contract of a selection algorithm: from a step's queries and small metadata to a KV index.

Legend: R requests of a decode step (one query each), Hq query heads, Hkv KV heads, G = Hq / Hkv, D head size,
E = 2*D entry size (K then V), n context length of a request (its newest token included), k selected entries.
A *row* is one KV head of one request, row r * Hkv + h: grouped-query models select per KV head, over the G queries.

Metadata is what an algorithm scores by. What is derived from weights or calibration (SVD bases, hash weights) is
loaded on both sides and never crosses the link; `fingerprint` tells whether both hold the same. What is derived from
keys lies in slot space like the KV itself, `[num_slots / tokens_per_row, Hkv, row_bytes]` uint8 per layer, is written
by `describe` wherever keys are computed, and crosses before the KV does.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from narrows.kernels.base import PagedBatch


@dataclass(frozen=True, slots=True)
class MetadataLayout:
    """The shape of an algorithm's key-derived metadata; `row_bytes` 0: there is none."""

    row_bytes: int  # of one KV head
    tokens_per_row: int = 1  # 1, or the page size for algorithms that describe pages

    @property
    def entry_bytes(self) -> float:
        """Per KV entry: what the hand-over of one token, one head, one layer costs more."""
        return self.row_bytes / self.tokens_per_row


@dataclass(frozen=True, slots=True)
class KVIndex:
    """Token positions to read, ascending in each row, then -1. The newest token is always among them."""

    positions: Tensor  # [R * Hkv, k] int32
    counts: Tensor  # [R * Hkv] int32, the valid ones of each row, at least 1


class Selector(Protocol):
    """One algorithm for one model. Holds no request's state; not to be called from two threads at once."""

    name: str
    ratio: float  # at most this part of a request's entries, rounded up, is selected in each row
    looks_ahead: bool  # the index of a layer is made from the input of the layer before it (InfiniGen)
    metadata: MetadataLayout
    fingerprint: str  # of algorithm, parameters and weight-derived metadata

    def describe(
        self,
        layer: int,
        entries: Tensor,  # [num_slots, Hkv, E] of this layer
        slots: Tensor,  # [T] int32: whose keys are new; those of one page in order of position, from its start or next
        metadata: Tensor,  # [num_slots / tokens_per_row, Hkv, row_bytes] uint8 of this layer, written
    ) -> None:
        """Derive the metadata of these slots from their keys (after RoPE). The result for a token does not depend on
        how its prompt was cut into calls. Does nothing where there is no metadata."""
        ...

    def select(
        self,
        layer: int,
        query: Tensor,  # [R, Hq, D] after RoPE; of the layer itself, or foreseen where looks_ahead
        metadata: Tensor,  # [num_slots / tokens_per_row, Hkv, row_bytes] uint8 of this layer
        batch: PagedBatch,  # a decode step: one row a request, the newest token's key not described yet
        *,
        scale: float,
        window: int | None,  # only the last `window` positions may be selected
    ) -> KVIndex:
        """The KV index of one layer and step. Row r's result depends on request r alone, and not on which KV entries
        are local: the same everywhere. Ties go to the earlier position."""
        ...
