"""The command line: parse, call, no logic. Heavy imports happen inside the command that needs them."""

import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import click

from narrows import __version__
from narrows.config import EngineConfig, ServerConfig, read_toml
from narrows.errors import ConfigError, NarrowsError

F = TypeVar("F", bound=Callable[..., Any])
START_TIMEOUT_S = 300.0
# Every option can also come from the environment: NARROWS_SERVE_API_KEY is --api-key of serve.
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "auto_envvar_prefix": "NARROWS"}


class Program(click.Group):
    """Narrows' own errors are shown as one line, with exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except NarrowsError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Program, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="narrows")
@click.option("-v", "--verbose", is_flag=True, help="Log what instances do.")
def main(verbose: bool) -> None:
    """Serve a language model with prefill and decode in separate processes."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING, stream=sys.stderr)
    # Only our own: libraries that tell of each HTTP request or file would hide what instances do.
    logging.getLogger("narrows").setLevel(logging.INFO if verbose else logging.WARNING)


def _writable(_ctx: click.Context, _param: click.Parameter, file: Path | None) -> Path | None:
    """A file to be written when the work is done: refused before it, when it can not be."""
    if file is not None:
        existed = file.exists()
        try:
            file.open("a").close()
            if not existed:
                file.unlink()
        except OSError as error:
            raise click.BadParameter(
                f"{file} can not be written: {error.strerror}; name a file in a folder that exists and is yours"
            ) from error
    return file


def _text(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
    """Arguments are bytes: those that are not UTF-8 are no text."""
    for text in (value,) if isinstance(value, str) else value:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise click.BadParameter(f"character {error.start} is not valid UTF-8") from error
    return value


def json_option(text: str) -> Callable[[F], F]:
    return click.option("--json", "json_file", type=click.Path(path_type=Path), callback=_writable, help=text)


def rounds_option(default: int) -> Callable[[F], F]:
    return click.option(
        "--rounds",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Interleaved repetitions; medians are shown.",
    )


def options(*configs: type) -> Callable[[F], F]:
    """One option per field of the config classes, and --config. None stands for "not given"."""

    def decorate(command: F) -> F:
        for cls in reversed(configs):
            hints = get_type_hints(cls)
            for spec in reversed(fields(cls)):
                command = _option(spec.name, hints[spec.name], spec.metadata, spec.default)(command)
        return click.option(
            "--config", "config_file", type=click.Path(path_type=Path), help="TOML file with any of these settings."
        )(command)

    return decorate


def _option(name: str, hint: Any, metadata: Any, default: Any) -> Callable[[F], F]:
    flag = "--" + name.replace("_", "-")
    text = metadata["help"] + ("" if default is None else f"  [default: {default}]")
    kind = next((t for t in get_args(hint) if t is not type(None)), hint)
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", default=None, help=text)
    choices = metadata.get("choices")
    return click.option(flag, type=click.Choice(choices) if choices else kind, default=None, help=text)


def some_options(*names: str) -> Callable[[F], F]:
    """Options of single fields of EngineConfig, with their defaults there."""

    def decorate(command: F) -> F:
        hints = get_type_hints(EngineConfig)
        for spec in reversed([spec for spec in fields(EngineConfig) if spec.name in names]):
            command = _option(spec.name, hints[spec.name], spec.metadata, spec.default)(command)
        return command

    return decorate


def build(given: dict[str, Any], config_file: Path | None, **defaults: Any) -> tuple[EngineConfig, ServerConfig]:
    """Command line over TOML file over `defaults` over those of the configs. Raises ConfigError."""
    values = defaults | (read_toml(config_file) if config_file else {})
    values |= {name: value for name, value in given.items() if value is not None}
    parts = [
        {spec.name: values[spec.name] for spec in fields(cls) if spec.name in values}
        for cls in (EngineConfig, ServerConfig)
    ]
    return EngineConfig(**parts[0]), ServerConfig(**parts[1])


@main.command()
@options(EngineConfig, ServerConfig)
def serve(config_file: Path | None, **given: Any) -> None:
    """Serve an OpenAI-compatible API until Ctrl-C."""
    from narrows.launch import serve as run_server

    run_server(*build(given, config_file), START_TIMEOUT_S)


@main.command()
@click.argument("prompt", callback=_text)
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Longest answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True)
@click.option("--seed", type=int, default=None, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, callback=_text, help="Stop before this text; may be given several times.")
@json_option("Write answer and timings here.")
@options(EngineConfig)
def run(
    prompt: str,
    raw: bool,
    json_file: Path | None,
    config_file: Path | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    stop: tuple[str, ...],
    **given: Any,
) -> None:
    """Answer PROMPT once ("-" reads it from standard input)."""
    from narrows.core.request import SamplingParams
    from narrows.launch import run_once

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
    )
    config, _ = build(given, config_file)
    run_once(config, _standard_input() if prompt == "-" else prompt, params, raw=raw, json_file=json_file)


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompt: standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error


@main.command()
@click.option("--tokens", type=int, default=2000, show_default=True, help="Length of the long prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Longest answer.")
@json_option("Write the figures here.")
@click.option(
    "--png",
    "png_file",
    type=click.Path(path_type=Path),
    default="narrows-demo.png",
    show_default=True,
    callback=_writable,
    help="Draw how long a reader waits for each token here.",
)
@options(EngineConfig)
def demo(
    tokens: int,
    max_tokens: int,
    json_file: Path | None,
    png_file: Path | None,
    config_file: Path | None,
    **given: Any,
) -> None:
    """Ask a question about a long real text over a narrow link, by full transfer and selectively, side by side.

    Unless told otherwise it selects by infinigen and makes the link so narrow that the KV of the text needs 6.5 times
    as long as computing it. With --select none there is only full transfer, over the link as it is.
    """
    from narrows.demo import demo as run_demo

    config, _ = build(given, config_file, select="infinigen")
    run_demo(config, num_tokens=tokens, max_tokens=max_tokens, json_file=json_file, png_file=png_file)


# Flags of settings of a scenario (sim.parts): flag, setting, type, help.
SIMULATED: tuple[tuple[str, str, Any, str], ...] = (
    ("--trace", "workload.trace", str, "Requests from a Mooncake JSONL or Azure CSV file."),
    ("--mix", "workload.mix", str, "Synthetic requests instead: sharegpt, issue1, issue5, github.  [default: issue1]"),
    ("--requests", "workload.requests", int, "How many.  [default: the whole trace, 1000 of a mix]"),
    ("--rate", "workload.rate", float, "Requests a second.  [default: the trace's own, 40 of a mix]"),
    ("--arrivals", "workload.arrivals", str, "trace (its own times), poisson, gamma or constant."),
    ("--seed", "workload.seed", int, "Of everything random.  [default: 0]"),
    ("--model", "model.name", str, "A built-in model.  [default: DeepSeek-V3]"),
    ("--hardware", "hardware.name", str, "Of decode instances, and of prefill ones unless told.  [default: H200]"),
    ("--prefill-hardware", "hardware.prefill", str, "Of prefill instances."),
    ("--nodes", "cluster.nodes", int, "Nodes of decode instances.  [default: 1]"),
    ("--instances-per-node", "cluster.instances_per_node", int, "Decode instances of a node.  [default: 8]"),
    ("--prefill", "cluster.prefill_instances", int, "Prefill instances; 0: KV comes with the request.  [default: 8]"),
    ("--kv-tokens", "cluster.kv_tokens", int, "Tokens an instance holds KV of.  [default: what the model leaves]"),
    ("--policy", "policy.name", str, "Scheduling policies, separated by commas.  [default: dual-balanced]"),
    ("--transfer", "policy.transfer", str, "Scheme of the hand-over.  [default: full]"),
    ("--link-gbps", "link.gbps", float, "Gbit/s of one instance to other nodes.  [default: the hardware's]"),
    ("--tpot-slo-ms", "decode.tpot_slo_ms", float, "That requests are to meet.  [default: 50]"),
)


def _simulated(command: F) -> F:
    for flag, place, kind, text in reversed(SIMULATED):
        command = click.option(flag, place.replace(".", "__"), type=kind, default=None, help=text)(command)
    return command


@main.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@_simulated
@click.option(
    "--set", "settings", multiple=True, callback=_text, help="Any other setting: decode.two_batch_overlap=true."
)
@json_option("Write settings and figures here; the same file given as FILE runs it again.")
@click.option(
    "--paper", type=click.Choice(("nanocp", "smartgen")), help="Instead: a paper's published numbers beside ours."
)
@click.option("--quick", is_flag=True, help="With --paper: short, to see that it works.")
@click.option("--png", type=click.Path(path_type=Path), callback=_writable, help="Draw it over time here.")
@click.option(
    "--chrome-trace", type=click.Path(path_type=Path), callback=_writable, help="Write a timeline for Perfetto here."
)
def simulate(
    file: Path | None,
    settings: tuple[str, ...],
    json_file: Path | None,
    paper: str | None,
    quick: bool,
    png: Path | None,
    chrome_trace: Path | None,
    **given: Any,
) -> None:
    """Simulate a cluster on a trace, by the policies that serving uses.

    FILE is a scenario in TOML, or what an earlier run wrote with --json; flags go before it.
    """
    from narrows.bench.results import save
    from narrows.bench.simulate import read, run, show

    flags = {name.replace("__", "."): value for name, value in given.items() if value is not None}
    if paper is not None:
        _simulate_paper(paper, quick, json_file, alone=not (file or flags or settings or png or chrome_trace))
        return
    result = run(*read(file, flags, settings), png=png, trace=chrome_trace)
    save(json_file, result)
    show(result)


def _simulate_paper(paper: str, quick: bool, json_file: Path | None, *, alone: bool) -> None:
    from narrows.bench.paper import run, show
    from narrows.bench.results import save

    if not alone:
        raise click.UsageError(
            "--paper runs the paper's own scenarios; of other options leave all but --quick and --json"
        )
    result, claims = run(paper, quick=quick)
    save(json_file, result)
    show(paper, claims)


@main.group()
def bench() -> None:
    """Measure, each figure beside a reference from the same run."""


@bench.command("transport")
@json_option("Write the rows here.")
@rounds_option(5)
def bench_transport(json_file: Path | None, rounds: int) -> None:
    """Transports against raw sockets and memcpy; shaping; the wait of urgent traffic."""
    from narrows.bench.results import save
    from narrows.bench.transport import run as run_bench

    save(json_file, run_bench(rounds=rounds))


@bench.command("engine")
@click.option("--case", "cases", multiple=True, help="Only these cases (default: all).")
@rounds_option(3)
@json_option("Write the rows here.")
@options(EngineConfig)
def bench_engine(
    cases: tuple[str, ...], rounds: int, json_file: Path | None, config_file: Path | None, **given: Any
) -> None:
    """Decode, prefill and start against transformers in the same run."""
    from narrows.bench.engine import run as run_bench
    from narrows.bench.results import save

    config, _ = build(given, config_file)
    save(json_file, run_bench(config, cases=cases, rounds=rounds))


def _list_of(kind: Callable[[str], Any], what: str) -> Callable[[click.Context, click.Parameter, str], tuple[Any, ...]]:
    """A callback that splits at commas."""

    def split(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part.strip()) for part in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of {what}; separate them by commas") from None

    return split


def _list_option(flag: str, default: str, kind: Callable[[str], Any], what: str, text: str) -> Callable[[F], F]:
    return click.option(flag, default=default, show_default=True, callback=_list_of(kind, what), help=text)


HANDOVER_OPTIONS = (
    *("model", "dtype", "prefill", "decode", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size"),
    *("kv_cache_memory_bytes", "transport", "checksums", "select_ratio", "landing", "importance", "kernels", "threads"),
)


@bench.command("sched")
@_list_option("--policy", "dual-balanced", str, "names", "Policies, as serve names them.")
@click.option("--case", "cases", multiple=True, help="Only these cases (default: all).")
@rounds_option(200)
@json_option("Write the rows here.")
def bench_sched(policy: tuple[str, ...], cases: tuple[str, ...], rounds: int, json_file: Path | None) -> None:
    """How long deciding takes: a step's decision, admission from 4 to 256 nodes, memory over a million requests."""
    from narrows.bench.results import save
    from narrows.bench.sched import run as run_bench

    save(json_file, run_bench(policy, cases=cases, rounds=rounds))


@bench.command("handover")
@_list_option("--tt-over-tp", "6.5", float, "numbers", "Transfer time of a prompt's KV over its prefill time.")
@_list_option("--batch", "1", int, "whole numbers", "Requests submitted at once.")
@_list_option("--selector", "infinigen", str, "names", "Selection algorithms.")
@_list_option(
    "--scheme", "full,selective,partial", str, "names", "What crosses when; the values of --transfer, oracle."
)
@click.option("--prompt-tokens", type=int, default=8000, show_default=True, help="Length of each prompt.")
@click.option("--output-tokens", type=int, default=64, show_default=True, help="Tokens measured of each answer.")
@click.option("--hit", type=float, default=0.75, show_default=True, help="Part of each prompt in the prefix cache.")
@click.option(
    "--text", default="mixed", show_default=True, help="code, docstrings, tables, prose, or mixed: the first two."
)
@click.option(
    "--follow-tokens",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Go on behind the measured tokens, at most so far, until all KV is delivered.",
)
@rounds_option(3)
@json_option("Write the rows here.")
@click.option("--png", type=click.Path(path_type=Path), callback=_writable, help="Draw CTL curves and TTST here.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file with settings of serve.")
@some_options(*HANDOVER_OPTIONS)
def bench_handover(
    tt_over_tp: tuple[float, ...],
    batch: tuple[int, ...],
    selector: tuple[str, ...],
    scheme: tuple[str, ...],
    prompt_tokens: int,
    output_tokens: int,
    hit: float,
    text: str,
    follow_tokens: int,
    rounds: int,
    json_file: Path | None,
    png: Path | None,
    config_file: Path | None,
    **given: Any,
) -> None:
    """Schemes of hand-over beside each other on a slow link: TTFT, TTST, TBT, CTL, bytes by path."""
    from narrows.bench.handover import Plan, plot, schemes_named, show
    from narrows.bench.handover import run as run_bench
    from narrows.bench.results import save
    from narrows.bench.testbed import Workload

    config, _ = build(given, config_file)
    plan = Plan(schemes_named(scheme), selector, tt_over_tp, batch)
    result = run_bench(config, plan, Workload(prompt_tokens, output_tokens, hit, rounds, text, follow_tokens))
    save(json_file, result)
    show(result)
    if png is not None:
        plot(result, png)
    if result["differing"]:
        raise NarrowsError(f"tokens differ between schemes, which must never be: {'; '.join(result['differing'])}")


@main.group()
def profile() -> None:
    """Measure what serving plans by: which KV matters, how long prefill takes, what selectors learn of a model."""


MODEL_OPTIONS = ("model", "dtype", "max_model_len", "kernels", "threads")
text_option = click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(path_type=Path),
    help='Text file, or JSONL with a "text" or "prompt" a line; may be given several times (default: Python prose).',
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    callback=_writable,
    help="Write the profile here (default: where serving with these settings looks for it).",
)


def _selector_option(*choices: str) -> Callable[[F], F]:
    return click.option(
        "--select",
        "--selector",
        "select",
        type=click.Choice(choices),
        default=choices[0],
        show_default=True,
        help="Selection algorithm.",
    )


def _lengths(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    try:
        lengths = None if value is None else tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of lengths; write for instance 512,2048") from None
    if lengths is not None and min(lengths) < 1:
        raise click.BadParameter(f"{min(lengths)} is no length of a prompt; use lengths of at least 1")
    return lengths


@profile.command("importance")
@text_option
@click.option("--groups", callback=_lengths, help="Prompt lengths to measure  [default: 512,1024,2048,4096,8192]")
@click.option("--blocks", type=click.IntRange(min=1), default=1024, show_default=True, help="KV blocks of a layer.")
@click.option(
    "--prompts", type=click.IntRange(min=1), help="Prompts of each length (default: 1 to 8, fewer long ones)."
)
@out_option
@json_option("Write the table here.")
@_selector_option("infinigen", "exact", "quest", "hata", "streaming")
@some_options("select_ratio", "page_size", *MODEL_OPTIONS)
def profile_importance(
    texts: tuple[Path, ...],
    groups: tuple[int, ...] | None,
    blocks: int,
    prompts: int | None,
    out: Path | None,
    json_file: Path | None,
    **given: Any,
) -> None:
    """Measure how often decode selects each part of a prompt, layer by layer."""
    from narrows.profile_commands import profile_importance as run_profile

    run_profile(build(given, None)[0], texts, groups, blocks, prompts, out, json_file)


@profile.command("timing")
@out_option
@json_option("Write the table here.")
@some_options(*MODEL_OPTIONS)
def profile_timing(out: Path | None, json_file: Path | None, **given: Any) -> None:
    """Measure how long prefill computes on this machine."""
    from narrows.profile_commands import profile_timing as run_profile

    run_profile(build(given, None)[0], out, json_file)


@profile.command("hash")
@text_option
@out_option
@_selector_option("hata", "infinigen", "quest")
@some_options(*MODEL_OPTIONS)
def profile_hash(texts: tuple[Path, ...], out: Path | None, **given: Any) -> None:
    """Make what a selector learns of a model: hash weights (hata), partial keys (infinigen), bounds (quest)."""
    from narrows.profile_commands import profile_hash as run_profile

    run_profile(build(given, None)[0], texts, out)


@profile.command("show")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--png", type=click.Path(path_type=Path), callback=_writable, help="Draw importance as a heat map here.")
def profile_show(file: Path, png: Path | None) -> None:
    """Print what a profile says."""
    from narrows.profile_commands import profile_show as run_profile

    run_profile(file, png)
