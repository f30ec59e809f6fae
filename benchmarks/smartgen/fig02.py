"""Time to transfer all KV and to prefill, over the length of the prompt, on two links."""

from dataclasses import replace

from benchmarks.smartgen.common import TT_OVER_TP, Claim, Options, main, pick
from narrows.bench.figures import Row, ratio_of
from narrows.bench.plots import Panel


def make(options: Options) -> tuple[list[Row], list[Claim], list[Panel]]:
    longest = options.workload.prompt_tokens
    sizes = sorted({longest, longest * 3 // 4, longest // 2, longest // 4})
    rows = options.rows(["full"], tt_over_tp=(TT_OVER_TP[25], TT_OVER_TP[15]))
    links = tuple(row["link_gbps"] for row in rows)
    for size in sizes[:-1]:
        rows += options.rows(["full"], link_gbps=links, workload=replace(options.workload, prompt_tokens=size))
    rows.sort(key=lambda row: row["prompt_tokens"])
    for row in rows:
        row["gap"] = ratio_of(row["handover_s"], row["prefill_s"])
    fast, slow = links
    at = {rate: [pick(rows, prompt_tokens=size, link_gbps=rate) for size in sizes] for rate in links}
    claims = [
        Claim("25 Gbps: transfer / prefill, longest prompt", "up to 4.7x", at[fast][-1]["gap"]),
        Claim("15 Gbps: transfer / prefill, longest prompt", "up to 7.1x", at[slow][-1]["gap"]),
        Claim("25 Gbps: the same, shortest prompt", "smaller", at[fast][0]["gap"]),
        Claim("15 Gbps: the same, shortest prompt", "smaller", at[slow][0]["gap"]),
    ]
    lines = {
        "prefill": (sizes, [row["prefill_s"] for row in at[fast]]),
        "transfer, 25 Gbps": (sizes, [row["handover_s"] for row in at[fast]]),
        "transfer, 15 Gbps": (sizes, [row["handover_s"] for row in at[slow]]),
    }
    return rows, claims, [Panel("by length", "prompt tokens", "s", lines)]


if __name__ == "__main__":
    main("fig02", "full transfer against prefill", make)
