"""Which file builds which architecture. The names are those of spec.ARCHITECTURES."""

from collections.abc import Callable

from narrows.kernels.base import Kernels
from narrows.models import llama, mistral, qwen2, qwen3
from narrows.models.layers.decoder import Model
from narrows.models.spec import ModelSpec
from narrows.models.weights import Weights

Builder = Callable[[ModelSpec, Weights, Kernels, int], Model]

BUILDERS: dict[str, Builder] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
}
