"""The on-demand path where it answers: wanted entries, gathered into one piece, back to where decode reads them.

One answer a fetch (SmartGen section 4.2): rows of remote entries, one per KV head, each contiguous at both ends, so
nothing is scattered behind the arrival. An answer larger than the staging ring crosses as several posts, whose last
carries the note.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from narrows.core.plan import RegionKey
from narrows.core.wire import Fetch, Fetched, Wanted
from narrows.errors import TransportError
from narrows.transfer.base import Copy, Post, Priority, Region, Tag
from narrows.transfer.parcel import ON_DEMAND, Key, Parcel, Source
from narrows.transfer.positions import Positions, decode_positions
from narrows.transfer.staging import StagingRing

Bytes = npt.NDArray[np.uint8]


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
        self._pack = source.pack
        size = layout.num_slots * layout.num_kv_heads * (layout.entry_bytes + 1)  # a layer, packed in vain
        self._region = allocate(size)
        self._memory = np.frombuffer(self._region.buffer, np.uint8)
        self.ring = StagingRing(size)

    def next_post(self, answer: Answer, tag: str, note: bytes) -> tuple[Post, int | None] | None:
        """A post of the answer's next rows, as many as the ring holds, and its piece of the ring; None while there is
        no room. Behind the last row comes the note, and answer.rows is empty. Raises TransportError when it can not be
        answered."""
        fetch = answer.fetch
        if fetch.packed and self._pack is None:
            raise TransportError("entries of this dtype can not be packed")
        room = np.array([len(positions) * (self._entry_bytes + fetch.packed) for *_, positions in answer.rows])
        sizes = np.cumsum(room)
        count = int(np.searchsorted(sizes, self.ring.size, side="right"))
        if len(sizes) and not count:
            raise TransportError("a row of wanted entries is larger than a whole layer")
        piece = self.ring.take(int(sizes[count - 1])) if count else None
        if count and piece is None:
            return None
        sources, targets, lengths = [], [], []
        at = piece or 0
        for (parcel, wanted, head, positions), size in zip(answer.rows[:count], room.tolist()[:count], strict=True):
            ids = (parcel.slots[positions] * self._num_heads + head).astype(np.int32)
            sources.append(at)
            targets.append(wanted.target + head * wanted.stride)
            lengths.append(self._gather(fetch.layer, ids, self._memory[at : at + size], packed=fetch.packed))
            at += lengths[-1]
        answer.rows = answer.rows[count:]
        copy = Copy(self._region, _ints(sources), _ints(targets), _ints(lengths))
        region: RegionKey = fetch.region
        post = Post(
            Tag(tag, fetch.ticket, fetch.layer),
            Priority.ON_DEMAND,
            region,
            (copy,) if count else (),
            note=b"" if answer.rows else note,
        )
        return post, piece

    def _gather(self, layer: int, ids: npt.NDArray[np.int32], place: Bytes, *, packed: bool) -> int:
        """Entries of a layer, one behind the other; returns their bytes."""
        if packed:
            assert self._pack is not None
            return self._pack(layer, ids, place)
        rows = place.reshape(-1, self._entry_bytes)
        np.take(self._entries[layer], ids, axis=0, out=rows, mode="clip")  # "raise" would copy twice
        return len(place)


def _ints(values: list[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
