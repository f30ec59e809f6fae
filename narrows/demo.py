"""The main job in one command: a long real text and a question about it, prefill and decode in separate processes, over
a narrow link, by full transfer and selectively."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

from rich.table import Table

from narrows.bench.plots import Panel, draw
from narrows.config import EngineConfig
from narrows.core.events import Event, EventKind
from narrows.core.request import FinishReason, SamplingParams
from narrows.core.scheme import SCHEMES
from narrows.errors import ConfigError
from narrows.launch import answer, console, figures, started
from narrows.metrics.definitions import RequestMetrics, measure
from narrows.models.catalog import resolve
from narrows.models.spec import read_spec
from narrows.profile.timing import Timing, Work
from narrows.profiles import ensure_files
from narrows.runtime.cluster import LocalCluster
from narrows.runtime.sizing import DTYPE_BYTES
from narrows.server.tokenizer import Tokenizer

QUESTION = "According to the text above, what does the import statement do?"
MIN_PROMPT = 128  # tokens, for the question and some text before it
TT_OVER_TP = 6.5  # as in SmartGen's worst case (section 1)
WARM_UP = 64  # tokens
BOOKS_S = 20.0
_WORDS = {True: "decode waits for all KV", False: "decode begins with what it needs"}


@dataclass(frozen=True, slots=True)
class Run:
    """One answer under one scheme."""

    text: str
    metrics: RequestMetrics


def demo(
    config: EngineConfig, *, num_tokens: int, max_tokens: int, json_file: Path | None, png_file: Path | None
) -> None:
    """Stream the answer over a narrow link, first when all KV has crossed, then as soon as decode can begin; print
    what each took and draw how long a reader waits for each token. Without a selector there is only the first way.

    `config.link_gbps` None: a link that takes TT_OVER_TP times as long for the KV as prefill for the prompt.
    """
    selects = config.select != "none"
    config = replace(config, enable_prefix_caching=False)  # or the second answer would find the first one's KV
    chosen = SCHEMES["selective"] if config.transfer == "auto" else config.scheme
    schemes = [SCHEMES["full"], *([chosen] if selects else [])]
    if selects and config.scheme.full:
        raise ConfigError("transfer: the demo compares with full transfer; choose another, or leave it out")
    config = with_narrow_link(config, num_tokens) if selects else config
    events: list[Event] = []
    with started(config, events) as (cluster, tokenizer):
        check_lengths(num_tokens, max_tokens, cluster.model.max_model_len)
        prompt = long_prompt(tokenizer, num_tokens)
        pids = ", ".join(f"{name} is process {pid}" for name, pid in sorted(cluster.pids().items()))
        link = "" if config.link_gbps is None else f", over a link of {config.link_gbps:.3g} Gbit/s"
        console.print(
            f"{pids}\na prompt of {len(prompt)} tokens{link}: Python's language reference, then\n> {QUESTION}\n",
            soft_wrap=True,
        )
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        for _ in answer(cluster, tokenizer, prompt[-WARM_UP:], replace(params, max_tokens=2)):
            pass  # processes find each other
        runs = {}
        for scheme in schemes:
            if selects:
                cluster.adopt(scheme)
                console.print(f"[bold]{scheme.name}[/bold] ({_WORDS[scheme.full]})", highlight=False)
            runs[scheme.name] = _run(cluster, tokenizer, prompt, params, events)
    if selects:
        same = len({run.text for run in runs.values()}) == 1
        console.print("the answers are " + ("identical" if same else "[red]different, which is a defect[/red]"))
    console.print(_table(runs))
    if png_file is not None and selects:
        _draw(png_file, runs, config)
        console.print(f"how long a reader waits for each token: {png_file}", soft_wrap=True)
    if json_file is not None:
        rows = [
            {"scheme": name, "text": run.text, **figures(run.metrics), "ctl_s": list(run.metrics.cumulative_s)}
            for name, run in runs.items()
        ]
        settings = {"tokens": num_tokens, "link_gbps": config.link_gbps, "select": config.select}
        json_file.write_text(json.dumps({"name": "demo", "config": settings, "results": rows}, indent=2))


def with_narrow_link(config: EngineConfig, num_tokens: int) -> EngineConfig:
    """A link on which the KV of such a prompt takes TT_OVER_TP times as long as its prefill does here."""
    if config.link_gbps is not None:
        return config
    folder = resolve(config.model)
    spec = read_spec(folder)
    timing = ensure_files(config, folder).timing
    assert timing is not None
    prefill_s = Timing.load(Path(timing), model=None, setup=None).prefill_s([Work(num_tokens, num_tokens)])
    kv_bytes = num_tokens * spec.num_layers * spec.num_kv_heads * spec.entry_dim * DTYPE_BYTES[config.dtype]
    return replace(config, link_gbps=max(0.001, kv_bytes * 8e-9 / (TT_OVER_TP * prefill_s)))


def _run(
    cluster: LocalCluster, tokenizer: Tokenizer, prompt: tuple[int, ...], params: SamplingParams, events: list[Event]
) -> Run:
    text, before = [], len(events)
    for piece in answer(cluster, tokenizer, prompt, params):
        if not isinstance(piece, FinishReason):
            text.append(piece)
            print(piece, end="", flush=True)
    print("\n", flush=True)
    deadline = time.monotonic() + BOOKS_S
    while time.monotonic() < deadline and not any(event.kind is EventKind.DELIVERED for event in events[before:]):
        time.sleep(0.02)  # prefill tells what it sent when the request is over
    (metrics,) = measure(events[before:]).values()
    return Run("".join(text), metrics)


def _table(runs: dict[str, Run]) -> Table:
    table = Table(title="What it took", title_justify="left")
    table.add_column("figure")
    for name in runs:
        table.add_column(name, justify="right")

    def row(label: str, show: Callable[[RequestMetrics], str]) -> None:
        table.add_row(label, *(show(run.metrics) for run in runs.values()))

    for label, name in (
        ("TTFT: arrival to first token", "ttft_s"),
        ("TTST: first to second token", "ttst_s"),
        ("arrival to second token", "second_token_s"),
        ("TBT: later gaps, median", "tbt_s"),
    ):
        row(label, partial(_ms, name))
    row("KV that crossed, frames included", lambda m: _mib(m.total_bytes or m.handover_bytes))
    if len(runs) > 1:
        for path in ("metadata", "proactive", "on_demand", "speculative"):
            row(f"  {path.replace('_', '-')}", partial(_path, path))
    row("prompt / cached / answer tokens", lambda m: f"{m.num_prompt_tokens} / {m.cached_tokens} / {m.num_tokens}")
    return table


def _ms(name: str, metrics: RequestMetrics) -> str:
    seconds = figures(metrics)[name]
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _path(path: str, metrics: RequestMetrics) -> str:
    return _mib(sum(getattr(delivered, f"{path}_bytes") for delivered in metrics.delivered))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _draw(path: Path, runs: dict[str, Run], config: EngineConfig) -> None:
    lines = {}
    for name, run in runs.items():
        curve = run.metrics.cumulative_s
        lines[name] = (list(range(1, len(curve) + 1)), list(curve))
    panel = Panel(
        "(time of token i - arrival) / i: lower is better", "token i", "cumulative latency per token, s", lines=lines
    )
    draw(path, f"{config.select} over {config.link_gbps:.3g} Gbit/s", [panel])


def check_lengths(num_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """Whether prompt and answer fit the model together. Raises ConfigError naming what to change."""
    if max_model_len <= MIN_PROMPT:
        raise ConfigError(
            f"max_model_len: {max_model_len} tokens are too few for the demo; use at least {MIN_PROMPT + 1}"
        )
    most = max_model_len - MIN_PROMPT
    if not 1 <= max_tokens <= most:
        raise ConfigError(
            f"max_tokens: {max_tokens} does not fit; use 1 to {most}, the model's context of {max_model_len} tokens "
            f"less a prompt of at least {MIN_PROMPT}"
        )
    room = max_model_len - max_tokens
    if not MIN_PROMPT <= num_tokens <= room:
        raise ConfigError(
            f"tokens: {num_tokens} does not fit; use {MIN_PROMPT} to {room}, the model's context of {max_model_len} "
            f"tokens less an answer of {max_tokens}"
        )


def long_prompt(tokenizer: Tokenizer, num_tokens: int) -> tuple[int, ...]:
    """A chat prompt of at most `num_tokens` tokens, nearly all of them text that every Python brings along."""

    def build(text: str) -> list[int]:
        return tokenizer.apply_chat([{"role": "user", "content": f"{text}\n\n{QUESTION}"}])

    text, frame = "", len(build(""))
    for topic in _topics():
        more = tokenizer.encode(text + topic, add_special_tokens=False)
        if len(more) + frame > num_tokens:
            text = tokenizer.decode(more[: num_tokens - frame - 8])  # cutting a word may add a few tokens
            break
        text += topic
    return tuple(build(text))


def _topics() -> Iterator[str]:
    """Chapters of Python's language reference, as help() shows them."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    yield topics["import"]
    yield from (text for name, text in sorted(topics.items()) if name != "import")
