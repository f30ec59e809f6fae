"""On-demand ratio and gaps over the number of the token, by how much is sent speculatively in each step.

The paper's step takes about a third of a second, in which its link carries the speculative share; here a step takes
milliseconds and the link is as slow beside prefill as in the paper, so delivery takes more steps.
"""

from dataclasses import replace
from statistics import fmean

from benchmarks.smartgen.common import TT_OVER_TP, Claim, Options, by_token, main, pick
from narrows.bench.figures import Row, ratio_of
from narrows.bench.plots import Panel
from narrows.core.scheme import SCHEMES

REUSE = replace(SCHEMES["selective"], name="KV reuse", speculative=0.0)
SHARES = {"5 %": 0.05, "10 %": 0.1, "20 %": 0.2}
STEPS = {"5 %": "about 20", "10 %": "10", "20 %": "5"}
EARLY = 4  # gaps


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    shares = [replace(REUSE, name=name, speculative=share) for name, share in SHARES.items()]
    rows = options.rows(["full", REUSE, *shares], tt_over_tp=(TT_OVER_TP[25],))
    claims = [
        Claim(
            f"{name}: tokens until all is delivered", STEPS[name], pick(rows, scheme=name)["tokens_until_delivery"], ""
        )
        for name in SHARES
    ]
    early = {name: fmean(pick(rows, scheme=name)["gaps_s"][:EARLY]) for name in ("KV reuse", "20 %")}
    claims.append(Claim("first gaps, 20 % / KV reuse", "up to 1.4x", ratio_of(early["20 %"], early["KV reuse"])))
    panels = [
        by_token(rows, "on_demand_ratios", "on-demand ratio", "fetched, %", 2, 100.0),
        by_token(rows, "gaps_s", "TBT", "gap before the token, ms", 3, 1e3),
    ]
    return rows, claims, panels


if __name__ == "__main__":
    main("fig14", "speculative transfer", make)
