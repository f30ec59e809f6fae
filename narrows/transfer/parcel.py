"""One hand-over at the sending side: what is known of it, and the posts it consists of."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from narrows.core.plan import Landing
from narrows.core.scheme import Scheme
from narrows.core.wire import Delivered
from narrows.kv.blocks import block_edges
from narrows.kv.layout import DENSE_LAYERS, KVLayout, MetadataRows
from narrows.transfer.base import Copy, PeerName, Post, PostId, Priority, Put, Region, Tag
from narrows.transfer.delivery import Delivery
from narrows.transfer.plan import Ints, num_pushed, plan_copies, plan_mask

Key = tuple[str, int]  # request and generation

METADATA, PROACTIVE, ON_DEMAND, SPECULATIVE = "metadata", "proactive", "on_demand", "speculative"
PATHS = (METADATA, PROACTIVE, ON_DEMAND, SPECULATIVE)
FULL_FROM = 0.95  # an adaptive hand-over is full when at least this part of it crosses during prefill


Pack = Callable[[int, npt.NDArray[np.int32], npt.NDArray[np.uint8]], int]


@dataclass(frozen=True, slots=True)
class Source:
    """What a prefill instance sends from. `pack(layer, ids, out)` writes those KV entries of a layer (id = slot * Hkv +
    head) to `out` in fewer bytes and returns how many; None: entries of this dtype are not packed."""

    layout: KVLayout
    pool: Region
    metadata: Region | None  # None: no selector, or one without key-derived metadata
    rows: MetadataRows
    pack: Pack | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How one hand-over is to go, as known when its landing is. `order` lists its KV blocks, most important first."""

    scheme: Scheme
    order: Ints
    num_blocks: int  # a layer, at most
    prefill_s: float  # until its prompt is computed, as predicted: Tp


@dataclass(slots=True)
class Bound:
    """Where a hand-over goes, once decode has made room."""

    landing: Landing
    layout: KVLayout  # of the pool there
    slots: Ints  # [num_tokens]
    peer: PeerName
    plan: Plan
    delivery: Delivery


@dataclass(slots=True)
class Parcel:
    """One hand-over. `slots[p]` is where position p lies here; `stored[l]` counts leading tokens computed."""

    key: Key
    slots: Ints
    stored: npt.NDArray[np.int64]
    described: npt.NDArray[np.int64]  # leading tokens whose metadata is posted, by layer
    undescribed: bool = True  # metadata waits to be posted
    bound: Bound | None = None
    full: bool | None = None  # None: not decided, since nothing is known of the link
    note: Callable[[Scheme, bool], bytes] | None = None  # set when the prompt is computed
    begun: bool = False  # the note is posted
    credit: float = 0.0  # tokens of one layer that may be sent speculatively
    open_posts: set[PostId] = field(default_factory=set)
    in_flight: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, 0))  # bytes by path
    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATHS, 0))
    wasted_entries: int = 0
    pushed_blocks: int = 0
    transfer_s: float = 0.0  # Tt, as predicted
    cancelled: bool = False
    failed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def ended(self) -> bool:
        return self.cancelled or self.failed

    def bind(self, source: Source, landing: Landing, peer: PeerName, plan: Plan) -> None:
        """Decode has made room there, and is reached as `peer`."""
        layout = source.layout
        slots = np.concatenate([np.arange(at, at + n, dtype=np.int64) for at, n in landing.runs])
        assert len(slots) == self.num_tokens, (len(slots), self.num_tokens)
        edges = block_edges(self.num_tokens, plan.num_blocks)
        delivery = Delivery(layout.num_layers, layout.num_kv_heads, edges, plan.order)
        for layer, count in enumerate(self.stored.tolist()):
            delivery.store(layer, count)
        target = layout.resized(landing.num_slots // layout.page_size)
        self.bound = Bound(landing, target, slots, peer, plan, delivery)

    def decide_by_scheme(self, layout: KVLayout) -> bool:
        """Whether the scheme alone says that it is full, or how much is pushed."""
        assert self.bound is not None
        scheme, delivery = self.bound.plan.scheme, self.bound.delivery
        if scheme.full:
            self.full = True
        elif scheme.fraction is not None:
            self.full = False
            blocks = int(scheme.fraction * layout.num_layers * delivery.num_blocks)
            delivery.push(max(blocks, DENSE_LAYERS * delivery.num_blocks))
        return self.full is not None

    def decide_by_rate(self, source: Source, bytes_per_s: float, waiting_bytes: int) -> tuple[int, int]:
        """Full or selective, and how much is pushed, by equation 2, behind what waits for the link already. Returns how
        many KV blocks are pushed, and of how many."""
        assert self.bound is not None
        plan, delivery, layout, rows = self.bound.plan, self.bound.delivery, source.layout, source.rows
        blocks = layout.num_layers * delivery.num_blocks
        metadata = (layout.num_layers - DENSE_LAYERS) * rows.row_bytes * self.num_tokens / rows.tokens_per_row
        kv = layout.num_layers * layout.token_bytes * self.num_tokens
        self.transfer_s = (kv + metadata + waiting_bytes) / bytes_per_s
        count = num_pushed(layout.num_layers, delivery.num_blocks, plan.prefill_s, self.transfer_s)
        self.full = plan.scheme.adaptive and count >= FULL_FROM * blocks
        # Equation 2 counts the metadata as part of everything; it crosses first, so the blocks have what is left.
        count = max(int(count - blocks * metadata / (kv + metadata)), DENSE_LAYERS * delivery.num_blocks)
        delivery.push(count)
        return blocks if self.full else count, blocks

    def kv_post(self, source: Source, priority: Priority, layers: Ints, tokens: Ints, heads: Ints | None) -> Post:
        """These KV entries (None: of all heads), then the mask updates that say so (section 4.2)."""
        bound = self.bound
        assert bound is not None
        here, there, num_heads = source.layout, bound.layout, source.layout.num_kv_heads
        sources, targets = self.slots[tokens], bound.slots[tokens]
        if heads is None:
            row_bytes, each = here.token_bytes, num_heads
        else:
            row_bytes, each = here.entry_bytes, 1
            sources, targets = sources * num_heads + heads, targets * num_heads + heads
        copies = plan_copies(row_bytes, here.layer_bytes, there.layer_bytes, layers, sources, targets)
        marks = plan_mask(there.num_slots * num_heads, layers, targets * each, each)
        puts = tuple(Put(bound.landing.mask, offset, data) for offset, data in marks)
        layer = int(layers[0]) if layers[0] == layers[-1] else -1
        copy = Copy(source.pool, copies.source_offsets, copies.target_offsets, copies.lengths)
        return Post(Tag(*self.key, layer), priority, bound.landing.pool, (copy,), puts)

    def metadata_post(self, source: Source, priority: Priority, max_bytes: int) -> Post | None:
        """The next metadata that is stored and not posted yet, of the layers that select, in their order: about
        max_bytes, at least one layer's. None: nothing is left."""
        bound, rows = self.bound, source.rows
        assert bound is not None and source.metadata is not None and bound.landing.metadata is not None
        layers, here, there = [], [], []
        size = 0
        for layer in range(DENSE_LAYERS, source.layout.num_layers):
            begin, end = int(self.described[layer]), int(self.stored[layer])
            if begin == end:
                continue
            if size >= max_bytes:
                break
            self.described[layer] = end
            tokens = np.arange(begin // rows.tokens_per_row * rows.tokens_per_row, end, rows.tokens_per_row)
            layers.append(np.full(len(tokens), layer, dtype=np.int64))
            here.append(self.slots[tokens] // rows.tokens_per_row)
            there.append(bound.slots[tokens] // rows.tokens_per_row)
            size += len(tokens) * rows.row_bytes
        if not layers:
            return None
        copies = plan_copies(
            rows.row_bytes,
            rows.layer_bytes(source.layout.num_slots),
            rows.layer_bytes(bound.layout.num_slots),
            np.concatenate(layers),
            np.concatenate(here),
            np.concatenate(there),
        )
        copy = Copy(source.metadata, copies.source_offsets, copies.target_offsets, copies.lengths)
        tag = Tag(*self.key, int(layers[0][0]) if len(layers) == 1 else -1)
        return Post(tag, priority, bound.landing.metadata, (copy,))

    def note_post(self, source: Source, priority: Priority, full: bool) -> Post:
        """The word that decode may begin."""
        assert self.bound is not None and self.note is not None
        tag = Tag(*self.key, source.layout.num_layers)
        return Post(tag, priority, self.bound.landing.pool, (), (), self.note(self.bound.plan.scheme, full))

    def delivered(self, source: Source) -> Delivered:
        """What was sent, for the books."""
        bound = self.bound
        return Delivered(
            *self.key,
            metadata_bytes=self.sent[METADATA],
            proactive_bytes=self.sent[PROACTIVE],
            on_demand_bytes=self.sent[ON_DEMAND],
            speculative_bytes=self.sent[SPECULATIVE],
            wasted_bytes=self.wasted_entries * source.layout.entry_bytes,
            pushed_blocks=self.pushed_blocks,
            num_blocks=source.layout.num_layers * bound.delivery.num_blocks if bound else 0,
            prefill_s=bound.plan.prefill_s if bound else 0.0,
            transfer_s=self.transfer_s,
            full=self.full is not False,
        )
