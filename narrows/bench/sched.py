"""How long deciding takes: a full decision of a step, the admission of a second's arrivals, and whether memory grows.

    step-BATCH        rebalancing, growth, admission of what arrives in a step of 50 ms, and all routing tables, for 32
                      instances with that batch each
    admit-MIX-central|hierarchical
                      the decision that admits all arrivals of a second: NanoCP's cohorts of section 7 (Issue 1 % at 90
                      requests/s and Issue 5 % at 45, for four nodes of eight; more nodes get more), by one scheduler or
                      in groups of four nodes
    memory            a million requests come and go on 32 instances

The reference is the plain Python version on the same views in the same run, where it takes seconds at most; `paper_ms`
is what NanoCP's text says of its own control plane, in C++ on another machine. Lengths are those of sim.mixes.
"""

import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from narrows.bench.results import document, show
from narrows.errors import ConfigError
from narrows.launch import console
from narrows.sched import compiled
from narrows.sched.base import GroupPolicy
from narrows.sched.decide import decide, decide_plainly
from narrows.sched.group import Bindings, GroupView, Ints, Placement, Waiting
from narrows.sched.hierarchy import Hierarchy, decide_by_groups
from narrows.sched.registry import make_policy
from narrows.sched.routing_tables import lower, lower_plainly
from narrows.sim.mixes import mix

Row = dict[str, Any]
BATCHES = (32, 64, 128, 256)  # per instance
NODES = (4, 8, 16, 32, 64, 128, 256)
PER_NODE = 8
PAGE_SIZE = 64  # tokens
STEP_S = 0.05
RATES = {"issue1": 90.0, "issue5": 45.0}  # requests/s on four nodes
BATCH = 64  # active requests of an instance while a cohort comes
GROUP = Hierarchy(above=0, nodes_per_group=4)
REFERENCE_ROUNDS, REFERENCE_INSTANCES = 3, 256  # the plain version is measured so often, and up to so many instances
VIEWS = 4  # of one case, measured in turn
TOTAL = 1_000_000  # requests of the memory case
PAPER_MS = {  # section 7
    ("admit-issue1-central", 32): 5.0,
    ("admit-issue1-central", 256): 119.5,
    ("admit-issue1-hierarchical", 32): 5.5,
    ("admit-issue1-hierarchical", 256): 13.6,
    ("admit-issue5-central", 32): 24.4,
    ("admit-issue5-central", 256): 109.3,
    ("admit-issue5-hierarchical", 32): 18.0,
    ("admit-issue5-hierarchical", 256): 19.0,
}
TITLES = {"step": "deciding a step", "admit": "admitting a second's arrivals", "memory": "requests coming and going"}
CASES = (*(f"step-{batch}" for batch in BATCHES), *(f"admit-{name}" for name in RATES), "memory")


def run(policies: Sequence[str], *, cases: Sequence[str] = (), rounds: int = 200, total: int = TOTAL) -> dict[str, Any]:
    """Measure and return the result document, printing rows. Raises ConfigError for an unknown policy or case."""
    if unknown := [case for case in cases if case not in CASES]:
        raise ConfigError(f"case: {', '.join(unknown)} is not known; use some of {', '.join(CASES)}")
    made = [(name, make_policy(name)) for name in policies]
    compiled.prepare(console.print)
    rows: list[Row] = []
    for name, policy in made:
        for case in cases or CASES:
            console.print(f"{name}: {case}")
            kind, _, rest = case.partition("-")
            if kind == "step":
                found = [measure_step(policy, int(rest), rounds)]
            elif kind == "admit":
                found = [row for nodes in NODES for row in measure_admission(policy, rest, nodes, rounds)]
            else:
                found = [measure_memory(policy, total)]
            rows += [{"case": row.pop("case"), "policy": name, **row} for row in found]
    for kind, title in TITLES.items():
        if these := [row for row in rows if row["case"].partition("-")[0] == kind]:
            show(title, these)
    return document("sched", {"policies": list(policies), "rounds": rounds, "page_size": PAGE_SIZE}, rows)


def measure_step(policy: GroupPolicy, batch: int, rounds: int) -> Row:
    arrivals = round(RATES["issue1"] * STEP_S)
    views = [loaded(policy, 4, batch, "issue1", seed, cohort("issue1", arrivals, seed)) for seed in range(VIEWS)]

    def full(view: GroupView) -> None:
        tables = lower(view, decide(view, policy, 0.0))
        for instance in range(len(view.nodes)):
            tables.of(instance)

    def plain(view: GroupView) -> None:
        lower_plainly(view, decide_plainly(view, policy, 0.0))

    median_ms, p99_ms = timed(full, views, rounds)
    return {
        "case": f"step-{batch}",
        "instances": len(views[0].nodes),
        "active": views[0].active.num_requests,
        "median_ms": median_ms,
        "p99_ms": p99_ms,
        "reference_ms": timed(plain, views, REFERENCE_ROUNDS)[0],
        "arrivals": arrivals,
        "step_percent": 100 * median_ms / (1e3 * STEP_S),
    }


def measure_admission(policy: GroupPolicy, name: str, nodes: int, rounds: int) -> Iterator[Row]:
    arrivals = round(RATES[name] * nodes / 4)
    views = [loaded(policy, nodes, BATCH, name, seed, cohort(name, arrivals, seed)) for seed in range(VIEWS)]
    instances = len(views[0].nodes)
    ways: dict[str, Callable[[GroupView], object]] = {
        "central": lambda view: decide(view, policy, 0.0),
        "hierarchical": lambda view: decide_by_groups(view, policy, 0.0, hierarchy=GROUP),
    }
    reference_ms = None
    if instances <= REFERENCE_INSTANCES:
        reference_ms = timed(lambda view: decide_plainly(view, policy, 0.0), views, REFERENCE_ROUNDS)[0]
    for way, act in ways.items():
        case = f"admit-{name}-{way}"
        median_ms, p99_ms = timed(act, views, rounds)
        yield {
            "case": case,
            "instances": instances,
            "active": views[0].active.num_requests,
            "median_ms": median_ms,
            "p99_ms": p99_ms,
            "reference_ms": reference_ms,
            "paper_ms": PAPER_MS.get((case, instances)),
            "arrivals": arrivals,
        }


def timed(act: Callable[[GroupView], object], views: Sequence[GroupView], rounds: int) -> tuple[float, float]:
    """Median and 99th percentile in ms, over views in turn, each looked at once before."""
    for view in views:
        act(view)
    times = []
    gc.collect()
    for number in range(rounds):
        view = views[number % len(views)]
        begin = time.perf_counter()
        act(view)
        times.append(time.perf_counter() - begin)
    median, p99 = np.percentile(times, [50, 99]).tolist()
    return 1e3 * median, 1e3 * p99


def cohort(name: str, count: int, seed: int) -> tuple[Waiting, ...]:
    """Requests of a mix that have just been prefilled."""
    return tuple(Waiting(prompt + 1, 0.0) for prompt, _ in mix(name, count, seed))


def empty(nodes: int, num_pages: int, max_num_seqs: int, waiting: tuple[Waiting, ...]) -> GroupView:
    size = nodes * PER_NODE
    none, nobody = np.zeros(size, np.int64), np.zeros(0, np.int64)
    return GroupView(
        nodes=np.repeat(np.arange(nodes), PER_NODE),
        num_pages=np.full(size, num_pages),
        used_pages=none,
        kv_tokens=none,
        page_size=PAGE_SIZE,
        max_num_seqs=max_num_seqs,
        active=Bindings(nobody, np.zeros(1, np.int64), nobody, nobody),
        waiting=waiting,
    )


def loaded(
    policy: GroupPolicy, nodes: int, batch: int, name: str, seed: int, waiting: tuple[Waiting, ...]
) -> GroupView:
    """A group whose requests the policy has placed, `batch` for each instance, each somewhere in its output; pools
    have a quarter of their pages free, so that both arrivals and growth find room."""
    random = np.random.default_rng((seed, nodes, batch))
    lengths = mix(name, nodes * PER_NODE * batch, seed + 1000)
    tokens = [prompt + 1 + int(random.integers(0, output)) for prompt, output in lengths]
    num_pages = 2 * sum(tokens) // (nodes * PER_NODE * PAGE_SIZE) + max(tokens) // PAGE_SIZE
    group = empty(nodes, num_pages, 2 * batch + 64, tuple(Waiting(count, 0.0) for count in tokens))
    placements = [placement for _, placement in decide(group, policy, 0.0, aging_s=float("inf")).admitted]
    view = holding(group, placements, waiting)
    used = int(view.used_pages.max())
    return replace(view, num_pages=np.full(len(view.nodes), max(used + used // 3, num_pages)))


def holding(group: GroupView, placements: Sequence[Placement], waiting: tuple[Waiting, ...]) -> GroupView:
    """The group with these requests active, and nobody else."""
    degrees = [len(placement.members) for placement in placements]
    members = np.array([member for placement in placements for member in placement.members], np.int64)
    shards = np.array([share for placement in placements for share in placement.split], np.int64)
    active = Bindings(
        np.array([placement.moe for placement in placements], np.int64), np.cumsum([0, *degrees]), members, shards
    )
    return replace(
        group,
        used_pages=_sums(members, -(-shards // PAGE_SIZE), len(group.nodes)),
        kv_tokens=_sums(members, shards, len(group.nodes)),
        active=active,
        waiting=waiting,
    )


def _sums(members: Ints, values: Ints, size: int) -> Ints:
    sums = np.zeros(size, np.int64)
    np.add.at(sums, members, values)
    return sums


def measure_memory(policy: GroupPolicy, total: int) -> Row:
    """Each step admits what waits and ends what the one before admitted. Memory is compared after a tenth, when all
    that is kept once is there, and at the end."""
    group = empty(4, 100_000, 256, ())
    lines = [cohort("issue1", 1000, seed) for seed in range(8)]
    placements: list[Placement] = []
    times: list[float] = []
    first, done = 0, 0
    while done < total:
        view = holding(group, placements, lines[len(times) % len(lines)])
        begin = time.perf_counter()
        decision = decide(view, policy, 0.0)
        lower(view, decision)
        times.append(time.perf_counter() - begin)
        placements = [placement for _, placement in decision.admitted]
        done += len(placements)
        if not first and done >= total // 10:
            first = resident_bytes()
    median, p99 = np.percentile(times, [50, 99]).tolist()
    return {
        "case": "memory",
        "instances": len(group.nodes),
        "active": len(placements),
        "median_ms": 1e3 * median,
        "p99_ms": 1e3 * p99,
        "reference_ms": None,
        "requests": done,
        "growth_bytes": resident_bytes() - first,
    }


def resident_bytes() -> int:
    """What this process holds in memory; elsewhere than on Linux the most it ever held."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
