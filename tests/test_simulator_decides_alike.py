"""The simulator and a running engine place the same requests alike; what both decided once is decided so for ever.

`python tests/test_simulator_decides_alike.py` records tests/golden/decisions.json anew.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from narrows.config import EngineConfig
from narrows.core.events import Event, EventKind
from narrows.core.ids import RequestId
from narrows.core.request import Request, SamplingParams
from narrows.sched.group import Decision, GroupView, Placement, Waiting
from narrows.sched.hierarchy import decide_by_groups
from narrows.sched.registry import make_policy
from narrows.sched.state import GroupState
from narrows.sim.cost import Null
from narrows.sim.group import GroupShape
from narrows.sim.handover import HandOverModel
from narrows.sim.hardware import H200
from narrows.sim.model_shapes import DEEPSEEK_V3
from narrows.sim.roofline import Roofline
from narrows.sim.run import Listeners, PrefillShape, Setup, simulate
from narrows.sim.workload import Arrival
from narrows.testing.cluster import MemoryCluster
from narrows.testing.golden import plain, view_of, waiting_of
from narrows.testing.models import tiny_model

GOLDEN = Path(__file__).parent / "golden" / "decisions.json"
LOCAL = ("least-batch", "least-cache", "round-robin", "vllm", "sglang-tokens", "dynamo-cost")
SPREADING = ("dual-balanced", "uniform-cp:2", "segment:64", "elastic-cp", "least-batch", "least-cache")
PREFILL, DECODE, SEQS, PAGE_SIZE = 2, 3, 6, 8

# (prompt, output) lengths; the second wave comes when the long ones of the first have had some tokens and the short
# ones have ended.
FIRST = ((40, 30), (9, 2), (24, 2), (33, 30), (5, 2), (50, 2), (17, 30), (12, 2))
SECOND = ((44, 4), (7, 4), (21, 4), (36, 4), (15, 4))
SOME = 10
TRACE = (*FIRST, *SECOND)

Placed = tuple[GroupView, Waiting, Placement | None]


class Recording:
    """A policy that writes down what it says."""

    def __init__(self, policy: Any) -> None:
        self.name, self.rebalances = policy.name, policy.rebalances
        self.said: list[tuple[Waiting, Placement | None]] = []
        self._policy = policy

    def place(self, state: GroupState, request: Waiting, now_s: float) -> Placement | None:
        placement: Placement | None = self._policy.place(state, request, now_s)
        self.said.append((request, placement))
        return placement


@dataclass
class Decided:
    """Where each request was prefilled and decoded, and every placement with what it was made from."""

    homes: list[tuple[str, str]]
    placed: list[Placed]
    num_pages: int


def homes_of(events: list[Event]) -> list[tuple[str, str]]:
    prefill = {e.request: str(e.instance) for e in events if e.kind is EventKind.PLACED}
    decode = {e.request: str(e.instance) for e in events if e.kind is EventKind.DECODE_STARTED}
    return [(prefill[RequestId(str(i))], decode[RequestId(str(i))]) for i in range(len(TRACE))]


def engine(folder: Path, policy: str) -> Decided:
    """The real coordinator, phases and transport, in one process."""
    config = EngineConfig(
        dtype="float32",
        kernels="reference",
        max_model_len=128,
        page_size=PAGE_SIZE,
        max_num_seqs=SEQS,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=2 * 2**20,
        prefill=PREFILL,
        decode=DECODE,
        policy=policy,
        enable_prefix_caching=False,
    )
    with MemoryCluster(config, folder) as cluster:
        coordinator = cluster.coordinator
        recording = coordinator._policy = Recording(coordinator._policy)
        views: list[GroupView] = []
        look = coordinator.group_view

        def group_view(instances: Any) -> GroupView:
            views.append(look(instances))
            return views[-1]

        coordinator.group_view = group_view  # type: ignore[method-assign]
        cluster.deliver()
        for i in range(len(FIRST)):
            cluster.submit(request_of(i))
        while not had_some(cluster.events):
            assert cluster.turn()
        for i in range(len(FIRST), len(TRACE)):
            cluster.submit(request_of(i))
        cluster.run()
        num_pages = int(views[0].num_pages[0])
        placed = [(view, *said) for view, said in zip(views, recording.said, strict=True)]
        return Decided(homes_of(cluster.events), placed, num_pages)


def request_of(i: int) -> Request:
    prompt, output = TRACE[i]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=i)
    return Request(RequestId(str(i)), tuple((i * 31 + j * 7) % 256 for j in range(prompt)), params)


def had_some(events: list[Event]) -> bool:
    """Whether the short ones of the first wave have ended and each long one has had some tokens."""
    ended = {e.request for e in events if e.kind is EventKind.FINISHED}
    tokens = [e.request for e in events if e.kind is EventKind.TOKEN]
    return all(
        RequestId(str(i)) in ended if output == 2 else tokens.count(RequestId(str(i))) >= SOME
        for i, (_, output) in enumerate(FIRST)
    )


def simulated(policy: str, num_pages: int) -> Decided:
    """The same on virtual time: a step a second, prefill and link so quick that some tokens are had at SOME + 1/2 s."""
    cost = Null(phase_s=1 / 7, prefill_step_s=0.01)
    arrivals = [Arrival(0.0, *lengths) for lengths in FIRST] + [Arrival(SOME + 0.5, *lengths) for lengths in SECOND]
    placed: list[Placed] = []
    outcome = simulate(
        Setup(
            tuple(arrivals),
            cost,
            make_policy(policy, local=True),
            GroupShape(DECODE, DECODE, num_pages, PAGE_SIZE, SEQS),
            PrefillShape(
                cost, PREFILL, num_pages, PAGE_SIZE, 1e9, HandOverModel(2, 64.0), 0.0, SEQS, 64, reuse_prefixes=False
            ),
            lock_step=False,
        ),
        Listeners(placed=lambda view, request, placement, now_s: placed.append((view, request, placement))),
    )
    return Decided(homes_of(outcome.events()), placed, num_pages)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("policy", LOCAL)
def test_engine_and_simulator_place_alike(folder: Path, policy: str) -> None:
    real = engine(folder, policy)
    virtual = simulated(policy, real.num_pages)
    assert virtual.homes == real.homes
    assert len({decode for _, decode in real.homes}) == DECODE
    # The first wave is placed before anything runs: there the views themselves are the same.
    for (view, request, placement), (seen, asked, said) in zip(
        real.placed[: len(FIRST)], virtual.placed[: len(FIRST)], strict=True
    ):
        assert plain(view) == plain(seen)
        assert request.num_tokens == asked.num_tokens
        assert placement == said


# ---- golden decisions


def recorded(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Every decision of one tiny trace: placements of the engine and of the simulator, steps of lock-step groups."""
    placements: list[dict[str, Any]] = []
    for policy in LOCAL:
        real = engine(folder, policy)
        for source, decided in (("engine", real), ("simulator", simulated(policy, real.num_pages))):
            for view, request, placement in decided.placed:
                quiet = Waiting(request.num_tokens, 0.0, request.cached)  # the engine's clock is not the trace's
                placements.append(
                    {
                        "source": source,
                        "policy": policy,
                        "view": plain(view),
                        "request": plain(quiet),
                        "placement": plain(placement),
                    }
                )
    steps: list[dict[str, Any]] = []
    for policy in SPREADING:

        def note(view: GroupView, decision: Decision, now_s: float, policy: str = policy) -> None:
            steps.append({"policy": policy, "now_s": now_s, "view": plain(view), "decision": plain(decision)})

        # Four instances with so little memory that requests wait, grow and are preempted.
        arrivals = [Arrival(i / 100, 30 + 37 * i % 90, 3 + 11 * i % 40) for i in range(16)]
        shape = GroupShape(4, 2, 20, PAGE_SIZE, 4)
        simulate(
            Setup(tuple(arrivals), Roofline(H200, DEEPSEEK_V3), make_policy(policy), shape), Listeners(decided=note)
        )
    return {"placements": placements, "steps": steps}


def golden(kind: str) -> Iterator[dict[str, Any]]:
    yield from json.loads(GOLDEN.read_text())[kind]


def test_recorded_placements_replay() -> None:
    sources = set()
    for row in golden("placements"):
        policy = make_policy(row["policy"], local=True)
        placement = policy.place(GroupState(view_of(row["view"])), waiting_of(row["request"]), 0.0)
        assert plain(placement) == row["placement"], (row["source"], row["policy"])
        sources.add((row["source"], row["policy"]))
    assert len(sources) == 2 * len(LOCAL)


def test_recorded_decisions_replay() -> None:
    kinds = {"admitted": 0, "grown": 0, "stuck": 0}
    for row in golden("steps"):
        decision = decide_by_groups(view_of(row["view"]), make_policy(row["policy"]), row["now_s"])
        assert plain(decision) == row["decision"], (row["policy"], row["now_s"])
        for kind in kinds:
            kinds[kind] += bool(row["decision"][kind])
    assert all(kinds.values()), f"the recorded trace is to have every kind of decision: {kinds}"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        GOLDEN.write_text(json.dumps(recorded(tiny_model(Path(made))), separators=(",", ":")) + "\n")
