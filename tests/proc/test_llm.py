"""Offline batches through the public API, over real processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from narrows import LLM, SamplingParams
from narrows.core.request import FinishReason
from narrows.errors import ConfigError, ModelError, RequestError

SETTINGS = {"dtype": "float32", "kernels": "reference", "threads": 1, "max_model_len": 256, "page_size": 8}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), prefill=2, decode=2, max_num_seqs=2, max_queue=4, transport="tcp", **SETTINGS) as one:
        yield one


def test_a_batch_larger_than_the_queue_comes_back_in_order(llm: LLM) -> None:
    prompts = [f"prompt number {i} " * (i % 5 + 1) for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts[:3]]
    assert [answer.prompt_token_ids for answer in together] == [tuple(llm.tokenizer.encode(p)) for p in prompts]
    assert [answer.text for answer in together[:3]] == [answer.text for answer in alone]
    assert {len(answer.tokens) for answer in together} == {6}


def test_seeds_repeat_and_params_may_differ(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, seed=seed, ignore_eos=True) for seed in (1, 1, 2)]
    one, same, other = llm.generate(["once upon a time"] * 3, params)
    assert one.token_ids == same.token_ids != other.token_ids


def test_a_stop_string_ends_the_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    text = llm.generate("stop here", params)[0].text
    stop = text[4:6]
    (cut,) = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason is FinishReason.STOP


def test_logprobs_are_of_the_chosen_token(llm: LLM) -> None:
    (answer,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=3, logprobs=2, ignore_eos=True))
    for token in answer.tokens:
        assert token.logprob is not None
        assert token.logprob.top[0] == (token.id, token.logprob.logprob)


def test_what_is_wrong_is_said(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="prompt: is empty"):
        llm.generate([[]])
    with pytest.raises(RequestError, match="2 for 1 prompts"):
        llm.generate(["a"], [SamplingParams()] * 2)
    with pytest.raises(ModelError, match="no model"):
        LLM(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="decode"):
        LLM(decode=0)
    with pytest.raises(TypeError, match="modle"):
        LLM(modle="x")
    assert llm.generate("still fine", SamplingParams(max_tokens=2))[0].text is not None
