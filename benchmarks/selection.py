"""What each selection algorithm keeps of attention, for which metadata: python benchmarks/selection.py

Calibrated on prose, evaluated on source code; both come with Python. `recall` is the attention mass (softmax of q.k
over all positions, mean over heads, layers from the third on, queries and prompts) that the selected entries keep, by
that of the true best entries that the ratio allows; `selected` is the part of the entries that is read, less than the
ratio where an algorithm stops earlier. infinigen is asked by the query foreseen from the layer before. `us a layer` are
`describe` of one token and `select` in a layer of one request, with this machine's threads, at --speed-tokens.
"""

import argparse
import tarfile
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from narrows.bench.results import document, save, show
from narrows.kernels import load as load_kernels
from narrows.kernels.base import Kernels, PagedBatch
from narrows.models.catalog import resolve
from narrows.models.load import load_model
from narrows.models.spec import ModelSpec, read_spec
from narrows.profile.measuring.calibrate import calibrate, one_thread
from narrows.profile.measuring.recall import measure_recall
from narrows.profile.measuring.samples import collect
from narrows.select.base import Selector
from narrows.select.registry import NEEDS_CALIBRATION, SELECTORS, open_selector
from narrows.select.shape import SelectorShape
from narrows.server.tokenizer import Tokenizer

PAGE = 32
CODE = (("argparse", 4096), ("asyncio/base_events", 2048), ("typing", 1024), ("tarfile", 3000), ("subprocess", 8000))


def prose(tokenizer: Tokenizer) -> list[int]:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return tokenizer.encode("\n".join(text for _, text in sorted(topics.items())), add_special_tokens=False)


def code(tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    library = Path(tarfile.__file__).parent
    return [
        tokenizer.encode((library / f"{name}.py").read_text(), add_special_tokens=False)[: min(size, longest)]
        for name, size in CODE
    ]


def shape_of(spec: ModelSpec) -> SelectorShape:
    return SelectorShape(spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE, torch.bfloat16)


def speed(selector: Selector, shape: SelectorShape, tokens: int) -> tuple[float, float]:
    """Seconds of describe and select; the best of many, so that other work on the machine spoils few of them."""
    pages = -(-tokens // PAGE)
    slots = torch.arange(tokens, dtype=torch.int32)
    entries = torch.randn(pages * PAGE, shape.num_kv_heads, 2 * shape.head_dim).bfloat16()
    query = torch.randn(1, shape.num_heads, shape.head_dim).bfloat16()
    layout = selector.metadata
    size = (len(entries) // layout.tokens_per_row, shape.num_kv_heads, layout.row_bytes)
    metadata = torch.zeros(size, dtype=torch.uint8)
    selector.describe(2, entries, slots, metadata)
    length = torch.tensor([tokens], dtype=torch.int32)
    table = torch.arange(pages, dtype=torch.int32)[None]
    start = torch.tensor([0, 1], dtype=torch.int32)
    batch = PagedBatch(start, length, table, slots[-1:], slots[-1:], PAGE, 1, tokens)
    newest = slots[-1:]
    return (
        best_s(lambda: selector.describe(2, entries, newest, metadata)),
        best_s(lambda: selector.select(2, query, metadata, batch, scale=shape.head_dim**-0.5, window=None)),
    )


def best_s(call: Callable[[], object]) -> float:
    best, end = float("inf"), time.perf_counter() + 0.5
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _short(name: str) -> str:
    """A column's heading; the full name is in the JSON."""
    return name.replace("entry_bytes", "bytes").replace("recall_", "rec. ").replace("selected_", "sel. ")


def run(
    model: str, names: list[str], ratios: list[float], longest: int, num_rows: int, speed_tokens: int, kernels: Kernels
) -> dict[str, Any]:
    folder = resolve(model)
    spec, tokenizer = read_spec(folder), Tokenizer(folder)
    shape, scale = shape_of(spec), spec.head_dim**-0.5
    samples = collect(load_model(folder, torch.bfloat16, kernels), kernels, code(tokenizer, longest), num_rows=num_rows)
    calibration = prose(tokenizer)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, one_thread():
        for name in names:
            path, calibrated_s = None, None
            if name in NEEDS_CALIBRATION:
                path, start = Path(scratch) / name, time.perf_counter()
                calibrate(name, folder, [calibration], path, kernels=kernels)
                calibrated_s = time.perf_counter() - start
            row: dict[str, Any] = {"selector": name}
            for ratio in ratios:
                selector = open_selector(name, shape=shape, ratio=ratio, kernels=kernels, calibration=path)
                kept = measure_recall(selector, samples, page_size=PAGE, scale=scale)
                percent = f"{ratio:.0%}"
                row |= {"entry_bytes": selector.metadata.entry_bytes}
                row |= {f"recall_{percent}": kept.recall, f"selected_{percent}": kept.selected}
            describe_s, select_s = speed(selector, shape, speed_tokens)
            row |= {"describe_us": describe_s * 1e6, "select_us": select_s * 1e6, "calibrate_s": calibrated_s}
            rows.append(row)
    title = f"recall of attention mass, {model}, KV entries of {4 * spec.head_dim} bytes"
    show(title, [{_short(name): value for name, value in row.items()} for row in rows])
    about = {"model": model, "ratios": ratios, "longest": longest, "rows": num_rows, "speed_tokens": speed_tokens}
    return document("selection", about, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--select", default=",".join(SELECTORS), help="comma-separated")
    parser.add_argument("--ratio", default="0.05,0.1,0.2", help="comma-separated")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of an evaluated prompt, at most")
    parser.add_argument("--rows", type=int, default=12, help="queries of each prompt")
    parser.add_argument("--speed-tokens", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = given.select.split(",")
    if unknown := set(chosen) - set(SELECTORS):
        parser.error(f"--select: {', '.join(sorted(unknown))} unknown; choose from {', '.join(SELECTORS)}")
    parts = [float(ratio) for ratio in given.ratio.split(",")]
    save(given.json, run(given.model, chosen, parts, given.longest, given.rows, given.speed_tokens, load_kernels()))
