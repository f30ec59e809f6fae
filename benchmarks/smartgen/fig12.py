"""TTFT, TTST and TBT by bandwidth, as Tt/Tp of the paper's links."""

from benchmarks.smartgen.common import TT_OVER_TP, Claim, Options, bars, main, over, pick
from narrows.bench.figures import Row, ratio_of
from narrows.bench.plots import Panel

SCHEMES = ("full", "partial", "selective")
PAPER = {15: ("3.3x", "1.6x"), 25: ("not stated", "not stated"), 32: ("2.5x", "1.4x")}


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    rows = options.rows(SCHEMES, tt_over_tp=tuple(TT_OVER_TP.values()))
    claims = []
    for gbps, ratio in TT_OVER_TP.items():
        ttst, tbt = PAPER[gbps]
        at = {"tt_over_tp": ratio}
        claims += [
            Claim(f"{gbps} Gbps: TTST, full / selective", ttst, over(rows, "ttst_s", "full", "selective", **at)),
            Claim(f"{gbps} Gbps: TBT, partial / selective", tbt, over(rows, "tbt_s", "partial", "selective", **at)),
        ]
    worst = pick(rows, scheme="selective", tt_over_tp=TT_OVER_TP[15])
    ideal = ratio_of(worst["ttst_s"], worst["ideal_ttst_s"])
    claims.append(Claim("15 Gbps: TTST, selective / computation only", "above 1", ideal))
    labels = {ratio: f"{gbps} Gbps" for gbps, ratio in TT_OVER_TP.items()}
    panels = [
        bars(rows, "ttst_s", "TTST", "s", labels, "tt_over_tp"),
        bars(rows, "tbt_s", "TBT", "ms", labels, "tt_over_tp", 1e3),
    ]
    return rows, claims, panels


if __name__ == "__main__":
    main("fig12", "TTFT, TTST and TBT by bandwidth", make)
