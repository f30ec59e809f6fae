"""The bench of deciding: its views are sound, its rows those of DESIGN, and deciding keeps nothing."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from sched_groups import Group

from narrows.bench import sched
from narrows.errors import ConfigError
from narrows.sched.decide import decide
from narrows.sched.dual_balanced import DualBalanced
from narrows.sched.routing_tables import lower

COLUMNS = {"case", "policy", "instances", "active", "median_ms", "p99_ms", "reference_ms"}


def test_a_loaded_group_is_one_that_can_be() -> None:
    view = sched.loaded(DualBalanced(), 2, 16, "issue5", 3, sched.cohort("issue5", 20, 3))
    active = view.active
    assert active.num_requests == 2 * sched.PER_NODE * 16
    group = Group(view.nodes.tolist(), view.num_pages.tolist(), view.page_size, view.max_num_seqs)
    for row, moe in enumerate(active.moe.tolist()):
        span = slice(active.starts[row], active.starts[row + 1])
        group.active.append((moe, dict(zip(active.members[span].tolist(), active.shards[span].tolist(), strict=True))))
    assert group.used() == view.used_pages.tolist() and group.kv_tokens() == view.kv_tokens.tolist()
    group.waiting = list(view.waiting)
    decision = decide(view, DualBalanced(), 0.0)
    group.execute(decision)
    assert len(decision.admitted) == 20, "what is measured is admission, not refusal"
    assert view.active.degrees.max() > 1


def test_rows_have_the_columns_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sched, "NODES", (4,))
    cases = ("step-32", "admit-issue1", "memory")
    result = sched.run(("dual-balanced", "least-batch"), cases=cases, rounds=2, total=3000)
    assert result["name"] == "sched" and set(result) == {"name", "config", "results", "environment"}
    rows = result["results"]
    assert all(set(row) >= COLUMNS for row in rows)
    assert [row["case"] for row in rows[:4]] == [
        "step-32",
        "admit-issue1-central",
        "admit-issue1-hierarchical",
        "memory",
    ]
    assert [row["policy"] for row in rows] == ["dual-balanced"] * 4 + ["least-batch"] * 4
    assert rows[0]["active"] == 32 * 32 and rows[1]["arrivals"] == 90 and rows[1]["paper_ms"] == 5.0
    assert all(0 < row["median_ms"] <= row["p99_ms"] for row in rows)
    assert rows[3]["requests"] >= 3000


def test_an_unknown_case_or_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="case: step-7 is not known; use some of step-32"):
        sched.run(("dual-balanced",), cases=("step-7",))
    with pytest.raises(ConfigError, match="policy: 'nobody'"):
        sched.run(("nobody",))


def test_deciding_keeps_nothing() -> None:
    """Ten times as many requests, no more memory: what grows is under a byte a request."""
    group = sched.empty(4, 100_000, 256, ())
    lines = [sched.cohort("issue1", 500, seed) for seed in range(4)]
    view = replace(group, waiting=lines[0])

    def pass_through(requests: int) -> int:
        nonlocal view
        done = 0
        while done < requests:
            decision = decide(view, DualBalanced(), 0.0)
            lower(view, decision)
            placements = [placement for _, placement in decision.admitted]
            done += len(placements)
            view = sched.holding(group, placements, lines[done // 500 % 4])
        view = replace(group, waiting=lines[0])
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        first = pass_through(3000)
        assert pass_through(30_000) - first < 30_000
    finally:
        tracemalloc.stop()
    assert np.array_equal(group.used_pages, np.zeros(32)), "a view is not written to"
