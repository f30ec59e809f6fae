"""Selective hand-over between real processes over shaped links."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import start, stop

from narrows import LLM, SamplingParams
from narrows.core.events import Event, EventKind
from narrows.core.ids import InstanceId
from narrows.core.scheme import SCHEMES
from narrows.core.trace import Span
from narrows.metrics.definitions import measure
from narrows.metrics.trace import busy_s
from narrows.testing.models import tiny_model

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kernels": "native",
    "threads": 1,
    "max_model_len": 512,
    "page_size": 16,
    "enable_prefix_caching": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["a text that is long enough to be worth it " * 8, "short", "another text, of another length " * 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "six", num_hidden_layers=6)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles of the tiny model are made in a cache of their own."""
    before = os.environ.get("NARROWS_CACHE")
    os.environ["NARROWS_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["NARROWS_CACHE"]
    else:
        os.environ["NARROWS_CACHE"] = before


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("select", ["infinigen", "hata", "quest", "exact", "streaming"])
def test_schemes_and_links_change_no_token(folder: Path, transport: str, select: str) -> None:
    """Every selector: full transfer over an open link, then every scheme over a slow one, in one cluster. Compared are
    the log probabilities of each token and its rivals, all computed from the same tokens: to the bit, as is the noise
    floor, the same run twice."""
    params = replace(GREEDY, logprobs=5)
    with LLM(str(folder), select=select, transfer="full", transport=transport, **SETTINGS) as llm:
        want, again = ([answer.tokens for answer in llm.generate(PROMPTS, params)] for _ in range(2))
        assert again == want, "the noise floor is not zero"
    events: list[Event] = []
    slow = {"transfer": "selective", "link_gbps": 0.002, "transport": transport, **SETTINGS}
    with LLM(str(folder), select=select, observers=[events.append], **slow) as llm:
        for name in ("selective", "sequential", "random", "streaming", "partial"):
            llm.cluster.adopt(SCHEMES[name])
            assert [answer.tokens for answer in llm.generate(PROMPTS, params)] == want, name
    found = measure(events).values()
    assert sum(fetched for m in found for _, fetched in m.on_demand) > 0, "nothing was remote"


def test_prefill_killed_while_decode_lacks_kv_is_answered_all_the_same(folder: Path) -> None:
    """With the tokens of a run in which nobody was killed."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(str(folder), select="quest", transfer="full", **SETTINGS) as llm:
        (want,) = llm.generate(PROMPTS[0], params)
    events: list[Event] = []
    slow = {"transfer": "selective", "link_gbps": 0.001, "transport": "tcp", **SETTINGS}
    with LLM(str(folder), select="quest", observers=[events.append], **slow) as llm:
        pids = llm.cluster.pids()

        def kill_once(event: Event) -> None:
            if event.kind is EventKind.TOKEN and pids:
                os.kill(pids.pop(InstanceId("prefill-0")), signal.SIGKILL)
                pids.clear()

        llm.cluster._observers = (*llm.cluster._observers, kill_once)  # type: ignore[attr-defined]
        (answer,) = llm.generate(PROMPTS[0], params)
        assert answer.token_ids == want.token_ids and answer.error is None
        assert any(event.kind is EventKind.PREEMPTED for event in events)


def test_a_server_takes_a_new_profile_without_a_pause(folder: Path, tmp_path: Path) -> None:
    """SIGHUP: the next hand-over follows the new file; one for another selector is refused and the old one stays."""
    from narrows.profile.importance import ImportanceProfile

    made = tmp_path / "importance.safetensors"
    with LLM(str(folder), select="quest", transfer="selective", **SETTINGS) as llm:
        kept = llm.cluster._source  # type: ignore[attr-defined]
    assert kept is not None
    profile = ImportanceProfile.load(Path(kept), model=None, selector=None)
    profile.save(made)
    server = start(
        "--dtype=bfloat16",
        "--threads=1",
        "--max-model-len=512",
        "--page-size=16",
        f"--model={folder}",
        "--select=quest",
        "--transfer=selective",
        f"--importance={made}",
        "--link-gbps=0.01",
    )
    ask = {"model": "six", "prompt": PROMPTS[0], "max_tokens": 5, "temperature": 0}
    before = server.post("/v1/completions", json=ask).json()["choices"][0]["text"]
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: any("follow scheme selective" in line for line in server.log))
    assert server.post("/v1/completions", json=ask).json()["choices"][0]["text"] == before
    ImportanceProfile(profile.model, "another", profile.version, profile.groups).save(made)
    server.process.send_signal(signal.SIGHUP)
    wait_for(lambda: any("stays as it is" in line and "selector" in line for line in server.log))
    assert server.post("/v1/completions", json=ask).json()["choices"][0]["text"] == before
    assert len(server.workers()) == 2
    for pid in server.workers().values():  # each starts again from the profile in use, not from what the file holds now
        os.kill(pid, signal.SIGKILL)
    assert server.post("/v1/completions", json=ask).json()["choices"][0]["text"] == before
    assert stop(server) == 0


def wait_for(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---- overlap


def spans_of(trace: Path) -> dict[str, list[Span]]:
    """Spans by instance from a Chrome trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans: dict[str, list[Span]] = {name: [] for name in names.values()}
    for e in events:
        if e["ph"] == "X":
            start_s, end_s = e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6
            spans[names[e["pid"]]].append(
                Span(e["cat"], e["name"], start_s, end_s, e["args"]["layer"], e["args"]["bytes"])
            )
    return spans


@pytest.mark.slow
@pytest.mark.parametrize("tt_over_tp", [0.5, 3.0])
def test_only_what_does_not_fit_behind_the_computation_is_exposed(tmp_path: Path, tt_over_tp: float) -> None:
    """Full transfer of the bundled model's KV: the time from the end of prefill to the last byte is at most
    max(0, transfer - compute) + 10 % of the longer of the two. A layer's KV crosses while the next is computed."""
    from narrows.demo import long_prompt

    trace = tmp_path / "trace.json"
    kv_bytes = 1500 * 30 * 3 * 256
    more = {"enable_prefix_caching": False, "max_num_batched_tokens": 2048}
    with LLM(trace=str(tmp_path / "first.json"), **more) as llm:
        prompt = long_prompt(llm.tokenizer, 1500)
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2))
    compute = [span for span in spans_of(tmp_path / "first.json")["prefill-0"] if span.lane == "compute"]
    prefill_s = max(span.end_s for span in compute) - min(span.start_s for span in compute)
    with LLM(trace=str(trace), link_gbps=kv_bytes * 8e-9 / (tt_over_tp * prefill_s), **more) as llm:
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=2))
    spans = spans_of(trace)["prefill-0"]
    compute = [span for span in spans if span.lane == "compute"]
    pushed = [span for span in spans if span.lane == "proactive"]
    begin, computed = min(span.start_s for span in compute), max(span.end_s for span in compute)
    last = max(span.end_s for span in pushed)
    transfer_s, compute_s = busy_s(pushed), computed - begin
    assert sum(span.num_bytes for span in pushed) >= len(prompt) * 30 * 3 * 256
    exposed_s = max(0.0, last - computed)
    assert exposed_s <= max(0.0, transfer_s - compute_s) + 0.1 * max(transfer_s, compute_s), (transfer_s, compute_s)
    # and each layer's post begins before the next layer is done
    starts = {span.layer: span.end_s for span in compute}
    for span in pushed:
        if 0 <= span.layer < 29:
            assert span.start_s <= starts[span.layer + 1]
