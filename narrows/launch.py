"""What the commands `serve` and `run` do: the glue between config, cluster and server, with what a person sees."""

import contextlib
import json
import logging
import queue
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from narrows.config import EngineConfig, ServerConfig
from narrows.core.events import Event
from narrows.core.ids import RequestId
from narrows.core.request import FinishReason, Request, SamplingParams
from narrows.errors import NarrowsError
from narrows.metrics.definitions import RequestMetrics, measure
from narrows.profiles import ensure_files
from narrows.runtime.client import Client, Output
from narrows.runtime.cluster import LocalCluster, open_cluster
from narrows.runtime.launch_local import DECISIONS
from narrows.server.stream import TextStream
from narrows.server.tokenizer import Tokenizer

console = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def started(
    config: EngineConfig, events: list[Event] | None = None, timeout_s: float = 300.0
) -> Iterator[tuple[LocalCluster, Tokenizer]]:
    """A ready cluster and its tokenizer, closed on leaving. Shows progress while a person waits."""
    cluster = _open(config, events)
    try:
        tokenizer = Tokenizer(cluster.model.folder)
        with console.status(f"starting {config.prefill} prefill and {config.decode} decode instance(s)"):
            cluster.wait_ready(timeout_s)
        yield cluster, tokenizer
    finally:
        cluster.close()


def _open(config: EngineConfig, events: list[Event] | None = None) -> LocalCluster:
    columns = (TextColumn("converting the model, once"), BarColumn(), TimeElapsedColumn())
    # Where no person watches, and until there is something to show, a bar would leave but an empty line.
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_interactive)
    task = bar.add_task("", total=None)

    def on_progress(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        return open_cluster(
            config,
            progress=on_progress,
            say=lambda text: console.print(f"{text} ...", style="dim"),
            observers=[] if events is None else [events.append],
            ensure_files=ensure_files,
        )
    finally:
        if bar.live.is_started:
            bar.stop()


def serve(config: EngineConfig, server: ServerConfig, timeout_s: float) -> None:
    """Serve until a signal, or until the cluster has failed for good: then NarrowsError says why.

    The port is taken first, so that a port in use costs nothing.
    """
    from narrows.server.generate import Limits
    from narrows.server.serve import bind
    from narrows.server.serve import serve as run_server

    DECISIONS.setLevel(logging.INFO)  # which way KV goes and why is news to whoever runs a server
    began = time.monotonic()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a profile to be read again
    listener = bind(server.host, server.port)
    with started(config, timeout_s=timeout_s) as (cluster, tokenizer):
        failure = run_server(
            cluster,
            tokenizer,
            listener,
            api_key=server.api_key,
            limits=Limits(max_body_bytes=server.max_body_bytes, max_waiting=config.max_queue),
            on_listening=lambda url: console.print(
                f"{cluster.model.name} is served at {url}/v1 ({time.monotonic() - began:.1f} s after the start); "
                "Ctrl-C stops",
                soft_wrap=True,
            ),
            on_hangup=cluster.reload,
            until=lambda: cluster.failure,
        )
    if failure:
        raise NarrowsError(failure)


def answer(
    client: Client, tokenizer: Tokenizer, prompt: tuple[int, ...], params: SamplingParams
) -> Iterator[str | FinishReason]:
    """The text of one request as it comes, then why it ended. Leaving early aborts it.

    Raises NarrowsError when the request fails.
    """
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    request = Request(RequestId(uuid4().hex), prompt, params)
    text = TextStream(tokenizer.decode, params)
    client.submit(request, outputs.put)
    reason: FinishReason | None = None
    try:
        while reason is None:
            output = outputs.get()
            if output.finish_reason is FinishReason.ERROR:
                raise NarrowsError(output.error or "the request failed")
            piece = text.push(output)
            if piece.text:
                yield piece.text
            reason = piece.finish_reason
    finally:
        client.abort(request.id, FinishReason.STOP if reason else FinishReason.ABORT)
    yield reason


def run_once(config: EngineConfig, prompt: str, params: SamplingParams, *, raw: bool, json_file: Path | None) -> None:
    """Print the answer to one prompt as it comes, and what it took to standard error."""
    events: list[Event] = []
    with started(config, events) as (cluster, tokenizer):
        plain = raw or tokenizer.chat_template is None
        ids = tokenizer.encode(prompt) if plain else tokenizer.apply_chat([{"role": "user", "content": prompt}])
        text = []
        for piece in answer(cluster, tokenizer, tuple(ids), params):
            if isinstance(piece, FinishReason):
                print(flush=True)
            else:
                text.append(piece)
                print(piece, end="", flush=True)
    (metrics,) = measure(events).values()
    console.print(summary_line(metrics), style="dim", soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps({"text": "".join(text), **figures(metrics)}, indent=2) + "\n")
    sys.stdout.flush()


def figures(metrics: RequestMetrics) -> dict[str, float | int | None]:
    """A request's figures as plain numbers, units in the names. tbt_s is the median gap."""
    gaps = sorted(metrics.tbt_s)
    return {
        "prompt_tokens": metrics.num_prompt_tokens,
        "cached_tokens": metrics.cached_tokens,
        "tokens": metrics.num_tokens,
        "ttft_s": metrics.ttft_s,
        "ttst_s": metrics.ttst_s,
        "second_token_s": metrics.second_token_s,
        "tbt_s": gaps[len(gaps) // 2] if gaps else None,
        "handover_bytes": metrics.handover_bytes,
    }


def summary_line(metrics: RequestMetrics) -> str:
    """One request's figures for a person."""
    values = figures(metrics)
    times = [
        f"{label} {seconds * 1e3:.0f} ms"
        for label, name in (("TTFT", "ttft_s"), ("TTST", "ttst_s"), ("second token after", "second_token_s"))
        if (seconds := values[name]) is not None
    ]
    if (gap := values["tbt_s"]) is not None:
        times.append(f"TBT {gap * 1e3:.1f} ms (median)")
    tokens = f"{values['prompt_tokens']} prompt tokens ({values['cached_tokens']} cached), {values['tokens']} answered"
    return f"{tokens}; {', '.join(times)}; {metrics.handover_bytes / 2**20:.1f} MiB of KV crossed"
