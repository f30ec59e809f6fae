"""Puts an instance together: model, pool, cache, phase."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_bytes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from narrows.attention.base import PagedAttention
from narrows.attention.selective import SelectiveAttention
from narrows.config import EngineConfig
from narrows.core.ids import InstanceId, Role
from narrows.core.topology import InstanceInfo
from narrows.core.trace import Tracer
from narrows.kernels import load as load_kernels
from narrows.kernels.base import Kernels
from narrows.kv.cache import KVCache
from narrows.kv.layout import DENSE_LAYERS, KVLayout, MetadataRows
from narrows.kv.mask import KVMask
from narrows.kv.pool import KVPool
from narrows.models.layers.decoder import Model
from narrows.models.load import load_model
from narrows.runtime.channel import Channel
from narrows.runtime.decode import DecodePhase, Regions, Selection
from narrows.runtime.dtypes import DTYPES
from narrows.runtime.handing import Handing
from narrows.runtime.phase import Ending, Instance, Phase
from narrows.runtime.planning import Planner
from narrows.runtime.prefill import Describe, PrefillPhase
from narrows.runtime.runner import Runner
from narrows.runtime.sizing import Sizes
from narrows.select.base import MetadataLayout, Selector
from narrows.transfer.base import Region, Transport
from narrows.transfer.courier import Courier
from narrows.transfer.fetcher import Fetcher
from narrows.transfer.parcel import Pack, Source


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
    handing: Handing | None = None,  # None: decode reads all KV
    clock: Callable[[], float] = time.monotonic,
    tracer: Tracer | None = None,
) -> tuple[Instance, InstanceInfo]:
    """One instance over its own pool, which the transport allocates. The model may be shared within a process."""
    handing = handing or Handing()
    layout = sizes.layout
    region = transport.allocate(layout.total_bytes)
    pool = KVPool(layout, DTYPES[config.dtype], region.buffer)
    metadata = Metadata.allocate(handing.selector, layout, transport)
    ending = Ending(model.spec.eos_token_ids, sizes.max_model_len)
    reuse = config.enable_prefix_caching and role is Role.PREFILL
    cache = KVCache(layout.num_pages, layout.page_size, reuse_prefixes=reuse, salt=token_bytes(16))
    phase: Phase
    if role is Role.PREFILL:
        phase = PrefillPhase(
            Runner(model, pool, attention, layout.page_size, is_decode=False, tracer=tracer),
            cache,
            Courier(
                Source(layout, region, metadata.region, metadata.rows, packer(attention.kernels, pool)),
                transport,
                clock,
                tracer,
            ),
            Planner(layout.num_layers, handing.scheme, handing.profile, handing.timing),
            ending,
            describe=metadata.describer(handing.selector, pool.layers),
            load_profile=handing.load_profile,
            clock=clock,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
    else:
        mask_region = transport.allocate(layout.mask_bytes)
        mask = KVMask(layout, mask_region.buffer)
        selection = None
        if handing.selector is not None:
            fetcher = Fetcher(
                transport,
                layout.num_kv_heads,
                clock,
                lambda timeout_s: decode.wait(timeout_s),
                patience_s=handing.patience_s,
                tracer=tracer,
            )
            lacking, local = (
                SelectiveAttention(
                    attention.kernels,
                    handing.selector,
                    pool.layers,
                    mask.states,
                    metadata.layers,
                    fetcher,
                    staged=handing.staged,
                    tracer=tracer,
                )
                for _ in range(2)
            )
            runner = Runner(model, pool, lacking, layout.page_size, is_decode=True, tracer=tracer)
            selection = Selection(lacking, runner, local, fetcher, metadata.region)
        phase = decode = DecodePhase(
            Runner(
                model,
                pool,
                attention if selection is None else selection.local,
                layout.page_size,
                is_decode=True,
                tracer=tracer,
            ),
            cache,
            mask,
            Regions(region, mask_region),
            transport,
            ending,
            selection=selection,
            name=name,
            clock=clock,
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
    instance = Instance(phase, channel, transport, tracer)
    return instance, info


def packer(kernels: Kernels, pool: KVPool) -> Pack | None:
    """How this pool's entries are packed, if their dtype can be."""
    if pool.layers[0].dtype is not torch.bfloat16:
        return None
    layers = [layer.view(-1, layer.shape[-1]) for layer in pool.layers]

    def pack(layer: int, ids: npt.NDArray[np.int32], out: npt.NDArray[np.uint8]) -> int:
        return kernels.pack_entries(layers[layer], torch.from_numpy(ids), torch.from_numpy(out))

    return pack


@dataclass(frozen=True, slots=True)
class Metadata:
    """An instance's memory for its selector's key-derived metadata."""

    rows: MetadataRows
    region: Region | None
    layers: list[Tensor]  # per layer [num_slots / tokens_per_row, Hkv, row_bytes] uint8

    @classmethod
    def allocate(cls, selector: Selector | None, layout: KVLayout, transport: Transport) -> "Metadata":
        shape = MetadataLayout(0) if selector is None else selector.metadata
        rows = MetadataRows(shape.row_bytes * layout.num_kv_heads, shape.tokens_per_row)
        num_rows = layout.num_slots // rows.tokens_per_row
        if not rows.row_bytes:
            empty = torch.empty(num_rows, layout.num_kv_heads, 0, dtype=torch.uint8)
            return cls(rows, None, [empty] * layout.num_layers)
        region = transport.allocate(layout.num_layers * rows.layer_bytes(layout.num_slots))
        flat = torch.frombuffer(region.buffer, dtype=torch.uint8, count=len(region.buffer))
        flat = flat[: layout.num_layers * rows.layer_bytes(layout.num_slots)]
        layers = flat.view(layout.num_layers, num_rows, layout.num_kv_heads, shape.row_bytes).unbind(0)
        return cls(rows, region, list(layers))

    def describer(self, selector: Selector | None, pool: Sequence[Tensor]) -> Describe | None:
        """What derives the metadata of new KV at prefill; None: there is none."""
        if selector is None or self.region is None:
            return None

        def describe(layer: int, slots: Tensor) -> None:
            if layer >= DENSE_LAYERS:
                selector.describe(layer, pool[layer], slots, self.layers[layer])

        return describe
