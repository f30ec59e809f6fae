"""`narrows bench engine`: decode, prefill, hand-over and start of the real cluster against transformers, in one run.

Rounds alternate between the two, medians are shown. Both decode greedily in the same dtype, from the same prompt,
without stopping; decode speed is taken from the second token on, so neither prefill nor hand-over is in it.
"""

import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from narrows.bench.machine import Probe
from narrows.bench.results import document, show
from narrows.config import EngineConfig
from narrows.core.events import Event, EventKind
from narrows.core.ids import RequestId
from narrows.core.request import Request, SamplingParams
from narrows.demo import long_prompt
from narrows.errors import ConfigError
from narrows.kernels import load as load_kernels
from narrows.launch import console, started
from narrows.llm import LLM
from narrows.metrics.definitions import RequestMetrics, measure
from narrows.models.catalog import resolve
from narrows.models.spec import ModelSpec, read_spec
from narrows.runtime.dtypes import DTYPES
from narrows.runtime.sizing import DTYPE_BYTES
from narrows.server.serve import bind
from narrows.testing.cluster import MemoryCluster

SHORT, LONG = 64, 4096
READY_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Row:
    """One case. `ratio` above 1 means that ours is better, whatever the unit; `ceiling` is in the same unit."""

    case: str
    ours: float
    reference: float
    ratio: float
    unit: str
    ceiling: float | None
    target: float | None
    against: str


class Transformers:
    """The reference: `generate` of transformers, with the time of each step."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.train(False)

    def times(self, prompt: Sequence[int], batch: int, num_tokens: int) -> list[float]:
        """Seconds from the start until each of num_tokens steps was done."""
        from transformers import StoppingCriteriaList

        stamps: list[float] = []

        def stamp(*_: Any, **__: Any) -> Any:
            stamps.append(time.perf_counter() - began)
            return torch.zeros(batch, dtype=torch.bool)

        ids = torch.tensor([list(prompt)] * batch)
        with torch.inference_mode():
            began = time.perf_counter()
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([stamp]),
            )
        return stamps


class Ours:
    """The cluster, watched by its events."""

    def __init__(self, llm: LLM, events: list[Event]) -> None:
        self._llm = llm
        self._events = events

    def run(self, prompt: Sequence[int], batch: int, num_tokens: int) -> list[RequestMetrics]:
        self._events.clear()
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self._llm.generate([list(prompt)] * batch, params)
        return list(measure(self._events).values())

    def run_beside(self, short: Sequence[int], long: Sequence[int], num_tokens: int) -> tuple[float, float]:
        """Decode `short`, and meanwhile compute `long`: median gap between the tokens of the one until the first token
        of the other, and that token's TTFT."""
        self._events.clear()
        with ThreadPoolExecutor(1) as pool:
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
            decoding = pool.submit(self._llm.generate, [list(short)], params)
            while sum(event.kind is EventKind.TOKEN for event in list(self._events)) < num_tokens // 8:
                time.sleep(0.001)
            self._llm.generate([list(long)], replace(params, max_tokens=1))
            decoding.result()
        decoded, computed = measure(self._events).values()
        (first_s,) = computed.token_times_s
        during = [at for at in decoded.token_times_s if computed.arrival_s <= at <= first_s]
        return median(later - earlier for earlier, later in pairwise(during)), first_s - computed.arrival_s

    def handover_to_last_s(self) -> float:
        """Of the last run: from the arrival of all KV at decode to the last token."""
        done = next(event.time_s for event in self._events if event.kind is EventKind.HANDOVER_DONE)
        return max(event.time_s for event in self._events if event.kind is EventKind.TOKEN) - done


@contextlib.contextmanager
def _ours(config: EngineConfig) -> Iterator[Ours]:
    events: list[Event] = []
    with LLM(**asdict(config), observers=[events.append]) as llm:
        yield Ours(llm, events)


def run(config: EngineConfig, *, cases: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measure the cases, print them, return the result document. Raises ConfigError for an unknown case."""
    unknown = set(cases) - set(CASES)
    if unknown:
        raise ConfigError(f"case: {', '.join(sorted(unknown))} is not known; choose from {', '.join(CASES)}")
    config = replace(config, enable_prefix_caching=False)
    bench = Bench(config, rounds)
    rows: list[dict[str, Any]] = []
    for case in cases or CASES:
        console.print(f"measuring {case} ...", style="dim")
        rows += map(asdict, CASES[case](bench))
    show(f"{config.model}, {config.dtype}, {torch.get_num_threads()} threads; ratio: above 1 ours is better", rows)
    return document("engine", {**asdict(config), "rounds": rounds}, rows)


class Bench:
    """What the cases share."""

    def __init__(self, config: EngineConfig, rounds: int) -> None:
        self.config = config
        self.rounds = rounds
        self.folder = resolve(config.model)
        self.probe = Probe()
        self.spec = read_spec(self.folder)
        from narrows.server.tokenizer import Tokenizer

        self.text = long_prompt(Tokenizer(self.folder), min(LONG, self.spec.max_positions - 128))
        self._reference: Transformers | None = None

    @property
    def reference(self) -> Transformers:
        if self._reference is None:
            self._reference = Transformers(self.folder, self.config.dtype)
        return self._reference

    def in_turn(self, ours: Callable[[], float], reference: Callable[[], float]) -> tuple[float, float]:
        """Medians of both, measured alternately after one warm-up each."""
        pairs = [(ours(), reference()) for _ in range(self.rounds + 1)][1:]
        return median(a for a, _ in pairs), median(b for _, b in pairs)


def _decode(case: str, batch: int, prompt_tokens: int, num_tokens: int) -> Callable[[Bench], list[Row]]:
    def measure_case(bench: Bench) -> list[Row]:
        prompt = bench.text[:prompt_tokens]
        readings = [bench.probe.bytes_per_s()]
        with _ours(bench.config) as engine:
            ours, reference = bench.in_turn(
                lambda: _together(engine.run(prompt, batch, num_tokens)),
                lambda: _steady(bench.reference.times(prompt, batch, num_tokens), batch),
            )
        readings.append(bench.probe.bytes_per_s())
        reads = step_bytes(bench.spec, bench.config.dtype, batch * (prompt_tokens + num_tokens // 2))
        gb_per_s, most = ours / batch * reads / 1e9, max(readings) / 1e9
        return [
            Row(case, ours, reference, ours / reference, "tokens/s", batch * most * 1e9 / reads, 1.5, "transformers"),
            Row(f"{case}-bandwidth", gb_per_s, most, gb_per_s / most, "GB/s", most, None, "read bandwidth"),
        ]

    return measure_case


def _together(metrics: Sequence[RequestMetrics]) -> float:
    """Tokens per second while all requests decode: behind the last second token, up to the first last one."""
    begin = max(one.token_times_s[1] for one in metrics)
    end = min(one.token_times_s[-1] for one in metrics)
    return sum(begin < at <= end for one in metrics for at in one.token_times_s) / (end - begin)


def _steady(stamps: Sequence[float], batch: int) -> float:
    return batch * (len(stamps) - 2) / (stamps[-1] - stamps[1])


def _prefill(bench: Bench) -> list[Row]:
    peaks = [bench.probe.flop_per_s()]
    with _ours(bench.config) as engine:
        ours, reference = bench.in_turn(
            lambda: engine.run(bench.text, 1, 1)[0].ttft_s or 0.0,
            lambda: bench.reference.times(bench.text, 1, 1)[0],
        )
    peaks.append(bench.probe.flop_per_s())
    ceiling = prefill_flop(bench.spec, len(bench.text)) / max(peaks)
    return [Row(f"prefill-{len(bench.text)}", ours, reference, reference / ours, "s", ceiling, 1.3, "transformers")]


def _handover(bench: Bench) -> list[Row]:
    """Decode behind a hand-over between processes, against the same engine with both phases in one process."""
    prompt, num_tokens = bench.text[:2048], 64
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    with _ours(bench.config) as engine, MemoryCluster(bench.config, bench.folder) as inside:

        def one_process() -> float:
            inside.events.clear()
            with workers_threads(bench.config):
                inside.generate([Request(RequestId(f"r{time.monotonic_ns()}"), tuple(prompt), params)])
            done = next(e.time_s for e in inside.events if e.kind is EventKind.HANDOVER_DONE)
            return max(e.time_s for e in inside.events if e.kind is EventKind.TOKEN) - done

        def two_processes() -> float:
            engine.run(prompt, 1, num_tokens)
            return engine.handover_to_last_s()

        ours, reference = bench.in_turn(two_processes, one_process)
    return [Row("handover-decode", ours, reference, reference / ours, "s", None, 0.95, "one process")]


def _beside(bench: Bench) -> list[Row]:
    """Both instances at once on the same cores, against each alone: a fair share is half."""
    short, num_tokens = bench.text[:SHORT], 600
    with _ours(bench.config) as engine:
        rounds = []
        for _ in range(bench.rounds + 1):  # the first is a warm-up
            alone_tbt = median(engine.run(short, 1, num_tokens)[0].tbt_s)
            alone_ttft = engine.run(bench.text, 1, 1)[0].ttft_s or 0.0
            rounds.append((*engine.run_beside(short, bench.text, num_tokens), alone_tbt, alone_ttft))
    tbt, ttft, alone_tbt, alone_ttft = map(median, zip(*rounds[1:], strict=True))
    return [
        Row("tbt-beside-prefill", tbt, alone_tbt, alone_tbt / tbt, "s", 2 * alone_tbt, None, "alone"),
        Row("ttft-beside-decode", ttft, alone_ttft, alone_ttft / ttft, "s", 2 * alone_ttft, None, "alone"),
    ]


@contextlib.contextmanager
def workers_threads(config: EngineConfig) -> Iterator[None]:
    """Torch's threads as a worker process has them: one, where the kernels bring their own."""
    before = torch.get_num_threads()
    if not load_kernels(config.kernels).relies_on_torch(DTYPES[config.dtype]):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _ready(bench: Bench) -> list[Row]:
    """From the command to /ready, warm: the model is converted and the kernels are built."""
    with started(bench.config):
        pass
    seconds = median(time_to_ready(bench.config) for _ in range(bench.rounds))
    return [Row("ready", seconds, READY_LIMIT_S, READY_LIMIT_S / seconds, "s", None, 1.0, "the limit")]


def time_to_ready(config: EngineConfig) -> float:
    """Seconds from starting `narrows serve` to the first 200 from /ready."""
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    began = time.perf_counter()
    flags = {"port": str(port), "model": config.model, "dtype": config.dtype, "kernels": config.kernels}
    server = subprocess.Popen(
        [sys.executable, "-m", "narrows", "serve", *(f"--{name}={value}" for name, value in flags.items())],
        stderr=subprocess.DEVNULL,
    )
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5).close()
                return time.perf_counter() - began
            if server.poll() is not None:
                raise ConfigError(f"narrows serve ended with status {server.returncode}")
            time.sleep(0.02)
    finally:
        server.terminate()
        server.wait()


def prefill_flop(spec: ModelSpec, num_tokens: int) -> float:
    """What a prompt must compute, multiplications and additions: every layer's products for every token, attention over
    the positions before each, the head for one."""
    products = num_tokens * spec.num_layers * layer_weights(spec) + spec.vocab_size * spec.hidden
    attention = (
        spec.num_layers * spec.num_heads * spec.head_dim * num_tokens * (num_tokens + 1)
    )  # half of the square, twice
    return 2.0 * (products + attention)


def layer_weights(spec: ModelSpec) -> int:
    """Elements of one layer's matrices."""
    heads = 2 * spec.num_heads + 2 * spec.num_kv_heads
    return spec.hidden * heads * spec.head_dim + 3 * spec.hidden * spec.intermediate


def step_bytes(spec: ModelSpec, dtype: str, kv_tokens: int) -> int:
    """What one decode step must read: every weight once (the head too, the embedding not), and the KV."""
    weights = spec.num_layers * layer_weights(spec) + spec.vocab_size * spec.hidden
    kv = kv_tokens * spec.num_layers * spec.num_kv_heads * spec.entry_dim
    return (weights + kv) * DTYPE_BYTES[dtype]


CASES: dict[str, Callable[[Bench], list[Row]]] = {
    "decode-b1": _decode("decode-b1", 1, SHORT, 128),
    "decode-b8": _decode("decode-b8", 8, SHORT, 128),
    "decode-b1-4096": _decode("decode-b1-4096", 1, LONG, 48),
    "prefill-4096": _prefill,
    "handover-decode": _handover,
    "beside": _beside,
    "ready": _ready,
}
