"""The on-demand path where it answers: wanted entries, gathered into one piece, back to where decode reads them.

One answer a fetch (SmartGen section 4.2): rows of remote entries, one per KV head, each contiguous at both ends, so
nothing is scattered behind the arrival. An answer larger than the staging ring crosses as several posts, whose last
carries the note.
"""

from collections.abc import Callable, Mapping

import numpy as np

from narrows.core.plan import RegionKey
from narrows.core.wire import Fetch, Fetched, Wanted
from narrows.errors import TransportError
from narrows.transfer.base import Copy, Post, Priority, Region, Tag
from narrows.transfer.parcel import ON_DEMAND, Key, Parcel, Source
from narrows.transfer.positions import Positions, decode_positions
from narrows.transfer.staging import StagingRing


class Answer:
    """What is left to send of one fetch, in `rows`: one per KV head and request that wants any."""

    def __init__(
        self,
        fetch: Fetch,
        parcels: Mapping[Key, Parcel],
        endings: Mapping[Key, bool],  # of parcels that are over: whether everything had arrived
        num_heads: int,
    ) -> None:
        """Raises TransportError when a wanted list is damaged or asks for what is not computed."""
        self.fetch = fetch
        self.rows: list[tuple[Parcel, Wanted, int, Positions]] = []
        self._shares: list[tuple[Parcel, int]] = []  # entries of each parcel
        over: dict[bool, list[Key]] = {True: [], False: []}
        for wanted in fetch.wanted:
            key = (wanted.request, wanted.generation)
            parcel = parcels.get(key)
            if parcel is None:
                over[endings.get(key, False)].append(key)
                continue
            if not 0 <= fetch.layer < len(parcel.stored) or parcel.stored[fetch.layer] < parcel.num_tokens:
                raise TransportError(f"layer {fetch.layer} of {wanted.request} is not computed yet")
            heads = decode_positions(wanted.positions, num_heads, parcel.num_tokens)
            self.rows += [(parcel, wanted, head, row) for head, row in enumerate(heads) if len(row)]
            self._shares.append((parcel, sum(map(len, heads))))
            if parcel.bound is not None:
                parcel.wasted_entries += parcel.bound.delivery.fetch(fetch.layer, heads)
        self.note = Fetched(fetch.ticket, tuple(over[True]), tuple(over[False]))

    def count(self, num_bytes: int) -> None:
        """So many bytes of it have arrived: for the parcels' books."""
        total = sum(share for _, share in self._shares) or 1
        for parcel, share in self._shares:
            parcel.sent[ON_DEMAND] += num_bytes * share // total


class Gatherer:
    """Copies entries of a source's pool into a staging ring."""

    def __init__(self, source: Source, allocate: Callable[[int], Region]) -> None:
        layout = source.layout
        shape = (layout.num_layers, layout.num_slots * layout.num_kv_heads, layout.entry_bytes)
        self._entries = np.frombuffer(source.pool.buffer, np.uint8, layout.total_bytes).reshape(shape)
        self._num_heads = layout.num_kv_heads
        self._entry_bytes = layout.entry_bytes
        self._region = allocate(layout.layer_bytes)
        self._memory = np.frombuffer(self._region.buffer, np.uint8)
        self.ring = StagingRing(layout.layer_bytes)

    def next_post(self, answer: Answer, tag: str, note: bytes) -> tuple[Post, int | None] | None:
        """A post of the answer's next rows, as many as the ring holds, and its piece of the ring; None while there is
        no room. Behind the last row comes the note, and answer.rows is empty."""
        entry_bytes, layer = self._entry_bytes, answer.fetch.layer
        sizes = np.cumsum([len(positions) * entry_bytes for *_, positions in answer.rows])
        count = int(np.searchsorted(sizes, self.ring.size, side="right"))
        if len(sizes) and not count:
            raise TransportError("a row of wanted entries is larger than a whole layer")
        piece = self.ring.take(int(sizes[count - 1])) if count else None
        if count and piece is None:
            return None
        sources, targets, lengths = [], [], []
        at = piece or 0
        for parcel, wanted, head, positions in answer.rows[:count]:
            num_bytes = len(positions) * entry_bytes
            place = self._memory[at : at + num_bytes].reshape(-1, entry_bytes)
            ids = parcel.slots[positions].astype(np.int64) * self._num_heads + head
            np.take(self._entries[layer], ids, axis=0, out=place, mode="clip")  # "raise" would copy twice
            sources.append(at)
            targets.append(wanted.target + head * wanted.stride)
            lengths.append(num_bytes)
            at += num_bytes
        answer.rows = answer.rows[count:]
        copy = Copy(self._region, _ints(sources), _ints(targets), _ints(lengths))
        region: RegionKey = answer.fetch.region
        post = Post(
            Tag(tag, answer.fetch.ticket, layer),
            Priority.ON_DEMAND,
            region,
            (copy,) if count else (),
            note=b"" if answer.rows else note,
        )
        return post, piece


def _ints(values: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(values, dtype=np.int64)
