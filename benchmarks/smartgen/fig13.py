"""Each technique added to partial transfer, one by one. The paper's numbers: L20 instances, then V100S servers."""

from dataclasses import replace

from benchmarks.smartgen.common import TT_OVER_TP, Claim, Options, bars, main, over
from narrows.bench.figures import Row
from narrows.bench.plots import Panel
from narrows.core.scheme import SCHEMES

PARTIAL = SCHEMES["partial"]
PROFILE = replace(PARTIAL, name="+profile", order="profile")
PARALLEL = replace(PROFILE, name="+parallel", parallel_lanes=True)
SPECULATIVE = replace(PARALLEL, name="+speculative", speculative=SCHEMES["selective"].speculative)
PACKED = replace(SPECULATIVE, name="+packed", packed=True)  # ours, not the paper's


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    rows = options.rows(["full", PARTIAL, PROFILE, PARALLEL, SPECULATIVE, PACKED], tt_over_tp=(TT_OVER_TP[25],))
    claims = [
        Claim("partial: TTST, full / partial", "3.0x, 1.5x", over(rows, "ttst_s", "full", "partial")),
        Claim("partial: TBT, partial / full", "1.5x, 1.6x", over(rows, "tbt_s", "partial", "full")),
        Claim("TBT, partial / +profile", "1.03x, 1.1x", over(rows, "tbt_s", "partial", "+profile")),
        Claim("TBT, +profile / +parallel", "1.1x, 1.2x", over(rows, "tbt_s", "+profile", "+parallel")),
        Claim("TBT, +parallel / +speculative", "1.3x, 1.2x", over(rows, "tbt_s", "+parallel", "+speculative")),
        Claim("TBT, +speculative / +packed", "not there", over(rows, "tbt_s", "+speculative", "+packed")),
    ]
    labels = {TT_OVER_TP[25]: "25 Gbps"}
    panels = [
        bars(rows, "ttst_s", "TTST", "s", labels, "tt_over_tp"),
        bars(rows, "tbt_s", "TBT", "ms", labels, "tt_over_tp", 1e3),
    ]
    return rows, claims, panels


if __name__ == "__main__":
    main("fig13", "the techniques one by one", make)
