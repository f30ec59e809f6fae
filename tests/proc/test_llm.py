"""Offline batches through the public API, over real processes."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq

from narrows import LLM, SamplingParams
from narrows.core.events import Event
from narrows.core.ids import RequestId
from narrows.core.request import FinishReason, Request
from narrows.core.wire import Refused
from narrows.errors import ConfigError, ModelError, RequestError, Unavailable
from narrows.runtime.channel import encode
from narrows.runtime.client import Output

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


def test_arrays_of_token_ids_are_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    (plain,) = llm.generate([[104, 105]], params)
    for prompts in (np.array([104, 105]), [np.array([104, 105])], [[np.int32(104), 105]]):
        assert llm.generate(prompts, params) == [replace(plain, cached_tokens=0)]
    with pytest.raises(RequestError, match="token ids"):
        llm.generate([[104, 1.5]])


def test_many_threads_may_abort_and_submit(llm: LLM) -> None:
    def busy() -> None:
        for _ in range(3000):
            llm.cluster.abort(RequestId("unknown"))

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert len(llm.generate(["x"] * 8, SamplingParams(max_tokens=2))) == 8
    for thread in threads:
        thread.join()


def test_strangers_on_the_control_channel_are_not_heard(llm: LLM) -> None:
    hub = llm.cluster._hub
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger, context.socket(zmq.DEALER) as pretender:
        pretender.setsockopt(zmq.IDENTITY, b"decode-0/0/main")
        for socket in (stranger, pretender):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(hub.address)
        for frames in ([b"hello"], [b"a", b"b", b"c"], [b""], [b"Released\0\xff"]):
            stranger.send_multipart(frames)
        pretender.send(encode(Refused("I am dead")))
        while hub.refused < 5:
            assert len(llm.generate("x", SamplingParams(max_tokens=2))) == 1
    assert llm.cluster.status().ready


def test_listeners_that_fail_take_nothing_with_them(tiny: Path) -> None:
    def failing(event: Event) -> None:
        raise ValueError("a bug of the listener")

    with LLM(str(tiny), observers=[failing], transport="tcp", **SETTINGS) as llm:
        request = Request(RequestId("r"), (1, 2), SamplingParams(max_tokens=2))
        ended = threading.Event()

        def sink(output: Output) -> None:
            if output.finish_reason is not None:
                ended.set()
            raise ValueError("a bug of the sink")

        llm.cluster.submit(request, sink)
        assert ended.wait(30)
        assert len(llm.generate("still fine", SamplingParams(max_tokens=2))) == 1


def test_a_cluster_whose_thread_fails_says_so_to_everybody(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(tiny), transport="tcp", **SETTINGS) as llm:
        monkeypatch.setattr(llm.cluster, "_look_after_workers", lambda now_s: 1 / 0)
        answer, params = None, SamplingParams(max_tokens=200, ignore_eos=True)
        with contextlib.suppress(Unavailable):
            while answer is None or answer.finish_reason is not FinishReason.ERROR:
                (answer,) = llm.generate("a", params)
            assert "division by zero" in (answer.error or "")
        with pytest.raises(Unavailable, match="division by zero"):
            llm.generate("a", params)
        assert not llm.cluster.status().ready


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


def test_a_timeline_that_can_not_be_written_is_said_before_anything_starts(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .*can not be written"):
        LLM(str(tiny), trace=str(tmp_path / "missing" / "trace.json"))
