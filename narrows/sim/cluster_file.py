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
from typing import Any, get_type_hints

from narrows.errors import ConfigError
from narrows.sched.registry import make_policy
from narrows.sim import calibration, mixes, names, traces, workload
from narrows.sim.cost import Cost, Null
from narrows.sim.hardware import GBPS, Hardware, hardware_named
from narrows.sim.measured import Fitted, Table, read_costs
from narrows.sim.model_shapes import ModelShape, model_named
from narrows.sim.parts import (
    ClusterPart,
    CostsPart,
    DecodePart,
    HardwarePart,
    LinkPart,
    ModelPart,
    PolicyPart,
    WorkloadPart,
)
from narrows.sim.roofline import Roofline
from narrows.sim.workload import Trace


@dataclass(frozen=True, slots=True)
class Scenario:
    """All of a simulation's inputs. `path` is the file that others are named relative to; None: the working folder."""

    cluster: ClusterPart = field(default_factory=ClusterPart)
    hardware: HardwarePart = field(default_factory=HardwarePart)
    model: ModelPart = field(default_factory=ModelPart)
    link: LinkPart = field(default_factory=LinkPart)
    policy: PolicyPart = field(default_factory=PolicyPart)
    decode: DecodePart = field(default_factory=DecodePart)
    workload: WorkloadPart = field(default_factory=WorkloadPart)
    costs: CostsPart = field(default_factory=CostsPart)
    path: Path | None = None

    def __post_init__(self) -> None:
        """What fits no single table. Raises ConfigError naming table and field: `cluster.page_size: 48 ...`."""
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


# -- files ----------------------------------------------------------------------------------------------------------


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
