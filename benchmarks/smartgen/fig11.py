"""TTST and TBT by batch size. The paper gives each request of a batch a prefill GPU; here one instance computes all."""

from benchmarks.smartgen.common import Claim, Options, curves, growth, main, over
from narrows.bench.figures import Row
from narrows.bench.plots import Panel

SCHEMES = ("full", "partial", "selective")


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    batches = (1, 2) if options.quick else (1, 2, 3, 4, 5, 6)
    last = batches[-1]
    rows = options.rows(SCHEMES, batches=batches)
    claims = [
        Claim("TTST, full / selective, largest batch", "3.7x", over(rows, "ttst_s", "full", "selective", batch=last)),
        Claim("TTST, full / partial, largest batch", "2.9x", over(rows, "ttst_s", "full", "partial", batch=last)),
        Claim(
            "TTST, partial / selective, largest batch", "1.2x", over(rows, "ttst_s", "partial", "selective", batch=last)
        ),
        Claim(
            "TBT, partial / selective, largest batch", "1.5x", over(rows, "tbt_s", "partial", "selective", batch=last)
        ),
        Claim(
            "TBT, selective / full, largest batch", "close to 1", over(rows, "tbt_s", "selective", "full", batch=last)
        ),
    ]
    for figure, name, paper in (("ttst_s", "TTST", (10.4, 4.0, 2.0)), ("tbt_s", "TBT", (3.0, 3.6, 2.7))):
        for scheme, times in zip(SCHEMES, paper, strict=True):
            grown = growth(rows, figure, scheme, "batch", batches[0], last)
            claims.append(Claim(f"{name} of {scheme}, batch {last} / batch 1", f"{times}x (batch 6)", grown))
    panels = [
        curves(rows, "ttst_s", "batch", "TTST", "batch", "s"),
        curves(rows, "tbt_s", "batch", "TBT", "batch", "ms", 1e3),
    ]
    return rows, claims, panels


if __name__ == "__main__":
    main("fig11", "TTST and TBT by batch size", make)
