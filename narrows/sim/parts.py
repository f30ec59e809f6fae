"""The tables of a scenario file, each a frozen value that checks itself."""

from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, cast, get_args, get_origin, get_type_hints

from narrows.core.scheme import SCHEMES
from narrows.errors import ConfigError
from narrows.sim import mixes, names
from narrows.sim.hardware import DTYPE_BYTES, HARDWARE
from narrows.sim.model_shapes import MODELS

ARRIVALS = ("trace", "poisson", "gamma", "constant")
COSTS = ("roofline", "table", "fitted", "null")
ROUTES = ("routed", "collective")
GRAPHS = ("whole", "piecewise")
FIRST_TOKENS = ("arrival", "admission")


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a table"}


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


class Part:
    """A table of the file. Raises ConfigError naming table and field when it is made of what is no such thing."""

    __slots__ = ()
    table: ClassVar[str]

    def __post_init__(self) -> None:
        for spec in fields(cast(Any, self)):
            object.__setattr__(self, spec.name, _checked(self, spec))


def _checked(part: Part, spec: Field[Any]) -> Any:
    """A field's value if it has its type and is in its range: a whole number as a float where a number is asked for, a
    name as it is known."""
    value, where, rule = getattr(part, spec.name), f"{part.table}.{spec.name}", spec.metadata
    hint = get_type_hints(type(part))[spec.name]
    kinds = get_args(hint) if type(None) in get_args(hint) else (get_origin(hint) or hint,)
    if float in kinds and type(value) is int:
        value = float(value)
    if type(value) not in kinds:
        wanted = " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
        raise ConfigError(f"{where}: {value!r} has the wrong type; use {wanted}")
    if value is None:
        return None
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ConfigError(f"{where}: {value} is not allowed; use a finite number")
    if "least" in rule and value < rule["least"]:
        raise ConfigError(f"{where}: {value} is too small; use at least {rule['least']}")
    if "above" in rule and value <= rule["above"]:
        raise ConfigError(f"{where}: {value} is too small; use a number above {rule['above']:g}")
    if "most" in rule and value > rule["most"]:
        raise ConfigError(f"{where}: {value} is too large; use at most {rule['most']:g}")
    if "known" in rule:
        return names.find({known: known for known in rule["known"]}, value, where)
    if isinstance(value, dict):
        for key, number in value.items():
            if type(number) not in (int, float):
                raise ConfigError(f"{where}: {key} is {number!r}; use a number")
    return value


@dataclass(frozen=True, slots=True)
class ClusterPart(Part):
    """Instances. Those of decode form one lock-step group."""

    table: ClassVar[str] = "cluster"
    nodes: int = _setting(1, "nodes of decode instances", least=1)
    instances_per_node: int = _setting(8, "decode instances of a node, one an accelerator", least=1)
    prefill_instances: int = _setting(8, "prefill instances; 0: KV is there when a request arrives", least=0)
    max_num_seqs: int = _setting(256, "requests bound to one decode instance at a time", least=1)
    max_num_batched_tokens: int = _setting(8192, "prompt tokens of one prefill step", least=1)
    page_size: int = _setting(64, "tokens of a page, a power of two", least=1)
    kv_tokens: int | None = _setting(None, "tokens an instance holds KV of (default: what the model leaves)", least=1)

    @property
    def num_decode(self) -> int:
        return self.nodes * self.instances_per_node


@dataclass(frozen=True, slots=True)
class HardwarePart(Part):
    """Machines by name (sim.hardware), and what is to be different about the decode instances'."""

    table: ClassVar[str] = "hardware"
    name: str = _setting("H200", "of decode instances", known=HARDWARE)
    prefill: str | None = _setting(None, "of prefill instances (default: the same)", known=HARDWARE)
    bf16_tflops: float | None = _setting(None, "peak, dense", above=0.0)
    fp8_tflops: float | None = _setting(None, "peak, dense", above=0.0)
    memory_gb: float | None = _setting(None, "of 10^9 bytes", above=0.0)
    memory_gb_per_s: float | None = _setting(None, "bandwidth of memory", above=0.0)
    fabric_gb_per_s: float | None = _setting(None, "to another instance of the node, one direction", above=0.0)


@dataclass(frozen=True, slots=True)
class ModelPart(Part):
    """A model by name (sim.model_shapes) and the types it is served in."""

    table: ClassVar[str] = "model"
    name: str = _setting("DeepSeek-V3", "one of the built-in shapes", known=MODELS)
    weights: str = _setting("fp8", "type of weights and of products with them", known=DTYPE_BYTES)
    kv: str = _setting("bf16", "type of the KV cache", known=DTYPE_BYTES)


@dataclass(frozen=True, slots=True)
class LinkPart(Part):
    """What connects nodes, and prefill to decode."""

    table: ClassVar[str] = "link"
    gbps: float | None = _setting(None, "Gbit/s of one instance (default: the hardware's)", above=0.0)
    latency_us: float | None = _setting(None, "one way (default: the hardware's)", least=0.0)


@dataclass(frozen=True, slots=True)
class PolicyPart(Part):
    """Who goes where, and how KV is handed over."""

    table: ClassVar[str] = "policy"
    name: str = _setting("dual-balanced", "a scheduling policy, with its parameter: uniform-cp:4")
    steps: int = _setting(1, "steps that one decision is used for", least=1)
    transfer: str = _setting("full", "scheme of the hand-over", known=SCHEMES)
    select_ratio: float = _setting(0.1, "of the context that a decode step reads", least=0.0, most=1.0)
    on_demand_ratio: float = _setting(0.1, "of these entries, fetched when decode begins", least=0.0, most=1.0)
    metadata_ratio: float = _setting(0.0, "bytes of the selector's metadata over those of KV", least=0.0, most=1.0)


@dataclass(frozen=True, slots=True)
class DecodePart(Part):
    """How decode instances work together."""

    table: ClassVar[str] = "decode"
    lock_step: bool = _setting(True, "all step together; without, each on its own, by a policy of degree 1")
    cross_nodes: bool = _setting(False, "KV of one request may lie on several nodes")
    two_batch_overlap: bool = _setting(False, "two halves of a batch, one computes while the other communicates")
    routes: str = _setting("routed", "queries and results of CP: routed, or by a dense collective", known=ROUTES)
    graphs: str = _setting("whole", "a CUDA graph for a whole step, or piecewise", known=GRAPHS)
    graph_gap_us: float = _setting(30.0, "of each layer, between the pieces of its graph", least=0.0)
    aging_s: float = _setting(5.0, "how long a request that does not fit may be overtaken", least=0.0)
    first_token: str = _setting(
        "arrival", "of requests that come with their KV: told at arrival, or at admission", known=FIRST_TOKENS
    )
    tpot_slo_ms: float = _setting(50.0, "that requests are to meet", above=0.0)


@dataclass(frozen=True, slots=True)
class WorkloadPart(Part):
    """Which requests, and when."""

    table: ClassVar[str] = "workload"
    trace: str | None = _setting(None, "a Mooncake JSONL or Azure CSV file, relative to the scenario's")
    mix: str | None = _setting(None, "synthetic lengths instead of a trace (default: issue1)", known=mixes.MIXES)
    requests: int | None = _setting(None, "how many (default: the whole trace, 1000 of a mix)", least=1)
    rate: float | None = _setting(None, "requests a second (default: the trace's own, 40 of a mix)", above=0.0)
    arrivals: str | None = _setting(None, "trace (its own times), poisson, gamma or constant", known=ARRIVALS)
    cv: float = _setting(1.0, "coefficient of variation of gamma arrivals", least=0.0, most=100.0)
    seed: int = _setting(0, "of everything random", least=0)


@dataclass(frozen=True, slots=True)
class CostsPart(Part):
    """Where times come from."""

    table: ClassVar[str] = "costs"
    kind: str = _setting("roofline", "roofline, table, fitted or null", known=COSTS)
    file: str | None = _setting(None, "measured costs, for table and fitted; relative to the scenario's")
    constants: dict[str, float] = field(default_factory=dict, metadata={"help": "calibrated constants to replace"})
