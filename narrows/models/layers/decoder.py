"""A decoder: embedding, layers, norm, head. What all architectures here have in common.

Legend: T rows (tokens of all requests of a step), H model width, V vocabulary, Hq query heads, Hkv KV heads,
D head size, E = 2*D.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from narrows.attention.base import AttentionBackend
from narrows.kernels.base import Kernels, PackedLinear, PagedBatch
from narrows.models.layers.attention import AttentionWeights
from narrows.models.layers.mlp import GatedMlp
from narrows.models.layers.rope import rope_tables
from narrows.models.layers.rows import keep_rows
from narrows.models.spec import ModelSpec
from narrows.models.weights import Weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norm before attention and before the feed-forward block, a residual around each."""

    attention: AttentionWeights
    mlp: GatedMlp
    attention_norm: Tensor  # [H]
    mlp_norm: Tensor  # [H]
    window: int | None


def load_layer(
    spec: ModelSpec, weights: Weights, index: int, *, attention: AttentionWeights, mlp: GatedMlp
) -> DecoderLayer:
    """Takes the layer's two norms; `weights` is already inside the layer."""
    return DecoderLayer(
        attention=attention,
        mlp=mlp,
        attention_norm=weights.take("input_layernorm.weight", spec.hidden),
        mlp_norm=weights.take("post_attention_layernorm.weight", spec.hidden),
        window=spec.windows[index],
    )


class Model:
    """A loaded decoder. Holds weights and rope tables only: KV and requests are its caller's. Safe to call again
    with other entries; not to be called from two threads at once with the same ones."""

    def __init__(
        self,
        spec: ModelSpec,
        kernels: Kernels,
        *,
        embedding: Tensor,  # [V, H]
        layers: Sequence[DecoderLayer],
        norm: Tensor,  # [H]
        head: PackedLinear,  # [V, H]
        max_positions: int,
    ) -> None:
        self.spec = spec
        self.max_positions = max_positions
        self._kernels = kernels
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._rope = rope_tables(spec.rope, spec.head_dim, max_positions)
        self._scale = spec.head_dim**-0.5
        self._no_entries = embedding.new_empty(0, 0, spec.entry_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and KV entries."""
        return self._embedding.dtype

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,  # [T] int32 or int64
        entries: Sequence[Tensor],  # per layer [num_slots, Hkv, E], written at batch.slots
        batch: PagedBatch,
        attention: AttentionBackend,
        *,
        logit_rows: Tensor | None = None,  # [n] int32 or int64: which rows' logits; None: every row's
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """One step: stores the KV of all rows and returns logits [n, V] float32 of the wanted rows.

        `on_layer(l)` is called as soon as layer l's K and V of this step are in entries[l], before its attention.
        In the last layer only the wanted rows go on from there: as requests of their own (see keep_rows), so the
        attention backend sees another batch in that layer unless logit_rows is None. Pass None in a decode step.
        """
        assert batch.max_context <= self.max_positions, (batch.max_context, self.max_positions)
        hidden = F.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            query = self._project(layer, layer.attention.qkv, hidden, entries[index], batch)
            if on_layer is not None:
                on_layer(index)
            if attention.looks_ahead and index + 1 < len(self._layers):
                self._foresee(index + 1, hidden, batch, attention)
            if logit_rows is not None and index == len(self._layers) - 1:
                if len(logit_rows) == 0:
                    return torch.empty(0, self.spec.vocab_size)
                hidden, query, batch = hidden[logit_rows], query[logit_rows], keep_rows(batch, logit_rows)
            out, _ = attention.attend(index, query, entries[index], batch, scale=self._scale, window=layer.window)
            hidden = self._finish(layer, hidden, out)
        normed = self._kernels.rms_norm(hidden, self._norm, self.spec.norm_eps)
        return self._kernels.linear(normed, self._head).float()

    def _foresee(self, index: int, hidden: Tensor, batch: PagedBatch, attention: AttentionBackend) -> None:
        """Tell the backend layer `index`'s query as it would be if the layer before it changed nothing: their inputs
        differ little (InfiniGen, section 4.3)."""
        layer = self._layers[index]
        query = self._project(layer, layer.attention.q, hidden, self._no_entries, batch)
        attention.foresee(index, query, batch, scale=self._scale, window=layer.window)

    def _project(
        self, layer: DecoderLayer, weight: PackedLinear, hidden: Tensor, entries: Tensor, batch: PagedBatch
    ) -> Tensor:
        """Project the rows, store their K and V if the weight gives them; returns queries [T, Hq, D]."""
        normed = self._kernels.rms_norm(hidden, layer.attention_norm, self.spec.norm_eps)
        return self._kernels.rope_store(
            self._kernels.linear(normed, weight),
            entries,
            batch,
            *self._rope,
            num_heads=self.spec.num_heads,
            q_norm=layer.attention.q_norm,
            k_norm=layer.attention.k_norm,
            eps=self.spec.norm_eps,
        )

    def _finish(self, layer: DecoderLayer, hidden: Tensor, out: Tensor) -> Tensor:
        """The rest of a layer, given the attention's out [T, Hq, D]. Changes `hidden` in place and returns it."""
        hidden = self._kernels.linear(out.flatten(1), layer.attention.o, residual=hidden)
        normed = self._kernels.rms_norm(hidden, layer.mlp_norm, self.spec.norm_eps)
        return layer.mlp.add_to(hidden, normed, self._kernels)


def load_decoder(
    spec: ModelSpec,
    weights: Weights,
    kernels: Kernels,
    layer: Callable[[Weights, int], DecoderLayer],
    max_positions: int,
) -> Model:
    """Load the parts outside the layers, and the layers by `layer(weights inside the layer, index)`."""
    embedding = weights.take("model.embed_tokens.weight", spec.vocab_size, spec.hidden)
    return Model(
        spec,
        kernels,
        embedding=embedding,
        layers=[layer(weights.under(f"model.layers.{index}."), index) for index in range(spec.num_layers)],
        norm=weights.take("model.norm.weight", spec.hidden),
        head=kernels.pack(embedding if spec.tied else weights.take("lm_head.weight", spec.vocab_size, spec.hidden)),
        max_positions=max_positions,
    )
