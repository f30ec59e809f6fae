"""Where KV lies in memory: the integers that pool, allocator, transfer plan and kernels agree on.

The pool is layer-major, and token-major inside a layer: `[num_layers, num_slots, num_kv_heads, entry_dim]`, so a run of
slots is one contiguous range of bytes per layer. The mask is `[num_layers, num_slots, num_kv_heads]` int8.
"""

from dataclasses import dataclass, replace

from narrows.errors import ConfigError

# States of a KV entry in the mask.
MASK_ABSENT = 0
MASK_LOCAL = 1
MASK_REMOTE = 2

DENSE_LAYERS = 2  # the first ones, which decode reads whole: they matter for every token (SmartGen, section 4.1)


def pages_for(num_tokens: int, page_size: int) -> int:
    """How many pages hold that many tokens."""
    return -(-num_tokens // page_size)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one instance's pool and of its mask. Raises ConfigError naming the field that is unusable."""

    num_layers: int
    num_kv_heads: int
    entry_dim: int  # elements of one KV entry: 2 * head_dim, K then V (MLA: the latent)
    dtype_bytes: int
    page_size: int  # tokens
    num_pages: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "entry_dim", "dtype_bytes", "page_size", "num_pages"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: {value} is not allowed; use a whole number of at least 1")
        if self.page_size & (self.page_size - 1):
            below = 1 << (self.page_size.bit_length() - 1)
            raise ConfigError(f"page_size: {self.page_size} is not a power of two; try {below} or {2 * below}")

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def entry_bytes(self) -> int:
        """One KV entry: one token, one head, one layer."""
        return self.entry_dim * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        """One token in one layer, all heads."""
        return self.num_kv_heads * self.entry_bytes

    @property
    def layer_bytes(self) -> int:
        """All slots of one layer: the stride between layers."""
        return self.num_slots * self.token_bytes

    @property
    def page_bytes(self) -> int:
        """One page in all layers."""
        return self.num_layers * self.page_size * self.token_bytes

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def offset(self, layer: int, slot: int) -> int:
        """Byte offset in the pool of a slot's first KV entry in a layer."""
        assert 0 <= layer < self.num_layers, layer
        assert 0 <= slot < self.num_slots, slot
        return layer * self.layer_bytes + slot * self.token_bytes

    def resized(self, num_pages: int) -> "KVLayout":
        """The same layout over another number of pages, as a peer may have it."""
        return replace(self, num_pages=num_pages)

    @property
    def mask_layer_bytes(self) -> int:
        """The mask of one layer: the stride between layers in the mask."""
        return self.num_slots * self.num_kv_heads

    @property
    def mask_bytes(self) -> int:
        return self.num_layers * self.mask_layer_bytes

    def mask_offset(self, layer: int, slot: int, head: int = 0) -> int:
        """Byte offset in the mask of one KV entry's state."""
        assert 0 <= layer < self.num_layers, layer
        assert 0 <= slot < self.num_slots, slot
        assert 0 <= head < self.num_kv_heads, head
        return layer * self.mask_layer_bytes + slot * self.num_kv_heads + head


@dataclass(frozen=True, slots=True)
class MetadataRows:
    """Where a selector's key-derived metadata lies: `[num_layers, num_slots / tokens_per_row, row_bytes]`."""

    row_bytes: int = 0  # of all KV heads; 0: there is none
    tokens_per_row: int = 1

    def layer_bytes(self, num_slots: int) -> int:
        return num_slots // self.tokens_per_row * self.row_bytes
