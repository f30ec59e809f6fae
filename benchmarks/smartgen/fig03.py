"""What the order of pushing is worth when half of the KV is pushed, and what on-demand transfer costs for as long as
nothing but fetched entries is kept."""

from dataclasses import replace
from statistics import fmean

from benchmarks.smartgen.common import Claim, Options, by_token, main, over, pick
from narrows.bench.figures import Row, ratio_of
from narrows.bench.plots import Panel
from narrows.core.scheme import Scheme

HALF = Scheme("", fraction=0.5, speculative=0.0)
TT_OVER_TP = 1.5  # half of the KV, and the metadata, cross while prefill computes
ORDERS = {"random": "random", "sequential": "sequential", "profile": "profile", "optimal": "profile"}


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    schemes = [replace(HALF, name=name, order=order) for name, order in ORDERS.items()]
    rows = options.rows(["full", *schemes], tt_over_tp=(TT_OVER_TP,))
    optimal = pick(rows, scheme="optimal")
    late = len(optimal["gaps_s"]) // 2
    sustained = ratio_of(fmean(optimal["gaps_s"][late:]), fmean(pick(rows, scheme="full")["gaps_s"][late:]))
    claims = [
        Claim("KV pushed before decode began, optimal", "50 %", 100 * optimal["pushed_share"], "%"),
        Claim("on-demand ratio, sequential", "53 %", 100 * pick(rows, scheme="sequential")["on_demand_ratio"], "%"),
        Claim("on-demand ratio, optimal", "34 %", 100 * optimal["on_demand_ratio"], "%"),
        Claim("on-demand ratio, profile", "not stated", 100 * pick(rows, scheme="profile")["on_demand_ratio"], "%"),
        Claim("TBT, sequential / optimal", "1.1x", over(rows, "tbt_s", "sequential", "optimal")),
        Claim("TBT of the later half, optimal / all local", "1.1x", sustained),
    ]
    bars = {"on-demand ratio": [100 * pick(rows, scheme=name)["on_demand_ratio"] for name in ORDERS]}
    panels = [
        Panel("half of the KV pushed", "", "fetched, %", bars=bars, labels=list(ORDERS)),
        by_token(rows, "gaps_s", "KV reuse only", "gap before the token, ms", 3, 1e3),
    ]
    return rows, claims, panels


if __name__ == "__main__":
    main("fig03", "the order of pushing, and KV reuse alone", make)
