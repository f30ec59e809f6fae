"""How large an instance's KV pool is and how long a request may be: integers, from config and model together."""

import os
from dataclasses import dataclass

from narrows.config import EngineConfig
from narrows.errors import ConfigError
from narrows.kv.layout import KVLayout, pages_for
from narrows.models.spec import ModelSpec

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
CONTEXTS = 4  # pool size by default, in full contexts of the model
MEMORY_SHARE = 10  # and at most this fraction of the machine's memory


@dataclass(frozen=True, slots=True)
class Sizes:
    """The same for every instance of a cluster."""

    layout: KVLayout
    max_model_len: int


def plan_sizes(config: EngineConfig, spec: ModelSpec, *, memory_bytes: int | None = None) -> Sizes:
    """Raises ConfigError when one request of the longest kind would not fit into a pool."""
    max_model_len = config.max_model_len or spec.max_positions
    if max_model_len > spec.max_positions:
        raise ConfigError(
            f"max_model_len: {max_model_len} is more than the {spec.max_positions} positions the model was made for"
        )
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    token_bytes = spec.num_layers * spec.num_kv_heads * spec.entry_dim * DTYPE_BYTES[config.dtype]
    page_bytes = token_bytes * config.page_size
    pool_bytes = config.kv_cache_memory_bytes or min(
        CONTEXTS * pages_for(max_model_len, config.page_size) * page_bytes, memory_bytes // MEMORY_SHARE
    )
    num_instances = config.prefill + config.decode
    if num_instances * pool_bytes > memory_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes: {num_instances} pools of {pool_bytes / 2**30:.1f} GiB are more than the machine's "
            f"memory ({memory_bytes / 2**30:.1f} GiB); lower it to at most {memory_bytes // num_instances}"
        )
    num_pages = pool_bytes // page_bytes
    if num_pages < pages_for(max_model_len, config.page_size):
        raise ConfigError(
            f"max_model_len: the KV of {max_model_len} tokens takes {max_model_len * token_bytes / 2**20:.0f} MiB, but "
            f"an instance's pool has {pool_bytes / 2**20:.0f}; lower max_model_len or raise kv_cache_memory_bytes to "
            f"at least {pages_for(max_model_len, config.page_size) * page_bytes}"
        )
    layout = KVLayout(
        spec.num_layers, spec.num_kv_heads, spec.entry_dim, DTYPE_BYTES[config.dtype], config.page_size, num_pages
    )
    return Sizes(layout, max_model_len)
