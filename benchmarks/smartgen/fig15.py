"""What each order of pushing is worth: on-demand ratio and TBT.

Half of the KV is pushed, as in figure 3, and nothing is sent speculatively, so that what was not pushed is missed.
"""

from dataclasses import replace

from benchmarks.smartgen.common import Claim, Options, main, over, pick
from narrows.bench.figures import Row, ratio_of
from narrows.bench.plots import Panel
from narrows.core.scheme import Scheme

HALF = Scheme("", fraction=0.5, speculative=0.0)
TT_OVER_TP = 1.5  # half of the KV, and the metadata, cross while prefill computes
ORDERS = {
    "sequential": "sequential",
    "random": "random",
    "streaming": "streaming",
    "profile": "profile",
    "optimal": "profile",
}
PAPER = {"random": ("1.3x", "51 %"), "sequential": ("1.2x", "38 %"), "streaming": ("1.1x", "18 %")}


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    schemes = [replace(HALF, name=name, order=order) for name, order in ORDERS.items()]
    rows = options.rows(schemes, tt_over_tp=(TT_OVER_TP,))
    ratio = {name: pick(rows, scheme=name)["on_demand_ratio"] for name in ORDERS}
    claims = []
    for name, (speedup, less) in PAPER.items():
        kept = ratio_of(ratio["profile"], ratio[name])
        saved = None if kept is None else 100 * (1 - kept)
        claims += [
            Claim(f"TBT, {name} / profile", f"up to {speedup}", over(rows, "tbt_s", name, "profile")),
            Claim(f"on-demand ratio, less than {name} by", f"up to {less}", saved, "%"),
        ]
    first = {name: pick(rows, scheme=name)["on_demand_ratios"][0] for name in ORDERS}
    for name in (*PAPER, "optimal"):
        text = f"on-demand ratio of the second token, profile / {name}"
        claims.append(Claim(text, "not stated", ratio_of(first["profile"], first[name])))
    claims.append(
        Claim("on-demand ratio, profile / optimal", "close to 1", ratio_of(ratio["profile"], ratio["optimal"]))
    )
    labels = list(ORDERS)
    panels = [
        Panel("half pushed", "", "fetched, %", bars={"": [100 * ratio[name] for name in labels]}, labels=labels),
        Panel(
            "half pushed",
            "",
            "TBT, ms",
            bars={"": [1e3 * pick(rows, scheme=n)["tbt_s"] for n in labels]},
            labels=labels,
        ),
    ]
    return rows, claims, panels


if __name__ == "__main__":
    main("fig15", "orders of pushing", make)
