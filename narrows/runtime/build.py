"""Puts an instance together: model, pool, cache, phase."""

from secrets import token_bytes

import torch

from narrows.attention.base import PagedAttention
from narrows.config import EngineConfig
from narrows.core.ids import InstanceId, Role
from narrows.core.topology import InstanceInfo
from narrows.kernels import load as load_kernels
from narrows.kernels.base import Kernels
from narrows.kv.cache import KVCache
from narrows.kv.mask import KVMask
from narrows.kv.pool import KVPool
from narrows.models.layers.decoder import Model
from narrows.models.load import load_model
from narrows.runtime.channel import Channel
from narrows.runtime.decode import DecodePhase
from narrows.runtime.phase import Ending, Instance, Phase
from narrows.runtime.prefill import PrefillPhase
from narrows.runtime.runner import Runner
from narrows.runtime.sizing import Sizes
from narrows.transfer.base import Transport

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model(
    config: EngineConfig, folder: str, sizes: Sizes, kernels: Kernels | None = None
) -> tuple[Model, PagedAttention]:
    """Weights, and the attention that goes with their kernels (None: those of the config). Raises ModelError."""
    kernels = kernels or load_kernels(config.kernels, config.threads)
    model = load_model(folder, DTYPES[config.dtype], kernels, max_positions=sizes.max_model_len)
    return model, PagedAttention(kernels)


def build_instance(
    config: EngineConfig,
    sizes: Sizes,
    model: Model,
    attention: PagedAttention,
    *,
    role: Role,
    name: InstanceId,
    incarnation: str,
    transport: Transport,
    channel: Channel,
) -> tuple[Instance, InstanceInfo]:
    """One instance over its own pool, which the transport allocates. The model may be shared within a process."""
    layout = sizes.layout
    region = transport.allocate(layout.total_bytes)
    pool = KVPool(layout, DTYPES[config.dtype], region.buffer)
    runner = Runner(model, pool, attention, layout.page_size, is_decode=role is Role.DECODE)
    ending = Ending(model.spec.eos_token_ids, sizes.max_model_len)
    reuse = config.enable_prefix_caching and role is Role.PREFILL
    cache = KVCache(layout.num_pages, layout.page_size, reuse_prefixes=reuse, salt=token_bytes(16))
    phase: Phase
    if role is Role.PREFILL:
        phase = PrefillPhase(
            runner,
            cache,
            layout,
            region,
            transport,
            ending,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
    else:
        mask_region = transport.allocate(layout.mask_bytes)
        phase = DecodePhase(
            runner,
            cache,
            KVMask(layout, mask_region.buffer),
            region,
            mask_region,
            transport,
            ending,
            instance=name,
            max_num_seqs=config.max_num_seqs,
        )
    info = InstanceInfo(
        name,
        role,
        incarnation,
        transport.address,
        layout.num_pages,
        layout.page_size,
        config.max_num_seqs,
        sizes.max_model_len,
        model.spec.vocab_size,
    )
    return Instance(phase, channel, transport), info
