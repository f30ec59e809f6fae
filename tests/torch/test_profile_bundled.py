"""The claim of profiles on the real model: what is important by position in one kind of text is so in another."""

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data import topics

import numpy as np
import numpy.typing as npt
import pytest
import torch

from narrows import kernels
from narrows.kernels.base import Kernels
from narrows.models.catalog import resolve
from narrows.models.fingerprint import folder_fingerprint
from narrows.models.layers.decoder import Model
from narrows.models.load import load_model
from narrows.profile.importance import VERSION, Group, ImportanceProfile, IntArray, blocks_for
from narrows.profile.measuring.importance import NUM_ROWS, TextRun, measure_importance
from narrows.profile.orders import on_demand_ratio, order_blocks
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


def text_of(kind: str) -> list[int]:
    text = Path(argparse.__file__).read_text(encoding="utf-8") if kind == "code" else topics.topics["import"]
    return tokenizer().encode(text)


def selected(tokens: list[int]) -> IntArray:
    run = TextRun(*loaded(), LENGTH + NUM_ROWS)
    run.prefill(tokens[:LENGTH])
    return run.decode(tokens[LENGTH : LENGTH + NUM_ROWS])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("calibration", "evaluation"), [("prose", "code"), ("code", "prose")])
def test_a_profile_of_another_kind_of_text_orders_the_push(calibration: str, evaluation: str, threads: None) -> None:
    model, own, selector = loaded()
    made = measure_importance(
        model, own, selector, text_of(calibration), fingerprint=folder_fingerprint(resolve(NAME)),
        groups=(LENGTH,), num_prompts=2,
    )  # fmt: skip
    text = text_of(evaluation)
    counts = selected(text[len(text) // 3 :])
    num_layers, num_blocks = len(counts), blocks_for(LENGTH)
    half = num_layers * num_blocks // 2

    def ratio(kind: str, matrix: npt.NDArray[np.float32] | None = None) -> float:
        return on_demand_ratio(counts, order_blocks(kind, matrix, num_layers, num_blocks), half)  # type: ignore[arg-type]

    profile = ratio("profile", made.importance_for(LENGTH, num_blocks))
    oracle = ImportanceProfile("", "", VERSION, (Group.from_counts(counts, 1, num_blocks),))
    optimal = ratio("profile", oracle.importance_for(LENGTH, num_blocks))
    assert profile <= 0.6 * ratio("sequential")
    assert profile <= 0.6 * ratio("random")
    assert optimal < profile <= 1.7 * optimal
