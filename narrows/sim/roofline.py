"""Costs from first principles: what must be computed, read and sent, over the rates that machine and kernels reach.

Each phase is a latency plus the longest of its limits. Experts are taken to be balanced (their balance is another
matter, NanoCP section 1); the instances are not. W instances in the order of their nodes, `hardware.per_node` a node.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from narrows.profile.timing import Work
from narrows.sim import calibration
from narrows.sim.cost import Floats, Ints, LayerTimes, StepLoad, StepTimes
from narrows.sim.hardware import DTYPE_BYTES, Hardware
from narrows.sim.model_shapes import ModelShape

FP8_SCALES = 4 / 128  # bytes of scales for a byte of data: one float32 for 128 values


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a machine. `weights` is the type of weights and of products with them, `kv` that of the cache.

    `constants` replaces calibrated ones by name (calibration.CONSTANTS).
    """

    hardware: Hardware
    model: ModelShape
    weights: str = "fp8"
    kv: str = "bf16"
    constants: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.constants) - set(calibration.CONSTANTS)
        assert not unknown, unknown

    @property
    def name(self) -> str:
        return f"roofline of {self.model.name} on {self.hardware.name}"

    def _of(self, name: str) -> float:
        return self.constants[name] if name in self.constants else calibration.constant(name)

    # -- decode ------------------------------------------------------------------------------------------------------

    def decode(self, load: StepLoad) -> StepTimes:
        model, batch = self.model, load.moe_batch
        width = load.num_instances
        other = self.other_s(batch)
        q_route, result_route = self.routes_s(load)
        attention = self.attention_s(load.attention_batch, load.kv_tokens)
        nothing = np.zeros(width)
        dense = LayerTimes(other, q_route, attention, result_route, nothing, self.mlp_s(batch), nothing)
        moe = dense
        if model.experts is not None:
            dispatch, combine = self.dispatch_s(batch), self.combine_s(batch)
            moe = LayerTimes(other, q_route, attention, result_route, dispatch, self.expert_s(batch), combine)
        once_s = self._of("step_once_s") + float(
            self._product_s(batch, model.vocab * model.hidden, "bf16").max(initial=0)
        )
        return StepTimes(moe, model.num_moe_layers, dense, model.num_dense_layers, once_s)

    def attention_s(self, batch: Ints, kv_tokens: Ints) -> Floats:
        """One layer's attention over `kv_tokens` in `batch` sequences on each instance, [W].

        A sequence costs as much as some more tokens: its own handling, and a last tile that is partly empty. So the
        same tokens in more sequences take longer (NanoCP, figure 3a).
        """
        model = self.model
        tokens = kv_tokens + self._of("attention_sequence_tokens") * batch
        if model.window is not None:
            full = model.num_full_layers / model.num_layers
            tokens = full * tokens + (1 - full) * np.minimum(tokens, batch * model.window)
        flops_s = tokens * model.attention_flops() / (self.hardware.bf16_flops * self._of("attention_flops_share"))
        memory_s = (
            tokens
            * model.kv_bytes_per_token_layer(self.kv)
            / (self.hardware.memory_bytes_per_s * self._of("attention_memory_share"))
        )
        return np.where(batch > 0, self._of("attention_launch_s") + np.maximum(flops_s, memory_s), 0.0)

    def other_s(self, batch: Ints) -> Floats:
        """A layer's projections and its small kernels, [W]."""
        return np.where(
            batch > 0,
            self._of("layer_small_s") + self._product_s(batch, self.model.attention_params, self.weights),
            0.0,
        )

    def mlp_s(self, batch: Ints) -> Floats:
        """A dense layer's MLP, [W]."""
        return self._product_s(batch, self.model.mlp_params, self.weights)

    def expert_s(self, batch: Ints) -> Floats:
        """A MoE layer's experts, [W]: the shared ones for the instance's own tokens, its routed ones for an equal part
        of everyone's."""
        experts = self.model.experts
        assert experts is not None
        width, tokens = len(batch), int(batch.sum())
        rows = tokens * experts.top_k / width
        # An expert is read when any token chose it.
        touched = experts.num_routed / width * (1 - (1 - experts.top_k / experts.num_routed) ** tokens)
        params = self.model.expert_params
        routed_s = max(
            2.0 * params * rows / (self.hardware.flops(self.weights) * self._of("gemm_flops_share")),
            params * touched * DTYPE_BYTES[self.weights] / self._weights_per_s,
        )
        return routed_s + self._product_s(batch, self.model.shared_params, self.weights)

    def dispatch_s(self, batch: Ints) -> Floats:
        """Tokens to their experts, [W]: each goes `top_k` times, in FP8 with scales where weights are FP8."""
        scaled = DTYPE_BYTES[self.weights] == 1
        token_bytes = self.model.hidden * (1 + FP8_SCALES if scaled else DTYPE_BYTES["bf16"])
        return self._all_to_all_s(batch, token_bytes, self._of("dispatch_latency_s"))

    def combine_s(self, batch: Ints) -> Floats:
        """Results back from the experts, [W], in BF16."""
        return self._all_to_all_s(batch, self.model.hidden * DTYPE_BYTES["bf16"], self._of("combine_latency_s"))

    def _all_to_all_s(self, batch: Ints, token_bytes: float, latency_s: float) -> Floats:
        """An instance sends what its own tokens need and serves its experts' equal part of all: the larger counts.
        Bytes to other nodes take the link and those inside take the fabric, at once."""
        width = len(batch)
        if self.model.experts is None or width == 1:
            return np.zeros(width)
        node = min(self.hardware.per_node, width)
        num_bytes = np.maximum(batch, batch.mean()) * self.model.experts.top_k * token_bytes
        link_s = num_bytes * (1 - node / width) / self.hardware.link_bytes_per_s
        fabric_s = num_bytes * ((node - 1) / width) / self.hardware.fabric_bytes_per_s
        seconds: Floats = latency_s + np.maximum(link_s, fabric_s)
        return seconds

    def routes_s(self, load: StepLoad) -> tuple[Floats, Floats]:
        """Queries to the KV bindings and results back, each [W]; nothing where an instance has no part in it."""
        none = np.zeros(load.num_instances)
        across = none if load.sent_across is None else load.sent_across
        across_in = none if load.received_across is None else load.received_across
        inside, outside = np.maximum(load.sent, load.received), np.maximum(across, across_in)
        fabric = self.hardware.fabric_bytes_per_s * self._of("cp_fabric_share")

        def route_s(num_bytes: float) -> Floats:
            latency_s = self._of("cp_latency_s") + np.where(outside > 0, self.hardware.link_latency_s, 0.0)
            bytes_s = np.maximum(inside * num_bytes / fabric, outside * num_bytes / self.hardware.link_bytes_per_s)
            return np.where(inside + outside > 0, latency_s + bytes_s, 0.0)

        return route_s(self.model.query_bytes(self.kv)), route_s(self.model.result_bytes(self.kv))

    @property
    def _weights_per_s(self) -> float:
        return self.hardware.memory_bytes_per_s * self._of("gemm_memory_share")

    def _product_s(self, batch: Ints, params: int, dtype: str) -> Floats:
        """`batch` rows times a matrix of so many parameters, [W]: arithmetic, or reading the matrix; 0 for no rows."""
        flops_s = 2.0 * params * batch / (self.hardware.flops(dtype) * self._of("gemm_flops_share"))
        return np.where(batch > 0, np.maximum(flops_s, params * DTYPE_BYTES[dtype] / self._weights_per_s), 0.0)

    # -- prefill, transfer, memory -----------------------------------------------------------------------------------

    def prefill_s(self, batch: Sequence[Work]) -> float:
        """By arithmetic alone: what is computed of the prompts at one share of the machine's peak."""
        share = f"prefill_share_{self.hardware.device}"
        rate = self._of(share if share in calibration.CONSTANTS else "prefill_share")
        products = (
            sum(work.uncached for work in batch) * self.model.flops_per_token() + len(batch) * self.model.head_flops()
        )
        pairs = sum(self._attended(work) for work in batch)
        attention = pairs * self.model.attention_flops(absorbed=False)
        seconds = products / self.hardware.flops(self.weights) + attention / self.hardware.bf16_flops
        return self._of("prefill_launch_s") + seconds / rate

    def _attended(self, work: Work) -> float:
        """Pairs of a computed token and one it attends to, over all layers."""
        layers, full = self.model.num_layers, self.model.num_full_layers
        if self.model.window is None:
            return float(layers * work.attended)
        return float(full * work.attended + (layers - full) * min(work.attended, work.uncached * self.model.window))

    def transfer_s(self, num_bytes: float, *, across: bool = True) -> float:
        hardware = self.hardware
        if across:
            return hardware.link_latency_s + num_bytes / hardware.link_bytes_per_s
        return hardware.fabric_latency_s + num_bytes / hardware.fabric_bytes_per_s

    def kv_tokens(self, num_instances: int) -> int:
        """Tokens whose KV one of `num_instances` that share the experts can hold."""
        room = self.hardware.memory_bytes * self._of("memory_share")
        return self.model.kv_tokens_per_instance(room, num_instances, self.weights, self.kv)
