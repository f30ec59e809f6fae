"""Length of the prompt, number of KV blocks of a layer (M), and selection ratio."""

from dataclasses import replace

from benchmarks.smartgen.common import TT_OVER_TP, Claim, Options, curves, growth, main, pick
from narrows.bench.figures import Row, ratio_of
from narrows.bench.handover import KNOWN_SCHEMES
from narrows.bench.plots import Panel

SCHEMES = ("full", "partial", "selective")
AT = (TT_OVER_TP[25],)


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    parts = [by_length(options), by_blocks(options), by_ratio(options)]
    return (
        [row for part in parts for row in part[0]],
        [c for part in parts for c in part[1]],
        [panel for part in parts for panel in part[2]],
    )


def by_length(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    longest = options.workload.prompt_tokens
    sizes = [longest // 2, longest] if options.quick else [longest // 8, longest // 4, longest // 2, longest]
    rows = options.rows(SCHEMES, tt_over_tp=AT)
    link = (rows[0]["link_gbps"],)
    for size in sizes[:-1]:
        rows += options.rows(SCHEMES, link_gbps=link, workload=replace(options.workload, prompt_tokens=size))
    rows.sort(key=lambda row: row["prompt_tokens"])

    def grown(figure: str, scheme: str) -> float:
        first, last = (pick(rows, scheme=scheme, prompt_tokens=size)[figure] for size in (sizes[0], sizes[-1]))
        return float(last - first)

    span = f"{sizes[0]} to {sizes[-1]} tokens"
    claims = [
        Claim(
            f"TTST grows, {span}: full / selective",
            "3.1 s / 1.0 s",
            ratio_of(grown("ttst_s", "full"), grown("ttst_s", "selective")),
        ),
        Claim(
            f"TTST grows, {span}: partial / selective",
            "1.4 s / 1.0 s",
            ratio_of(grown("ttst_s", "partial"), grown("ttst_s", "selective")),
        ),
        Claim(
            f"TBT grows, {span}: partial / selective",
            "0.8 s / 0.5 s",
            ratio_of(grown("tbt_s", "partial"), grown("tbt_s", "selective")),
        ),
        Claim(
            f"TBT grows, {span}: full / selective",
            "0.5 s / 0.5 s",
            ratio_of(grown("tbt_s", "full"), grown("tbt_s", "selective")),
        ),
    ]
    return rows, claims, _panels(rows, "prompt_tokens", "prompt tokens")


def by_blocks(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    numbers = (256, 512) if options.quick else (512, 1024, 1536, 2048)
    named = [
        replace(KNOWN_SCHEMES[name], name=f"{name} {number}", num_blocks=number)
        for number in numbers
        for name in SCHEMES
    ]
    rows = options.rows(named, tt_over_tp=AT)
    for row in rows:
        scheme, number = row["scheme"].split()
        row |= {"scheme": scheme, "num_blocks": int(number)}
    first, last = numbers[0], numbers[-1]
    claims = [
        Claim(f"TTST of {scheme}, M {last} / {first}", paper, growth(rows, "ttst_s", scheme, "num_blocks", first, last))
        for scheme, paper in (("full", "1.2x above 1K"), ("partial", "stable"), ("selective", "stable"))
    ]
    return rows, claims, _panels(rows, "num_blocks", "KV blocks of a layer")


def by_ratio(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    ratios = (0.1, 0.6) if options.quick else (0.1, 0.2, 0.4, 0.6)
    rows: list[Row] = []
    for ratio in ratios:
        rows += [row | {"select_ratio": ratio} for row in options.rows(SCHEMES, tt_over_tp=AT, select_ratio=ratio)]
    claims = [
        Claim(f"{name} of {scheme}, 60 % / 10 %", paper, growth(rows, figure, scheme, "select_ratio", 0.1, 0.6))
        for scheme, figure, name, paper in (
            ("partial", "ttst_s", "TTST", "2.0x"),
            ("selective", "ttst_s", "TTST", "1.8x"),
            ("partial", "tbt_s", "TBT", "2.1x"),
            ("selective", "tbt_s", "TBT", "1.7x"),
        )
    ]
    return rows, claims, _panels(rows, "select_ratio", "selection ratio")


def _panels(rows: list[Row], axis: str, label: str) -> list[Panel]:
    return [
        curves(rows, "ttst_s", axis, f"TTST by {label}", label, "s"),
        curves(rows, "tbt_s", axis, f"TBT by {label}", label, "ms", 1e3),
    ]


if __name__ == "__main__":
    main("fig16", "length, blocks and selection ratio", make)
