"""The main job in one command: a long real text and a question about it, prefill and decode in separate processes."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from rich.table import Table

from narrows.config import EngineConfig
from narrows.core.events import Event
from narrows.core.request import FinishReason, SamplingParams
from narrows.errors import ConfigError
from narrows.launch import answer, console, figures, started
from narrows.metrics.definitions import measure
from narrows.server.tokenizer import Tokenizer

QUESTION = "According to the text above, what does the import statement do?"
MIN_PROMPT = 128  # tokens, for the question and some text before it


def demo(config: EngineConfig, *, num_tokens: int, max_tokens: int, json_file: Path | None) -> None:
    """Stream the answer, then print TTFT, TTST, arrival to second token, TBT and the bytes that crossed."""
    events: list[Event] = []
    with started(config, events) as (cluster, tokenizer):
        check_lengths(num_tokens, max_tokens, cluster.model.max_model_len)
        prompt = long_prompt(tokenizer, num_tokens)
        pids = ", ".join(f"{name} is process {pid}" for name, pid in sorted(cluster.pids().items()))
        console.print(
            f"{pids}\na prompt of {len(prompt)} tokens: Python's language reference, then\n> {QUESTION}\n",
            soft_wrap=True,
        )
        text = []
        for piece in answer(cluster, tokenizer, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0)):
            if not isinstance(piece, FinishReason):
                text.append(piece)
                print(piece, end="", flush=True)
        print("\n", flush=True)
    (metrics,) = measure(events).values()
    values = figures(metrics)
    table = Table(title="What it took", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for label, name in (
        ("TTFT: arrival to first token", "ttft_s"),
        ("TTST: first to second token", "ttst_s"),
        ("arrival to second token", "second_token_s"),
        ("TBT: later gaps, median", "tbt_s"),
    ):
        seconds = values[name]
        table.add_row(label, "-" if seconds is None else f"{seconds * 1e3:,.1f} ms")
    table.add_row("KV that crossed, frames included", f"{metrics.handover_bytes / 2**20:,.1f} MiB")
    table.add_row(
        "prompt / cached / answer tokens",
        f"{metrics.num_prompt_tokens} / {metrics.cached_tokens} / {metrics.num_tokens}",
    )
    console.print(table)
    if json_file is not None:
        row = {"text": "".join(text), **values}
        json_file.write_text(json.dumps({"name": "demo", "config": {"tokens": num_tokens}, "results": [row]}, indent=2))


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
