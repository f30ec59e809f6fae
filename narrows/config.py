"""Settings: frozen, checked together once, from the command line over a TOML file over the defaults."""

import difflib
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from narrows.core.scheme import SCHEMES, Scheme
from narrows.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
MAX_PAGE_SIZE = 1024
SELECTORS = ("exact", "quest", "infinigen", "hata", "streaming")
LANES = ("parallel", "serial")
FETCHED = ("packed", "raw")


def setting(default: Any, text: str, **more: Any) -> Any:
    """A field with its help text. `choices` limits its values."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a cluster on one machine is built. Names follow vLLM's where the meaning is the same."""

    model: str = setting(DEFAULT_MODEL, "a Hugging Face folder, a GGUF file, or a known name")
    served_model_name: str | None = setting(None, "what clients call the model (default: the name of the folder)")
    dtype: str = setting("bfloat16", "type of weights and KV", choices=("bfloat16", "float32"))
    prefill: int = setting(1, "number of prefill instances")
    decode: int = setting(1, "number of decode instances")
    max_model_len: int | None = setting(None, "tokens of prompt and answer together (default: what the model allows)")
    max_num_seqs: int = setting(16, "requests an instance works on at once")
    max_num_batched_tokens: int = setting(1024, "tokens of one prefill step; longer prompts are computed in chunks")
    max_queue: int = setting(256, "requests that may wait; more are refused with 429")
    page_size: int = setting(32, "tokens of a KV page, a power of two")
    kv_cache_memory_bytes: int | None = setting(
        None, "KV pool of each instance (default: four contexts of the model, at most a tenth of the memory)"
    )
    enable_prefix_caching: bool = setting(True, "keep the KV of finished prompts for later ones that begin alike")
    policy: str = setting(
        "least-batch",
        "how decode instances are chosen: round-robin, least-batch, least-cache, vllm, sglang-tokens or dynamo-cost",
    )
    transport: str = setting("auto", "how KV crosses (auto: shm on one machine)", choices=("auto", "shm", "tcp"))
    link_gbps: float | None = setting(None, "limit what each instance sends, in Gbit/s, to try a narrow link")
    checksums: bool = setting(False, "verify every frame of KV (auto is tcp then)")
    select: str = setting(
        "none", "which KV a decode step reads: all, or what an algorithm picks", choices=("none", *SELECTORS)
    )
    select_ratio: float = setting(0.2, "at most this part of a request's KV is selected, above 0 to 1")
    transfer: str = setting(
        "auto", "which KV crosses before decode begins (auto: as much as the link lets)", choices=tuple(SCHEMES)
    )
    speculative: str | None = setting(
        None, "part of all KV blocks sent in idle time for each decode step, 0 to 1, or auto (default: the scheme's)"
    )
    lanes: str | None = setting(
        None, "local and remote KV of a step at once or one by one (default: the scheme's)", choices=LANES
    )
    fetched: str | None = setting(
        None, "KV fetched on demand crosses losslessly packed, or raw (default: the scheme's)", choices=FETCHED
    )
    landing: str = setting(
        "direct", "fetched KV lands in compute memory, or staged in host memory", choices=("direct", "staged")
    )
    importance: str | None = setting(None, "importance profile to push by (default: made on first use and kept)")
    trace: str | None = setting(None, "write a timeline of compute and traffic here, for chrome://tracing or Perfetto")
    kernels: str = setting("auto", "CPU kernels", choices=("auto", "native", "reference"))
    threads: int | None = setting(None, "compute threads of each instance (default: all cores)")
    max_restarts: int = setting(5, "how often within ten minutes a lost instance is started again")
    silence_s: float = setting(20.0, "an instance that says nothing for so many seconds is taken for dead")

    def __post_init__(self) -> None:
        _as_text(self, "speculative")
        _check_types(self)
        for name in ("prefill", "decode", "max_num_seqs", "max_num_batched_tokens", "max_queue", "page_size"):
            _at_least(self, name, 1)
        for name, least in (("max_model_len", 2), ("threads", 1), ("kv_cache_memory_bytes", 1), ("max_restarts", 0)):
            if getattr(self, name) is not None:
                _at_least(self, name, least)
        if self.page_size & (self.page_size - 1):
            near = 1 << self.page_size.bit_length() - 1
            raise ConfigError(f"page_size: {self.page_size} is not a power of two; try {near} or {2 * near}")
        if self.page_size > MAX_PAGE_SIZE:
            raise ConfigError(f"page_size: {self.page_size} is too large; use at most {MAX_PAGE_SIZE}")
        if self.link_gbps is not None and not 0.001 <= self.link_gbps <= 10_000:
            raise ConfigError(f"link_gbps: {self.link_gbps} is out of range; use 0.001 to 10000 Gbit/s")
        if not 1.0 <= self.silence_s <= 3600:
            raise ConfigError(f"silence_s: {self.silence_s} is out of range; use 1 to 3600 seconds")
        if self.served_model_name == "":
            raise ConfigError("served_model_name: is empty; name the model or leave it out")
        if not 0.0 < self.select_ratio <= 1.0:
            raise ConfigError(f"select_ratio: {self.select_ratio} is out of range; use a number above 0, at most 1")
        if self.select == "none" and self.transfer not in ("auto", "full"):
            raise ConfigError(
                f"transfer: {self.transfer} needs a selector, since decode without one reads all KV; "
                "add select (infinigen, for instance), or use transfer full"
            )
        _ = self.scheme  # which checks `speculative`
        _check_policy(self.policy)
        if self.checksums and self.transport == "shm":
            raise ConfigError("checksums: shm copies KV without frames to check; use transport tcp, or auto")
        for spec in fields(self):
            choices = spec.metadata.get("choices")
            if choices and getattr(self, spec.name) not in (*choices, spec.default):
                raise ConfigError(
                    f"{spec.name}: {getattr(self, spec.name)!r} is not known; use one of {', '.join(choices)}"
                )

    @property
    def scheme(self) -> Scheme:
        """How KV is handed over. Without a selector decode reads all of it, so all of it crosses first."""
        scheme = SCHEMES["full" if self.select == "none" else self.transfer]
        if self.lanes is not None:
            scheme = replace(scheme, parallel_lanes=self.lanes == "parallel")
        if self.fetched is not None:
            scheme = replace(scheme, packed=self.fetched == "packed")
        if self.speculative is None:
            return scheme
        if self.speculative == "auto":
            return replace(scheme, speculative=None)
        try:
            share = float(self.speculative)
        except ValueError:
            share = -1.0
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"speculative: {self.speculative!r} is not a part; use a number from 0 to 1, or auto")
        return replace(scheme, speculative=share)

    @property
    def transport_kind(self) -> str:
        """What `auto` means here: all instances are on one machine, and shared memory has no frames to check."""
        if self.transport != "auto":
            return self.transport
        return "tcp" if self.checksums else "shm"


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the HTTP server listens."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    api_key: str | None = setting(None, "clients must send it as a bearer token")
    max_body_bytes: int = setting(8 * 1024 * 1024, "larger request bodies are refused with 413")

    def __post_init__(self) -> None:
        _check_types(self)
        if self.api_key == "":
            raise ConfigError("api_key: is empty, which would let everyone in; set a key or leave it out")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is not a port; use 0 to 65535")
        _at_least(self, "max_body_bytes", 1024)


def read_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, flat, by the names of the fields above; the configs check their values.

    Raises ConfigError naming the file and what is wrong.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: {path} can not be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}") from None
    known = [spec.name for cls in (EngineConfig, ServerConfig) for spec in fields(cls)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
            raise ConfigError(f"config: {path}: unknown setting {name!r}{hint}")
    return values


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _as_text(config: Any, name: str) -> None:
    """A field of text that a file or a program may give as a number."""
    if type(getattr(config, name)) in (int, float):
        object.__setattr__(config, name, str(getattr(config, name)))


def _check_types(config: Any) -> None:
    """Every field has its type; a whole number serves where a number is asked for."""
    hints = get_type_hints(type(config))
    for spec in fields(config):
        value, hint = getattr(config, spec.name), hints[spec.name]
        kinds = get_args(hint) or (hint,)
        if float in kinds and type(value) is int:
            object.__setattr__(config, spec.name, float(value))
        elif type(value) not in kinds:
            wanted = " or ".join(_KINDS[kind] for kind in kinds if kind is not type(None))
            raise ConfigError(f"{spec.name}: {value!r} has the wrong type; use {wanted}")


def _check_policy(policy: str) -> None:
    from narrows.sched.registry import make_policy  # which loads numpy: --help does not wait for it

    make_policy(policy, local=True)


def _at_least(config: Any, name: str, least: int) -> None:
    if getattr(config, name) < least:
        raise ConfigError(f"{name}: {getattr(config, name)} is too small; use at least {least}")
