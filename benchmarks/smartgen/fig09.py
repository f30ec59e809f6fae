"""CTL over 64 tokens, by scheme and selector."""

from benchmarks.smartgen.common import Claim, Options, main, pick
from narrows.bench.figures import Row, ratio_of
from narrows.bench.handover import ctl_panel
from narrows.bench.plots import Panel

SCHEMES = ("full", "partial", "selective")


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    selectors = dict.fromkeys((options.selector,) if options.quick else (options.selector, "hata"))
    rows = options.rows(SCHEMES, selectors=tuple(selectors))
    claims, panels = [], []
    for selector in selectors:
        of = [row for row in rows if row["selector"] == selector]
        spike, last = pick(of, scheme="full")["ctl_s"], [pick(of, scheme=s)["ctl_s"][-1] for s in SCHEMES]
        claims += [
            Claim(f"{selector}: CTL of full at token 2 / token 1", "an early spike", ratio_of(spike[1], spike[0])),
            Claim(f"{selector}: last CTL, full / selective", "above 1", ratio_of(last[0], last[2])),
            Claim(f"{selector}: last CTL, partial / selective", "above 1", ratio_of(last[1], last[2])),
        ]
        panels.append(ctl_panel(of, selector))
    return rows, claims, panels


if __name__ == "__main__":
    main("fig09", "CTL by scheme", make)
