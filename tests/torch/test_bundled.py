"""The bundled model: its tokenizer, and its answers against transformers on the same converted folder."""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from narrows import LLM, SamplingParams
from narrows.models.catalog import resolve

NAME = "smollm2-135m"
NUM_TOKENS = 64


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve(NAME) / "tokenizer.json"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(NAME, dtype="float32") as one:
        yield one


@cache
def theirs() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(resolve(NAME), dtype=torch.float32)


def chat(text: str) -> str:
    """SmolLM2's published template, written out."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def long_prompt() -> str:
    """4,000 tokens of real text that every Python carries, and a question about it."""
    text = tokenizer().encode(Path(argparse.__file__).read_text(encoding="utf-8"))
    return chat(f"{tokenizer().decode(text.ids[:4000])}\n\nWhat is the text above about?")


PROMPTS = {
    "question": lambda: chat("What is the capital of France?"),
    "code": lambda: chat("Write a Python function that returns the n-th Fibonacci number."),
    "continuation": lambda: "The quick brown fox jumps over the lazy dog. Then the dog",
    "not English": lambda: "Der Zug nach München fährt um 7:45 Uhr ab. 東京は日本の首都です。 \U0001f642",
    "long": long_prompt,
}


@pytest.mark.slow
@pytest.mark.timeout(600)  # transformers and ours over 4,000 tokens in float32, on two cores
@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_output_equals_transformers(name: str, llm: LLM) -> None:
    """Over the whole path: prefill and decode in two processes, the KV crossing between them."""
    prompt = tokenizer().encode(PROMPTS[name]()).ids
    assert (len(prompt) >= 4000) == (name == "long")
    (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True))
    output = list(answer.token_ids)
    ids = torch.tensor([prompt])
    expected = theirs().generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=-1
    )
    assert output == expected[0, len(prompt) :].tolist()
    if name == "question":
        assert tokenizer().decode(output).startswith("The capital of France is Paris.")


def test_tokenizer_round_trip() -> None:
    texts = [
        "Hello, world!",
        "  two  spaces\tand\n\nlines \r\n",
        "naïve café, Ωμέγα, Привет, 東京, العربية, हिन्दी, \U0001f469\u200d\U0001f680",
        "\x00\x7f\u200b\ufeff",
        "don't you'll I'VE x=1;y[2]**3",
    ]
    for text in texts:
        assert tokenizer().decode(tokenizer().encode(text).ids) == text


def test_tokenizer_keeps_digits_apart_and_specials_whole() -> None:
    # The first words of SmolLM2's published vocabulary, and how its tokenizer treats digits.
    assert [tokenizer().id_to_token(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer().encode("12 345").tokens == ["1", "2", "Ġ", "3", "4", "5"]
    assert tokenizer().encode("<|im_start|>user<|im_end|>").ids == [1, *tokenizer().encode("user").ids, 2]
    assert tokenizer().encode("Hello").tokens == ["Hello"]  # no token is put in front
    assert tokenizer().get_vocab_size() == 49152
    assert tokenizer().decode([1, *tokenizer().encode("user").ids, 2]) == "user"


def test_transformers_reads_the_folder_alike() -> None:
    folder = resolve(NAME)
    fast = AutoTokenizer.from_pretrained(folder)
    assert (fast.bos_token, fast.eos_token, fast.unk_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    for prompt in PROMPTS.values():
        assert fast(prompt()).input_ids == tokenizer().encode(prompt()).ids
    messages = [{"role": "user", "content": "Hi"}]
    assert fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == chat("Hi")


def test_chat_template() -> None:
    config = json.loads((resolve(NAME) / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = ImmutableSandboxedEnvironment().from_string(config["chat_template"])
    assert template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True) == chat("Hi")
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    assert template.render(messages=turns) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
    )
