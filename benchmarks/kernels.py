"""How fast the native kernels are, beside what the machine can do and beside torch, all in one run.

    python benchmarks/kernels.py [--only linear,attend] [--threads N] [--json FILE]

Shapes are those of SmolLM2-135M. Each line is the best of many short samples; `of peak` is relative to the read
bandwidth or to the bfloat16 multiplication rate measured beside it; torch's own time stands beside, with its ratio
to ours (above 1: ours is faster).
"""

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from narrows.kernels.base import PagedBatch
from narrows.kernels.build import build, load_library
from narrows.kernels.native import NativeKernels, declare, new_crew

WIDTH, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, VOCABULARY, LAYERS = 576, 9, 3, 64, 1536, 49152, 30
PAGE = 16


def best_s(call: Callable[[], object], budget_s: float = 0.7) -> float:
    """Seconds of one call: the best of short samples (about a millisecond), so that other work on the machine and the
    scheduler's slices spoil some of them and not the result."""
    call()
    start = time.perf_counter()
    call()
    repeats = max(1, int(1e-3 / max(1e-7, time.perf_counter() - start)))
    best, samples, end = float("inf"), 0, time.perf_counter() + budget_s
    while samples < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter() - start) / repeats)
        samples += 1
    return best


class Bench:
    """The machine's ceilings, and the rows measured so far."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        library = load_library(build())
        self.kernels = NativeKernels(threads, library)
        self._crew = new_crew(library, threads)
        self.rows: list[dict[str, float | str]] = []
        self._read = declare(library, "narrows_probe_read", "plp")
        self._multiply = declare(library, "narrows_probe_multiply", "lp")
        self._flop = 2.0 * threads * library.narrows_probe_products(1000)
        self._memory = torch.ones(256 << 20, dtype=torch.uint8)
        self.ceiling("GB/s")
        print(
            f"{threads} threads: reads {self.ceiling('GB/s'):.0f} GB/s, "
            f"multiplies bfloat16 at {self.ceiling('GFLOP/s'):.0f} GFLOP/s"
        )

    def ceiling(self, unit: str) -> float:
        """What the machine can do now; other work on it is felt by the ceiling too."""
        if unit == "GB/s":
            num_bytes = self._memory.numel()
            return num_bytes / best_s(lambda: self._read(self._memory.data_ptr(), num_bytes, self._crew), 0.2) / 1e9
        return self._flop / best_s(lambda: self._multiply(1000, self._crew), 0.2) / 1e9

    def row(
        self,
        case: str,
        call: Callable[[], object],
        *,
        num_bytes: float = 0,
        flop: float = 0,
        torch_call: Callable[[], object] | None = None,
    ) -> None:
        """Measure one case; its ceiling is memory if num_bytes is given, else arithmetic."""
        seconds = best_s(call)
        amount, unit = (num_bytes, "GB/s") if num_bytes else (flop, "GFLOP/s")
        ceiling = self.ceiling(unit)
        rate = amount / seconds / 1e9
        reference = best_s(torch_call) if torch_call else None
        row: dict[str, float | str] = {
            "case": case,
            "us": seconds * 1e6,
            "rate": rate,
            "unit": unit,
            "ceiling": ceiling,
            "of_peak": rate / ceiling,
        }
        line = f"{case:34} {seconds * 1e6:10.1f} us {rate:8.1f} {unit:8} {rate / ceiling:4.0%} of peak"
        if reference is not None:
            row["torch_us"] = reference * 1e6
            line += f", torch {reference * 1e6:10.1f} us: {reference / seconds:5.2f} x"
        self.rows.append(row)
        print(line, flush=True)


def weights(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs).bfloat16()


def bench_step(bench: Bench) -> None:
    """All products of a decode step, weights cold: each layer has its own."""
    shapes = [
        ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
        (WIDTH, WIDTH),
        (2 * FEED_FORWARD, WIDTH),
        (WIDTH, FEED_FORWARD),
    ]
    plain = [[weights(*shape) for shape in shapes] for _ in range(LAYERS)]
    head = weights(VOCABULARY, WIDTH)
    kernels = bench.kernels
    packed = [[kernels.pack(weight) for weight in layer] for layer in plain]
    packed_head = kernels.pack(head)
    num_bytes = 2 * (sum(weight.numel() for layer in plain for weight in layer) + head.numel())
    for rows in (1, 4, 8, 16, 32):
        x, wide = torch.randn(rows, WIDTH).bfloat16(), torch.randn(rows, FEED_FORWARD).bfloat16()

        def ours(x: Tensor = x, wide: Tensor = wide) -> None:
            for qkv, out, gate_up, down in packed:
                kernels.linear(x, qkv)
                kernels.linear(x, out)
                kernels.gated_linear(x, gate_up)
                kernels.linear(wide, down)
            kernels.linear(x, packed_head)

        def theirs(x: Tensor = x, wide: Tensor = wide) -> None:
            for qkv, out, gate_up, down in plain:
                F.linear(x, qkv)
                F.linear(x, out)
                F.linear(x, gate_up)
                F.linear(wide, down)
            F.linear(x, head)

        bench.row(f"step, {rows} rows", ours, num_bytes=num_bytes, torch_call=theirs)
    x = torch.randn(1, WIDTH).bfloat16()
    bench.row(
        "output head, 1 row",
        lambda: kernels.linear(x, packed_head),
        num_bytes=2 * head.numel(),
        torch_call=lambda: F.linear(x, head),
    )


def bench_linear(bench: Bench) -> None:
    """Products of prefill."""
    kernels = bench.kernels
    for rows in (512, 1024, 4096):
        for outputs, inputs in ((960, 576), (576, 576), (576, 1536), (4096, 4096)):
            if rows == 4096 and inputs == 4096:
                continue
            x, weight = torch.randn(rows, inputs).bfloat16(), weights(outputs, inputs)
            packed = kernels.pack(weight)
            bench.row(
                f"linear {rows} x {inputs} -> {outputs}",
                lambda x=x, packed=packed: kernels.linear(x, packed),
                flop=2.0 * rows * inputs * outputs,
                torch_call=lambda x=x, weight=weight: F.linear(x, weight),
            )
        x, weight = torch.randn(rows, WIDTH).bfloat16(), weights(2 * FEED_FORWARD, WIDTH)
        packed = kernels.pack(weight)

        def theirs(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            gate, up = F.linear(x, weight).chunk(2, -1)
            return F.silu(gate) * up

        bench.row(
            f"gated {rows} x 576 -> 1536",
            lambda x=x, packed=packed: kernels.gated_linear(x, packed),
            flop=4.0 * rows * WIDTH * FEED_FORWARD,
            torch_call=theirs,
        )


def paged(lengths: list[int], rows: list[int], shuffled: bool = False) -> PagedBatch:
    """Requests in pages that are neighbours, as after an allocation in runs, or in no order."""
    pages = [-(-length // PAGE) for length in lengths]
    order = (torch.randperm if shuffled else torch.arange)(sum(pages), dtype=torch.int32)
    table, taken = torch.zeros(len(lengths), max(pages), dtype=torch.int32), 0
    for r, count in enumerate(pages):
        table[r, :count] = order[taken : taken + count]
        taken += count
    positions = [torch.arange(length - new, length) for length, new in zip(lengths, rows, strict=True)]
    slots = [table[r, at // PAGE] * PAGE + at % PAGE for r, at in enumerate(positions)]
    starts = torch.tensor([0, *rows]).cumsum(0)
    return PagedBatch(
        starts.int(),
        torch.tensor(lengths, dtype=torch.int32),
        table,
        torch.cat(slots).int(),
        torch.cat(positions).int(),
        PAGE,
        max(rows),
        max(lengths),
    )


def bench_attend(bench: Bench) -> None:
    kernels, scale = bench.kernels, HEAD_DIM**-0.5
    for batch_size, length, shuffled in (
        (1, 512, False),
        (1, 4096, False),
        (1, 4096, True),
        (8, 1024, False),
        (8, 4096, False),
        (32, 2048, False),
    ):
        batch = paged([length] * batch_size, [1] * batch_size, shuffled)
        num_slots = batch_size * length
        # enough pools, one after the other, that none is still in a cache
        pools = itertools.cycle(
            [torch.randn(num_slots, KV_HEADS, 2 * HEAD_DIM).bfloat16() for _ in range(max(2, 200_000 // num_slots))]
        )
        contiguous = itertools.cycle(
            [
                torch.randn(2, batch_size, KV_HEADS, length, HEAD_DIM).bfloat16()
                for _ in range(max(2, 200_000 // num_slots))
            ]
        )
        query = torch.randn(batch_size, HEADS, HEAD_DIM).bfloat16()
        bench.row(
            f"decode {batch_size} x {length} tokens" + ", scattered" * shuffled,
            lambda batch=batch, query=query, pools=pools: kernels.attend(
                query, next(pools), batch, scale=scale, window=None
            ),
            num_bytes=4.0 * num_slots * KV_HEADS * HEAD_DIM,
            torch_call=lambda query=query, contiguous=contiguous: F.scaled_dot_product_attention(
                query.unsqueeze(2), *next(contiguous), enable_gqa=True
            ),
        )
    for rows, length in ((512, 512), (4096, 4096), (1024, 8192)):
        batch = paged([length], [rows])
        entries = torch.randn(length, KV_HEADS, 2 * HEAD_DIM).bfloat16()
        query = torch.randn(rows, HEADS, HEAD_DIM).bfloat16()
        pairs = rows * (length - rows) + rows * (rows + 1) / 2
        whole = [torch.randn(1, HEADS, n, HEAD_DIM).bfloat16() for n in (rows, length, length)]
        causal = None if rows == length else torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        bench.row(
            f"prefill {rows} rows of {length}",
            lambda batch=batch, query=query, entries=entries: kernels.attend(
                query, entries, batch, scale=scale, window=None
            ),
            flop=4.0 * pairs * HEADS * HEAD_DIM,
            torch_call=lambda whole=whole, causal=causal: F.scaled_dot_product_attention(
                *whole, attn_mask=causal, is_causal=causal is None
            ),
        )


def bench_rows(bench: Bench) -> None:
    """Norm and rotation; bytes are what is read and written."""
    kernels = bench.kernels
    weight = torch.randn(WIDTH).bfloat16()
    cos = torch.randn(8192, HEAD_DIM // 2)
    for rows in (1, 8, 1024):
        x = torch.randn(rows, WIDTH).bfloat16()
        bench.row(
            f"rms_norm {rows} rows",
            lambda x=x: kernels.rms_norm(x, weight, 1e-5),
            num_bytes=4.0 * x.numel(),
            torch_call=lambda x=x: F.rms_norm(x, (WIDTH,), weight, 1e-5),
        )
        batch = paged([rows], [rows])
        entries = torch.randn(-(-rows // PAGE) * PAGE, KV_HEADS, 2 * HEAD_DIM).bfloat16()
        qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM).bfloat16()
        bench.row(
            f"rope_store {rows} rows",
            lambda qkv=qkv, entries=entries, batch=batch: kernels.rope_store(
                qkv, entries, batch, cos, cos, num_heads=HEADS, q_norm=None, k_norm=None, eps=1e-5
            ),
            num_bytes=4.0 * qkv.numel(),
        )


def bench_select(bench: Bench) -> None:
    """A decode step that reads a fifth of its context; copies count as read and written. `same tokens, dense` is what
    that many entries cost where they are neighbours and the same for all heads."""
    kernels, scale = bench.kernels, HEAD_DIM**-0.5
    for batch_size, length in ((1, 8192), (8, 2048)):
        rows, chosen, num_slots = batch_size * KV_HEADS, length // 5, batch_size * length
        entry_bytes = 4 * HEAD_DIM
        num = torch.full((rows,), chosen, dtype=torch.int32)
        # enough scores and pools, one after the other, that none is still in a cache
        scores = itertools.cycle([torch.randn(rows, length) for _ in range(16)])
        bench.row(
            f"top_k {rows} x {chosen} of {length}",
            lambda scores=scores, num=num: kernels.top_k(next(scores), num),
            num_bytes=4.0 * rows * length,
            torch_call=lambda scores=scores, chosen=chosen: next(scores).topk(chosen).indices.sort().values,
        )
        pools = itertools.cycle(
            [torch.randn(num_slots, KV_HEADS, 2 * HEAD_DIM).bfloat16() for _ in range(max(2, 200_000 // num_slots))]
        )
        request, head = torch.arange(rows)[:, None] // KV_HEADS, torch.arange(rows)[:, None] % KV_HEADS
        positions = kernels.top_k(next(scores), num)
        ids = ((request * length + positions) * KV_HEADS + head).int()
        query = torch.randn(batch_size, HEADS, HEAD_DIM).bfloat16()

        def gathered(query: Tensor = query, pools: Iterator[Tensor] = pools, ids: Tensor = ids) -> Tensor:
            key, value = next(pools).view(-1, 2 * HEAD_DIM)[ids].unflatten(0, (-1, KV_HEADS)).chunk(2, -1)
            return F.scaled_dot_product_attention(query.unsqueeze(2), key, value, enable_gqa=True)

        bench.row(
            f"attend_index {batch_size} x {chosen} of {length}",
            lambda query=query, pools=pools, ids=ids, num=num: kernels.attend_index(
                query, next(pools).view(-1, 2 * HEAD_DIM), ids, num, scale=scale
            ),
            num_bytes=rows * chosen * entry_bytes,
            torch_call=gathered,
        )
        batch = paged([chosen] * batch_size, [1] * batch_size)
        bench.row(
            f"same tokens, dense {batch_size} x {chosen}",
            lambda query=query, pools=pools, batch=batch: kernels.attend(
                query, next(pools), batch, scale=scale, window=None
            ),
            num_bytes=rows * chosen * entry_bytes,
        )
        whole = paged([length] * batch_size, [1] * batch_size)
        together = torch.empty(rows, chosen, 2 * HEAD_DIM).bfloat16()
        states = torch.ones(num_slots * KV_HEADS, dtype=torch.int8)
        bench.row(
            f"locate {batch_size} x {chosen} of {length}",
            lambda positions=positions, num=num, whole=whole, states=states: kernels.locate(
                positions, num, whole, states
            ),
            num_bytes=rows * chosen * 17.0,
        )
        bench.row(
            f"keep {batch_size} x {chosen} of {length}",
            lambda pools=pools, ids=ids, num=num, together=together, states=states: kernels.keep(
                next(pools).view(-1, 2 * HEAD_DIM), states, ids, num, together
            ),
            num_bytes=2.0 * rows * chosen * entry_bytes,
            torch_call=lambda pools=pools, ids=ids, together=together: (
                next(pools).view(-1, 2 * HEAD_DIM).index_copy_(0, ids.flatten(), together.view(-1, 2 * HEAD_DIM))
            ),
        )


CASES = {
    "step": bench_step,
    "linear": bench_linear,
    "attend": bench_attend,
    "select": bench_select,
    "rows": bench_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"--only: {', '.join(sorted(unknown))} unknown; choose from {', '.join(CASES)}")
    torch.manual_seed(0)
    bench = Bench(options.threads)
    for name in names:
        CASES[name](bench)
    if options.json:
        environment = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "threads": options.threads,
        }
        report = {"name": "kernels", "config": {"only": names}, "results": bench.rows, "environment": environment}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
