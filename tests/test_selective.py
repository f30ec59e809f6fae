"""Selective hand-over changes when KV crosses, and nothing else: the tokens are those of the same selector with all KV
there, whatever the scheme, the transport, the order of events and what goes wrong on the way."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from narrows.config import EngineConfig
from narrows.core.ids import RequestId
from narrows.core.request import Request, SamplingParams
from narrows.core.scheme import SCHEMES, Scheme
from narrows.metrics.definitions import check_lifetime, measure
from narrows.models.spec import read_spec
from narrows.profile.importance import Group, ImportanceProfile
from narrows.profile.timing import Timing
from narrows.runtime.build import build_model
from narrows.runtime.handing import Handing
from narrows.runtime.sizing import plan_sizes
from narrows.testing.cluster import MemoryCluster
from narrows.testing.models import tiny_model
from narrows.testing.selectors import PlainSelector

CONFIG = EngineConfig(
    dtype="bfloat16",  # with the kernels whose rows do not depend on the other rows of a step, to the bit
    kernels="native",
    max_model_len=160,
    page_size=8,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    kv_cache_memory_bytes=8 * 2**20,
)
LAYERS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PUSHED = 0.5  # of the KV blocks, before decode begins: what else is needed must be fetched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def loaded(folder: Path):  # type: ignore[no-untyped-def]
    return build_model(CONFIG, str(folder), plan_sizes(CONFIG, read_spec(folder)))


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 31 + i * 7 + i * i) % 256 for i in range(length))


def requests(*lengths: int) -> list[Request]:
    return [Request(RequestId(f"r{i}"), prompt(i, n), replace(GREEDY, seed=i)) for i, n in enumerate(lengths)]


def profile(selector: str) -> ImportanceProfile:
    matrix = np.random.default_rng(0).random((LAYERS, 100), dtype=np.float32)
    matrix[:2] = np.inf
    return ImportanceProfile("tiny", selector, 1, (Group(100, matrix),))


def handing(scheme: Scheme, *, ratio: float = 0.25, looks_ahead: bool = False, head_dim: int) -> Handing:
    selector = PlainSelector(head_dim, ratio=ratio, looks_ahead=looks_ahead)
    timing = Timing("tiny", "test", 1, 0.0, 1e-4, 0.0)
    return Handing(scheme, selector, profile(selector.fingerprint), timing, patience_s=2.0)


def selective(name: str) -> Scheme:
    scheme = SCHEMES[name]
    return scheme if scheme.full else replace(scheme, adaptive=False, fraction=PUSHED)


BATCH = (90, 33, 3, 120)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", ["auto", "selective", "sequential", "random", "streaming", "partial"])
def test_no_scheme_changes_a_token(folder: Path, loaded, name: str, looks_ahead: bool) -> None:  # type: ignore[no-untyped-def]
    head_dim = loaded[0].spec.head_dim
    full = handing(SCHEMES["full"], looks_ahead=looks_ahead, head_dim=head_dim)
    with MemoryCluster(CONFIG, folder, loaded=loaded, handing=full) as local:
        want = local.generate(requests(*BATCH))
    some = handing(selective(name), looks_ahead=looks_ahead, head_dim=head_dim)
    with MemoryCluster(CONFIG, folder, loaded=loaded, handing=some, frames=lambda: 3) as cluster:
        assert cluster.generate(requests(*BATCH)) == want
        check_lifetime(cluster.events)
        found = measure(cluster.events)
        assert sum(sum(fetched for _, fetched in m.on_demand) for m in found.values()) > 0
        for instance in cluster.instances.values():
            assert instance.phase.load().used_pages == 0
