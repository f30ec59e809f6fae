"""The claim of profiles on the real model: what is important by position in one kind of text is so in another."""

import argparse
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data import topics
from statistics import mean

import numpy as np
import numpy.typing as npt
import pytest
import torch

from narrows import kernels
from narrows.kernels.base import Kernels
from narrows.kv.blocks import blocks_for
from narrows.models.catalog import resolve
from narrows.models.layers.decoder import Model
from narrows.models.load import load_model
from narrows.profile.importance import VERSION, Group, ImportanceProfile, IntArray
from narrows.profile.measuring.importance import NUM_ROWS, TextRun
from narrows.profile.orders import on_demand_ratio, order_blocks
from narrows.profile.smoothing import smooth
from narrows.select.base import Selector
from narrows.select.registry import open_selector
from narrows.select.shape import SelectorShape
from narrows.server.tokenizer import Tokenizer

NAME = "smollm2-135m"
LENGTH = 768


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve(NAME))


@pytest.fixture(scope="module")
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the kernels have their own
    yield
    torch.set_num_threads(before)


@cache
def loaded() -> tuple[Model, Kernels, Selector]:
    own = kernels.load()
    model = load_model(NAME, torch.bfloat16, own, max_positions=2048)
    spec = model.spec
    shape = SelectorShape(spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim, 32, torch.bfloat16)
    return model, own, open_selector("exact", shape=shape, ratio=0.2, kernels=own)


@cache
def selected(kind: str) -> list[IntArray]:
    """How often decode selected each token of three prompts of that kind, [L, LENGTH] each."""
    if kind == "code":
        text = "\n".join(Path(module.__file__).read_text(encoding="utf-8") for module in (argparse, tarfile))
    else:
        text = "\n".join(topics.topics[name] for name in ("import", "types", "with", "assignment"))
    tokens = tokenizer().encode(text)
    found = []
    for part in (1, 3, 5):
        own = tokens[(len(tokens) - LENGTH - NUM_ROWS) * part // 6 :]
        run = TextRun(*loaded(), LENGTH + NUM_ROWS)
        run.prefill(own[:LENGTH])
        found.append(run.decode(own[LENGTH : LENGTH + NUM_ROWS]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)  # seconds where the cores are free
@pytest.mark.parametrize(("calibration", "evaluation"), [("prose", "code"), ("code", "prose")])
def test_a_profile_of_another_kind_of_text_orders_the_push(calibration: str, evaluation: str, threads: None) -> None:
    num_layers, num_blocks = loaded()[0].spec.num_layers, blocks_for(LENGTH)
    half = num_layers * num_blocks // 2

    def by_importance(counts: npt.NDArray[np.float64] | IntArray) -> IntArray:
        made = ImportanceProfile("", "", VERSION, (Group.from_counts(counts, 1),))
        return order_blocks("profile", made.importance_for(LENGTH, num_blocks), num_layers, num_blocks)

    def ratio(order: IntArray) -> float:
        return mean(on_demand_ratio(counts, order, half) for counts in selected(evaluation))

    profile = ratio(by_importance(smooth(sum(selected(calibration)))))
    optimal = mean(on_demand_ratio(counts, by_importance(counts), half) for counts in selected(evaluation))
    assert profile <= 0.6 * ratio(order_blocks("sequential", None, num_layers, num_blocks))
    assert profile <= 0.6 * ratio(order_blocks("random", None, num_layers, num_blocks))
    assert optimal < profile <= 1.7 * optimal
