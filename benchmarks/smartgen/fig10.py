"""TTFT, TTST and TBT by kind of text, where the paper has data sets."""

from dataclasses import replace

from benchmarks.smartgen.common import Claim, Options, bars, main, over
from narrows.bench.figures import Row
from narrows.bench.plots import Panel

KINDS = ("code", "docstrings", "tables", "prose")
SCHEMES = ("full", "partial", "selective")


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    kinds = KINDS[:2] if options.quick else KINDS
    rows: list[Row] = []
    for kind in kinds:
        rows += [r | {"text": kind} for r in options.rows(SCHEMES, workload=replace(options.workload, text=kind))]
    claims = []
    for kind in kinds:
        claims += [
            Claim(
                f"{kind}: TTST, full / selective", "up to 4.3x", over(rows, "ttst_s", "full", "selective", text=kind)
            ),
            Claim(
                f"{kind}: TBT, partial / selective", "above 1", over(rows, "tbt_s", "partial", "selective", text=kind)
            ),
        ]
    labels = {kind: kind for kind in kinds}
    panels = [
        bars(rows, "ttst_s", "TTST", "s", labels, "text"),
        bars(rows, "ttft_s", "TTFT", "s", labels, "text"),
        bars(rows, "tbt_s", "TBT", "ms", labels, "text", 1e3),
    ]
    return rows, claims, panels


if __name__ == "__main__":
    main("fig10", "TTFT, TTST and TBT by kind of text", make)
