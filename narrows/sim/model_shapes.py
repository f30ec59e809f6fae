"""Sizes of models, and what follows of them: bytes of KV and weights, arithmetic of a token.

Every shape is read off the `config.json` published with the model's weights (the address stands beside it). Parameters
are counted from the shape: matrices of attention, MLPs and experts, router, embedding and head. Norms, biases and what
is not of the text decoder (vision towers, multi-token prediction) are left out; together below half a per cent.

Counting a multiply-add as two, a token's product with a matrix of p parameters costs 2 p.
"""

from dataclasses import dataclass

from narrows.sim import names
from narrows.sim.hardware import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class MLA:
    """Multi-head latent attention: what is cached of a token is one latent of rank + rope dims, shared by all heads."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The MoE layers. Routed experts are sharded over the instances of a group; the shared are on each."""

    num_routed: int
    top_k: int
    num_shared: int
    width: int  # inner size of one expert
    dense_layers: int  # first layers that have an MLP instead


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder. `window`: of every `window_period` layers all but one attend to only so many tokens."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int  # inner size of a dense layer's MLP
    vocab: int
    tied: bool = False  # embedding and head are one matrix
    mla: MLA | None = None
    experts: Experts | None = None
    window: int | None = None
    window_period: int = 1

    # -- layers ------------------------------------------------------------------------------------------------------

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.experts.dense_layers if self.experts else 0

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers

    @property
    def num_full_layers(self) -> int:
        """Layers that attend to the whole context."""
        return self.num_layers if self.window is None else self.num_layers // self.window_period

    # -- parameters --------------------------------------------------------------------------------------------------

    @property
    def attention_params(self) -> int:
        """Of one layer: projections to queries, keys and values, and from the result."""
        if self.mla is None:
            return self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        m, heads = self.mla, self.num_heads
        queries = self.hidden * m.q_rank + m.q_rank * heads * (m.nope_dim + m.rope_dim)
        latent = self.hidden * (m.kv_rank + m.rope_dim) + m.kv_rank * heads * (m.nope_dim + m.v_dim)
        return queries + latent + heads * m.v_dim * self.hidden

    @property
    def mlp_params(self) -> int:
        """Of one dense layer's MLP: gate, up, down."""
        return 3 * self.hidden * self.mlp

    @property
    def expert_params(self) -> int:
        """Of one expert of one layer."""
        return 3 * self.hidden * self.experts.width if self.experts else 0

    @property
    def shared_params(self) -> int:
        """Of a MoE layer, on every instance: shared experts and the router."""
        if self.experts is None:
            return 0
        return self.experts.num_shared * self.expert_params + self.hidden * self.experts.num_routed

    @property
    def vocab_params(self) -> int:
        """Embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def params(self) -> int:
        """All of the decoder."""
        return self._params(self.experts.num_routed if self.experts else 0)

    @property
    def active_params(self) -> int:
        """Those that one token meets: as published, with embedding and head."""
        return self._params(self.experts.top_k if self.experts else 0)

    def _params(self, num_experts: int) -> int:
        moe = self.num_moe_layers * (num_experts * self.expert_params + self.shared_params)
        dense = self.num_dense_layers * self.mlp_params
        return self.num_layers * self.attention_params + dense + moe + self.vocab_params

    # -- bytes -------------------------------------------------------------------------------------------------------

    def kv_bytes_per_token_layer(self, dtype: str = "bf16") -> float:
        """KV of one token in one layer."""
        entry = self.mla.kv_rank + self.mla.rope_dim if self.mla else 2 * self.num_kv_heads * self.head_dim
        return entry * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype: str = "bf16") -> float:
        """KV of one token in all layers, none of them forgotten (a window's layers may keep only a window)."""
        return self.num_layers * self.kv_bytes_per_token_layer(dtype)

    def weight_bytes_per_instance(self, ep_degree: int = 1, dtype: str = "fp8", vocab_dtype: str = "bf16") -> float:
        """Weights that one of `ep_degree` instances holds: attention, shared and dense ones whole, its part of the
        routed experts (rounded up), embedding and head whole."""
        routed = -(-self.experts.num_routed // ep_degree) if self.experts else 0
        return (self._params(routed) - self.vocab_params) * DTYPE_BYTES[dtype] + self.vocab_params * DTYPE_BYTES[
            vocab_dtype
        ]

    def kv_tokens_per_instance(
        self, memory_bytes: float, ep_degree: int = 1, dtype: str = "fp8", kv: str = "bf16"
    ) -> int:
        """Tokens whose KV fits beside the weights in `memory_bytes` (what is left of a device for both)."""
        return max(
            0, int((memory_bytes - self.weight_bytes_per_instance(ep_degree, dtype)) // self.kv_bytes_per_token(kv))
        )

    # -- arithmetic --------------------------------------------------------------------------------------------------

    def flops_per_token(self) -> float:
        """Products of one token with weights, all layers, without embedding (a look-up) and head."""
        return 2.0 * (self.active_params - self.vocab_params)

    def head_flops(self) -> float:
        """Logits of one token."""
        return 2.0 * self.vocab * self.hidden

    def attention_flops(self, absorbed: bool = True) -> float:
        """Scores and weighted sum of one query token against one key token, one layer, all heads.

        MLA at decode is `absorbed`: heads attend to the latent itself; at prefill it is expanded to heads first.
        """
        if self.mla is None:
            return 4.0 * self.num_heads * self.head_dim
        m = self.mla
        if absorbed:
            return 2.0 * self.num_heads * (m.kv_rank + m.rope_dim + m.kv_rank)
        return 2.0 * self.num_heads * (m.nope_dim + m.rope_dim + m.v_dim)

    def query_bytes(self, dtype: str = "bf16") -> float:
        """What is routed of one token's query in one layer (NanoCP section 6.7: 128 heads of 576 for DeepSeek-V3)."""
        dim = self.mla.kv_rank + self.mla.rope_dim if self.mla else self.head_dim
        return self.num_heads * dim * DTYPE_BYTES[dtype]

    def result_bytes(self, dtype: str = "bf16") -> float:
        """A partial result and its float32 LSE of one token in one layer."""
        dim = self.mla.kv_rank if self.mla else self.head_dim
        return self.num_heads * (dim * DTYPE_BYTES[dtype] + 4)


_MLA_671B = MLA(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)

DEEPSEEK_V3 = ModelShape(  # huggingface.co/deepseek-ai/DeepSeek-V3
    *("DeepSeek-V3", 61, 7168, 128, 128, 192, 18432, 129280),
    mla=_MLA_671B,
    experts=Experts(num_routed=256, top_k=8, num_shared=1, width=2048, dense_layers=3),
)
KIMI_K2 = ModelShape(  # huggingface.co/moonshotai/Kimi-K2-Instruct-0905
    *("Kimi-K2", 61, 7168, 64, 64, 192, 18432, 163840),
    mla=_MLA_671B,
    experts=Experts(num_routed=384, top_k=8, num_shared=1, width=2048, dense_layers=1),
)
QWEN3_8B = ModelShape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936)  # huggingface.co/Qwen/Qwen3-8B
QWEN3_14B = ModelShape("Qwen3-14B", 40, 5120, 40, 8, 128, 17408, 151936)  # huggingface.co/Qwen/Qwen3-14B
QWEN3_235B_A22B = ModelShape(  # huggingface.co/Qwen/Qwen3-235B-A22B
    *("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 12288, 151936),
    experts=Experts(num_routed=128, top_k=8, num_shared=0, width=1536, dense_layers=0),
)
LLAMA_3_1_8B = ModelShape(  # huggingface.co/meta-llama/Llama-3.1-8B
    "Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256
)
GEMMA_3_12B = ModelShape(  # huggingface.co/google/gemma-3-12b-it, text_config: five local layers, then a global one
    *("Gemma-3-12B", 48, 3840, 16, 8, 256, 15360, 262208),
    tied=True,
    window=1024,
    window_period=6,
)
PHI_4 = ModelShape("Phi-4", 40, 5120, 40, 10, 128, 17920, 100352)  # huggingface.co/microsoft/phi-4

MODELS = {
    model.name: model
    for model in (
        *(DEEPSEEK_V3, KIMI_K2, QWEN3_8B, QWEN3_14B, QWEN3_235B_A22B),
        *(LLAMA_3_1_8B, GEMMA_3_12B, PHI_4),
    )
}


def model_named(name: str) -> ModelShape:
    """A built-in model. Raises ConfigError naming the nearest known one."""
    return names.find(MODELS, name, "model")
