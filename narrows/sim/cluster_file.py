"""A scenario as a TOML file: cluster, machine, model, links, policy, workload and costs, each a table of its own.

    [cluster]
    nodes = 4
    instances_per_node = 8

    [workload]
    mix = "issue1"
    rate = 40.0

What a table does not say has the default below. An error names file, line and field, and the fix.
"""

import re
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from narrows.core.scheme import SCHEMES
from narrows.errors import ConfigError
from narrows.sched.registry import make_policy
from narrows.sim import calibration, mixes, names, traces, workload
from narrows.sim.cost import Cost, Null
from narrows.sim.hardware import DTYPE_BYTES, GBPS, HARDWARE, Hardware, hardware_named
from narrows.sim.measured import Fitted, Table, read_costs
from narrows.sim.model_shapes import MODELS, ModelShape, model_named
from narrows.sim.roofline import Roofline
from narrows.sim.workload import Trace

ARRIVALS = ("trace", "poisson", "gamma", "constant")
COSTS = ("roofline", "table", "fitted", "null")


def _setting(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, slots=True)
class ClusterPart:
    """Instances. Those of decode form one lock-step group."""

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
class HardwarePart:
    """Machines by name (sim.hardware), and what is to be different about the decode instances'."""

    name: str = _setting("H200", "of decode instances", known=HARDWARE)
    prefill: str | None = _setting(None, "of prefill instances (default: the same)", known=HARDWARE)
    bf16_tflops: float | None = _setting(None, "peak, dense", above=0.0)
    fp8_tflops: float | None = _setting(None, "peak, dense", above=0.0)
    memory_gb: float | None = _setting(None, "of 10^9 bytes", above=0.0)
    memory_gb_per_s: float | None = _setting(None, "bandwidth of memory", above=0.0)
    fabric_gb_per_s: float | None = _setting(None, "to another instance of the node, one direction", above=0.0)


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A model by name (sim.model_shapes) and the types it is served in."""

    name: str = _setting("DeepSeek-V3", "one of the built-in shapes", known=MODELS)
    weights: str = _setting("fp8", "type of weights and of products with them", known=DTYPE_BYTES)
    kv: str = _setting("bf16", "type of the KV cache", known=DTYPE_BYTES)


@dataclass(frozen=True, slots=True)
class LinkPart:
    """What connects nodes, and prefill to decode."""

    gbps: float | None = _setting(None, "Gbit/s of one instance (default: the hardware's)", above=0.0)
    latency_us: float | None = _setting(None, "one way (default: the hardware's)", least=0.0)


@dataclass(frozen=True, slots=True)
class PolicyPart:
    """Who goes where, and how KV is handed over."""

    name: str = _setting("dual-balanced", "a scheduling policy, with its parameter: uniform-cp:4")
    steps: int = _setting(1, "steps that one decision is used for", least=1)
    transfer: str = _setting("full", "scheme of the hand-over", known=SCHEMES)
    select_ratio: float = _setting(0.1, "of the context that a decode step reads", least=0.0, most=1.0)
    on_demand_ratio: float = _setting(0.1, "of these entries, fetched when decode begins", least=0.0, most=1.0)
    metadata_ratio: float = _setting(0.0, "bytes of the selector's metadata over those of KV", least=0.0, most=1.0)


@dataclass(frozen=True, slots=True)
class WorkloadPart:
    """Which requests, and when."""

    trace: str | None = _setting(None, "a Mooncake JSONL or Azure CSV file, relative to the scenario's")
    mix: str | None = _setting(None, "synthetic lengths instead of a trace (default: issue1)", known=mixes.MIXES)
    requests: int | None = _setting(None, "how many (default: the whole trace, 1000 of a mix)", least=1)
    rate: float | None = _setting(None, "requests a second (default: the trace's own, 40 of a mix)", above=0.0)
    arrivals: str | None = _setting(None, "trace (its own times), poisson, gamma or constant", known=ARRIVALS)
    cv: float = _setting(1.0, "coefficient of variation of gamma arrivals", least=0.0, most=100.0)
    seed: int = _setting(0, "of everything random", least=0)


@dataclass(frozen=True, slots=True)
class CostsPart:
    """Where times come from."""

    kind: str = _setting("roofline", "roofline, table, fitted or null", known=COSTS)
    file: str | None = _setting(None, "measured costs, for table and fitted; relative to the scenario's")
    constants: dict[str, float] = field(default_factory=dict, metadata={"help": "calibrated constants to replace"})


@dataclass(frozen=True, slots=True)
class Scenario:
    """All of a simulation's inputs. `path` is the file that others are named relative to; None: the working folder."""

    cluster: ClusterPart = ClusterPart()
    hardware: HardwarePart = HardwarePart()
    model: ModelPart = ModelPart()
    link: LinkPart = LinkPart()
    policy: PolicyPart = PolicyPart()
    workload: WorkloadPart = WorkloadPart()
    costs: CostsPart = CostsPart()
    path: Path | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError naming table and field: `cluster.nodes: 0 ...`."""
        for part in PARTS:
            _check(part, getattr(self, part))
        if self.cluster.page_size & (self.cluster.page_size - 1):
            below = 1 << self.cluster.page_size.bit_length() - 1
            raise ConfigError(
                f"cluster.page_size: {self.cluster.page_size} is not a power of two; try {below} or {2 * below}"
            )
        try:
            make_policy(self.policy.name)
        except ConfigError as error:
            raise ConfigError(f"policy.name: {str(error).removeprefix('policy: ')}") from None
        said = self.workload
        if said.trace is not None and said.mix is not None:
            raise ConfigError("workload.mix: given together with workload.trace; leave one of them out")
        if said.trace is None and said.arrivals == "trace":
            raise ConfigError("workload.arrivals: 'trace' needs workload.trace; add it, or use poisson")
        if self.costs.kind in ("table", "fitted") and self.costs.file is None:
            raise ConfigError(f"costs.file: missing, and costs of kind {self.costs.kind} come from one; add it")
        for name, value in self.costs.constants.items():
            if name not in calibration.CONSTANTS:
                raise ConfigError(f"costs.constants: {name!r} is not known{names.nearest(name, calibration.CONSTANTS)}")
            if not 0 <= value < float("inf"):
                raise ConfigError(f"costs.constants: {name} is {value}; use a number of at least 0")
        if self.kv_tokens < self.cluster.page_size:
            raise ConfigError(
                f"model.name: {self.model.name} leaves no room for KV on {self.cluster.num_decode} instances of "
                f"{self.hardware.name}; use more instances, or set cluster.kv_tokens"
            )

    @property
    def model_shape(self) -> ModelShape:
        return model_named(self.model.name)

    @property
    def decode_hardware(self) -> Hardware:
        said = self.hardware
        changes: dict[str, Any] = {
            "bf16_flops": _times(said.bf16_tflops, 1e12),
            "fp8_flops": _times(said.fp8_tflops, 1e12),
            "memory_bytes": None if said.memory_gb is None else int(said.memory_gb * 1e9),
            "memory_bytes_per_s": _times(said.memory_gb_per_s, 1e9),
            "fabric_bytes_per_s": _times(said.fabric_gb_per_s, 1e9),
            "per_node": self.cluster.instances_per_node,
        }
        return self._linked(hardware_named(said.name), changes)

    @property
    def prefill_hardware(self) -> Hardware:
        if self.hardware.prefill is None:
            return self.decode_hardware
        return self._linked(hardware_named(self.hardware.prefill), {})

    def _linked(self, hardware: Hardware, changes: dict[str, Any]) -> Hardware:
        changes["link_bytes_per_s"] = _times(self.link.gbps, GBPS)
        changes["link_latency_s"] = _times(self.link.latency_us, 1e-6)
        changed = {name: value for name, value in changes.items() if value is not None}
        return replace(hardware, kind=hardware.device, **changed)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV one decode instance holds, whole pages."""
        tokens = self.cluster.kv_tokens
        if tokens is None:
            tokens = self._roofline(self.decode_hardware).kv_tokens(self.cluster.num_decode)
        return tokens // self.cluster.page_size * self.cluster.page_size

    def decode_cost(self) -> Cost:
        """Raises ConfigError when a file of costs is unusable."""
        return self._cost(self.decode_hardware)

    def prefill_cost(self) -> Cost:
        return self._cost(self.prefill_hardware)

    def _roofline(self, hardware: Hardware) -> Roofline:
        return Roofline(hardware, self.model_shape, self.model.weights, self.model.kv, self.costs.constants)

    def _cost(self, hardware: Hardware) -> Cost:
        if self.costs.kind == "roofline":
            return self._roofline(hardware)
        if self.costs.kind == "null":
            return Null(num_layers=self.model_shape.num_layers)
        assert self.costs.file is not None
        file = read_costs(self._beside(self.costs.file))
        return Table(file) if self.costs.kind == "table" else Fitted(file)

    def trace(self) -> Trace:
        """The requests. Raises ConfigError naming file, line and field, also when one is longer than the cluster."""
        said = self.workload
        most = self.kv_tokens * self.cluster.num_decode
        if said.trace is not None:
            trace = traces.read_trace(self._beside(said.trace), said.requests, most)
            kind = said.arrivals or "trace"
            rate = said.rate or workload.rate_of(trace)
        else:
            count = said.requests or 1000
            kind, rate = said.arrivals or "poisson", said.rate or 40.0
            lengths = mixes.mix(said.mix or "issue1", count, said.seed)
            trace = workload.arrivals(lengths, workload.constant_times(count, rate))
            for index, arrival in enumerate(trace):
                if arrival.num_tokens > most:
                    raise ConfigError(
                        f"workload.mix: request {index} has {arrival.num_tokens} tokens, more than the cluster can "
                        f"hold of a request ({most}); use more instances, or set cluster.kv_tokens"
                    )
        try:
            return _timed(trace, kind, rate, said)
        except ConfigError as error:
            raise ConfigError(f"workload.{error}") from None

    def _beside(self, name: str) -> Path:
        return Path(name) if self.path is None else self.path.parent / name


PARTS = {spec.name: get_type_hints(Scenario)[spec.name] for spec in fields(Scenario) if spec.name != "path"}


def _timed(trace: Trace, kind: str, rate: float, said: WorkloadPart) -> Trace:
    if kind == "trace":
        return trace if said.rate is None else workload.rescaled(trace, rate)
    if kind == "constant":
        return workload.spaced(trace, workload.constant_times(len(trace), rate))
    return workload.spaced(
        trace, workload.gamma_times(len(trace), rate, said.cv if kind == "gamma" else 1.0, said.seed)
    )


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


# -- files and checks ------------------------------------------------------------------------------------------------


def read_scenario(path: Path) -> Scenario:
    """A scenario file. Raises ConfigError naming file, line and field, and the fix."""
    try:
        text = path.read_text(encoding="utf-8")
        said = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"scenario: {path} can not be read: {error.strerror or error}; name a file that exists"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"scenario: {path} is not valid TOML: {error}") from None
    try:
        return make_scenario(said, path)
    except ConfigError as error:
        raise ConfigError(f"{path}{_line(text, str(error).partition(':')[0])}: {error}") from None


def make_scenario(said: dict[str, Any], path: Path | None = None) -> Scenario:
    """A scenario of tables by name. Raises ConfigError naming table and field."""
    parts: dict[str, Any] = {}
    for name, table in said.items():
        if name not in PARTS:
            raise ConfigError(f"{name}: unknown table{names.nearest(name, PARTS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: {table!r} is no table; write [{name}] and its settings below")
        known = [spec.name for spec in fields(PARTS[name])]
        for key in table:
            if key not in known:
                raise ConfigError(f"{name}.{key}: unknown setting{names.nearest(key, known)}")
        parts[name] = PARTS[name](**table)
    return Scenario(**parts, path=path)


def _line(text: str, where: str) -> str:
    """`:line` of a table's key in a TOML text as people write it, or of the table; nothing where it can not be told."""
    table, _, key = where.partition(".")
    inside, found = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        header = re.match(r"\[\s*([\w-]+)\s*(?:\.\s*[\w-]+\s*)?\]", line)
        if header:
            inside = header[1] == table
            found = found or (f":{number}" if inside else "")
            if inside and key and re.match(rf"\[\s*{re.escape(table)}\s*\.\s*{re.escape(key)}\s*\]", line):
                return f":{number}"
        elif re.match(rf"{re.escape(key if inside else where)}\s*=", line):
            return f":{number}"
    return found


_KINDS = {int: "a whole number", float: "a number", str: "text", dict: "a table"}


def _check(name: str, part: Any) -> None:
    """Every field of a part has its type and is in its range; a whole number serves where a number is asked for."""
    hints = get_type_hints(type(part))
    for spec in fields(part):
        value, where, rule = getattr(part, spec.name), f"{name}.{spec.name}", spec.metadata
        kinds = [getattr(kind, "__origin__", kind) for kind in get_args(hints[spec.name]) or ()]
        kinds = kinds if type(None) in kinds else [getattr(hints[spec.name], "__origin__", hints[spec.name])]
        if float in kinds and type(value) is int:
            value = float(value)
            object.__setattr__(part, spec.name, value)
        if type(value) not in kinds:
            wanted = " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
            raise ConfigError(f"{where}: {value!r} has the wrong type; use {wanted}")
        if value is None:
            continue
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise ConfigError(f"{where}: {value} is not allowed; use a finite number")
        if "least" in rule and value < rule["least"]:
            raise ConfigError(f"{where}: {value} is too small; use at least {rule['least']}")
        if "above" in rule and value <= rule["above"]:
            raise ConfigError(f"{where}: {value} is too small; use a number above {rule['above']:g}")
        if "most" in rule and value > rule["most"]:
            raise ConfigError(f"{where}: {value} is too large; use at most {rule['most']:g}")
        if "known" in rule:
            object.__setattr__(part, spec.name, names.find({known: known for known in rule["known"]}, value, where))
        if isinstance(value, dict):
            for key, number in value.items():
                if type(number) not in (int, float):
                    raise ConfigError(f"{where}: {key} is {number!r}; use a number")
