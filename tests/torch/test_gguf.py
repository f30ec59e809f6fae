"""GGUF files: what is converted must be the model it was made from; what can not be is refused by name."""

import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from narrows.errors import ModelError
from narrows.kernels.reference import ReferenceKernels
from narrows.models.catalog import resolve
from narrows.models.gguf.cache import cached_folder
from narrows.models.load import load_model
from narrows.models.spec import RopeSpec, read_spec
from narrows.testing.driver import Driver
from narrows.testing.models import SPECIAL_TOKENS, VOCAB_SIZE, tiny_model

Array = npt.NDArray[np.float32]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
BYTE_TOKENS: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": [*sorted(ByteLevel.alphabet()), *SPECIAL_TOKENS],
    "token_type": [1] * 256 + [3] * len(SPECIAL_TOKENS),
    "merges": ["t h"],  # a GGUF list can not be empty
    "eos_token_id": VOCAB_SIZE - 2,
    "bos_token_id": 256,
    "padding_token_id": VOCAB_SIZE - 1,
}
BYTE_TOKENS["tokens"][255] = "th"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NARROWS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(
    path: Path,
    source: Path,
    *,
    arch: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    extra: dict[str, Array] | None = None,
) -> Path:
    """A Hugging Face folder as a GGUF file: the direction that llama.cpp's converter goes."""
    spec = read_spec(source)
    fields: dict[str, Any] = {
        f"{arch}.block_count": spec.num_layers,
        f"{arch}.context_length": spec.max_positions,
        f"{arch}.embedding_length": spec.hidden,
        f"{arch}.feed_forward_length": spec.intermediate,
        f"{arch}.attention.head_count": spec.num_heads,
        f"{arch}.attention.head_count_kv": spec.num_kv_heads,
        f"{arch}.attention.key_length": spec.head_dim,
        f"{arch}.attention.value_length": spec.head_dim,
        f"{arch}.rope.freq_base": spec.rope.theta,
        f"{arch}.attention.layer_norm_rms_epsilon": spec.norm_eps,
        **{f"tokenizer.ggml.{name}": value for name, value in (tokenizer or BYTE_TOKENS).items()},
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, arch)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in fields.items():
        add.get(type(value), writer.add_array)(name, value)
    for name, tensor in load_file(source / "model.safetensors").items():
        values, target = tensor.numpy(), gguf_name(name)
        if arch == "llama" and ("attn_q." in target or "attn_k." in target):
            values = interleave(values, spec.num_heads if "attn_q." in target else spec.num_kv_heads)
        if values.ndim > 1 and quantization != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, gguf.quantize(values, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(target, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        index, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{index}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(values: Array, num_heads: int) -> Array:
    """Rows i and i + D/2 of each head next to each other."""
    heads = np.split(values, num_heads)
    half = len(heads[0]) // 2
    return np.concatenate([head[[i // 2 + (i % 2) * half for i in range(2 * half)]] for head in heads])


def logits(folder: Path) -> torch.Tensor:
    kernels = ReferenceKernels()
    return Driver(load_model(folder, torch.float32, kernels), kernels).step({0: range(0, 250, 5)})


SOURCES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {"rope_scaling": None}),
    "llama-biases": ("llama", "LlamaForCausalLM", {"rope_scaling": None, "attention_bias": True}),
    "llama-tied": ("llama", "LlamaForCausalLM", {"rope_scaling": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
}


@pytest.mark.parametrize("case", SOURCES)
def test_converted_model_is_the_original(tmp_path: Path, case: str) -> None:
    arch, architecture, overrides = SOURCES[case]
    # GGUF stores theta and eps in float32, where neither is a round number.
    source = tiny_model(tmp_path / "source", architecture, rope_theta=12_345.6, bos_token_id=256, **overrides)
    folder = resolve(write_gguf(tmp_path / "m.gguf", source, arch=arch))
    assert read_spec(folder) == read_spec(source)
    assert torch.equal(logits(folder), logits(source))


def test_llama3_rope_comes_back_from_its_factors(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    source = tiny_model(tmp_path / "source", rope_theta=500_000.0, rope_scaling=scaling)
    # By hand, from the published rule: wave lengths below 8192/4 keep, above 8192 slow down 32 times, between blend.
    waves = [2 * np.pi * 500_000.0 ** (2 * i / 16) for i in range(8)]
    factors = [
        1.0 if w < 2048 else 32.0 if w > 8192 else 1 / ((1 - s) / 32 + s) for w in waves for s in [(8192 / w - 1) / 3]
    ]
    assert len(set(factors)) == 3
    extra = {"rope_freqs.weight": np.array(factors, dtype=np.float32)}
    folder = resolve(write_gguf(tmp_path / "m.gguf", source, extra=extra))
    assert read_spec(folder).rope == RopeSpec(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert torch.equal(logits(folder), logits(source))

    wrong = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        resolve(write_gguf(tmp_path / "wrong.gguf", source, extra=wrong))


def test_linear_rope_and_windows(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0}
    source = tiny_model(tmp_path / "source", "MistralForCausalLM", bos_token_id=256, rope_scaling=rope)
    metadata = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 4.0,
        "llama.attention.sliding_window": 24,
    }
    folder = resolve(write_gguf(tmp_path / "m.gguf", source, metadata=metadata))
    assert read_spec(folder) == read_spec(source)
    assert torch.equal(logits(folder), logits(source))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stored_values(tmp_path: Path, name: str) -> None:
    """Matrices are what the library that made them takes out again, in F16 for F16 files, else in bfloat16."""
    kind = gguf.GGMLQuantizationType[name]
    dtype = torch.float16 if name == "F16" else torch.bfloat16
    # intermediate_size is a multiple of the block of 32 values.
    source = tiny_model(tmp_path / "source", "Qwen3ForCausalLM")
    folder = resolve(write_gguf(tmp_path / "m.gguf", source, arch="qwen3", quantization=kind))
    original, converted = (load_file(path / "model.safetensors") for path in (source, folder))
    assert converted.keys() == original.keys()
    for tensor_name, values in original.items():
        if values.ndim > 1:
            packed = gguf.quantize(values.numpy(), kind)
            values = torch.from_numpy(np.array(gguf.dequantize(packed, kind), dtype=np.float32))
        assert torch.equal(converted[tensor_name], values.to(dtype)), tensor_name
    assert read_spec(folder).dtype == str(dtype).removeprefix("torch.")


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "architecture": ({"arch": "mamba"}, ["general.architecture", "mamba", "qwen3"]),
    "experts": ({"metadata": {"llama.expert_count": 8}}, ["llama.expert_count"]),
    "split": ({"metadata": {"split.count": 3}}, ["split.count", "3"]),
    "rope type": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, ["llama.rope.scaling.type", "yarn", "linear"]),
    "partial rope": ({"metadata": {"llama.rope.dimension_count": 8}}, ["llama.rope.dimension_count", "8", "16"]),
    "value size": ({"metadata": {"llama.attention.value_length": 8}}, ["llama.attention.value_length"]),
    "unknown tensor": ({"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, ["blk.0.attn_sinks.weight"]),
    "tokenizer": ({"tokenizer": {**BYTE_TOKENS, "model": "bert"}}, ["tokenizer.ggml.model", "bert", "gpt2"]),
    "words": ({"tokenizer": {**BYTE_TOKENS, "pre": "tekken"}}, ["tokenizer.ggml.pre", "tekken", "smollm"]),
    "merges": ({"tokenizer": {**BYTE_TOKENS, "merges": ["x yz"]}}, ["tokenizer.ggml.merges"]),
    "eos": ({"tokenizer": {**BYTE_TOKENS, "eos_token_id": 999}}, ["tokenizer.ggml.eos_token_id", "999"]),
    "no tokens": ({"tokenizer": {"model": "gpt2"}}, ["tokenizer.ggml.tokens"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(tmp_path: Path, cache: Path, case: str) -> None:
    options, named = REFUSED[case]
    source = tiny_model(tmp_path / "source", rope_scaling=None)
    path = write_gguf(tmp_path / "refused.gguf", source, **options)
    with pytest.raises(ModelError) as caught:
        resolve(path)
    for word in ["refused.gguf", *named]:
        assert word in str(caught.value)
    assert list((cache / "models").iterdir()) == []


def test_truncated_files(tmp_path: Path, cache: Path) -> None:
    """Cut anywhere: in the header, in the metadata, in the tensor list, in the last tensor."""
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model(tmp_path / "source", rope_scaling=None)).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 20, 100, 1000, 4000, 6000, 8000, len(whole) // 2, len(whole) - 64]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf is truncated or no GGUF file"):
            resolve(cut)
    cut.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ModelError, match=r"cut\.gguf is truncated or no GGUF file"):
        resolve(cut)
    assert list((cache / "models").iterdir()) == []


def test_conversion_happens_once_and_anew_for_a_changed_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "a", rope_scaling=None))
    steps: list[tuple[int, int]] = []
    first = resolve(path, progress=lambda done, total: steps.append((done, total)))
    total = len(load_file(first / "model.safetensors"))
    assert steps == [(i, total) for i in range(total + 1)]
    assert resolve(path, progress=lambda *_: pytest.fail("converted again")) == first
    write_gguf(path, tiny_model(tmp_path / "b", rope_scaling=None, seed=1))
    os.utime(path, ns=(0, 0))  # the same name and size, another time
    second = resolve(path)
    assert second != first
    assert not torch.equal(logits(first), logits(second))


def test_another_file_of_the_same_name_size_and_time(tmp_path: Path) -> None:
    """Beside the first, and in its place."""
    folders = []
    for seed, name in [(0, "one"), (1, "two"), (1, "one")]:
        (tmp_path / name).mkdir(exist_ok=True)
        source = tiny_model(tmp_path / f"source-{seed}-{name}", rope_scaling=None, seed=seed)
        path = write_gguf(tmp_path / name / "m.gguf", source)
        os.utime(path, ns=(0, 0))
        folders.append((resolve(path), source))
    assert len({folder for folder, _ in folders}) == 3
    for folder, source in folders:
        assert torch.equal(logits(folder), logits(source))


def test_any_part_of_a_large_file_tells_it_apart(tmp_path: Path) -> None:
    """Bytes of the metadata, of the last tensor and, of the rest, within any run as long as the gaps of the samples."""
    path, size = tmp_path / "large.gguf", 40 * 2**20
    path.touch()
    os.truncate(path, size)

    def changed(start: int, end: int) -> Path:
        with path.open("r+b") as file:
            file.seek(start)
            file.write(b"x" * (end - start))
        os.utime(path, ns=(0, 0))
        folder = cached_folder(path)
        os.truncate(path, 0)
        os.truncate(path, size)
        return folder

    same = changed(0, 0)
    assert changed(0, 0) == same
    gap = (size - 8 * 2**20) // 4
    runs = [(0, 1), (2**20, 2**20 + 1), (8 * 2**20 - 1, 8 * 2**20), (size - 1, size)]
    runs += [(start, start + gap) for start in range(8 * 2**20, size - gap + 1, gap)]
    assert len({same, *(changed(*run) for run in runs)}) == 1 + len(runs)


def test_a_long_name(tmp_path: Path) -> None:
    source = tiny_model(tmp_path / "source", rope_scaling=None)
    path = write_gguf(tmp_path / ("é" * 120 + ".gguf"), source)
    assert (resolve(path) / "model.safetensors").is_file()


def test_several_at_once_convert_once(tmp_path: Path) -> None:
    """Threads here, each with its own descriptor of the lock file, as processes have."""
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "source", rope_scaling=None))
    barrier = threading.Barrier(4)

    def one(_: int) -> tuple[int, Path]:
        calls: list[int] = []
        barrier.wait()
        folder = resolve(path, progress=lambda done, _: calls.append(done))
        assert (folder / "model.safetensors").stat().st_size > 0
        return len(calls), folder

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(one, range(4)))
    assert sorted(calls > 0 for calls, _ in answers) == [False, False, False, True]
    assert len({folder for _, folder in answers}) == 1


def test_leftover_of_a_killed_process_is_replaced(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "source", rope_scaling=None))
    folder = resolve(path)
    (cache / "models" / f"{folder.name}.lock").touch()
    partial = folder.rename(folder.with_name(folder.name + ".ab12_xyz.partial"))
    (partial / "model.safetensors").write_bytes(b"half")
    assert resolve(path) == folder
    assert list((cache / "models").iterdir()) == [folder]
    assert logits(folder).isfinite().all()


@pytest.mark.parametrize("root", ["/dev/null", "/proc/none"])
def test_cache_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(tmp_path / "source", rope_scaling=None))
    monkeypatch.setenv("NARROWS_CACHE", root)
    with pytest.raises(ModelError, match=rf"m\.gguf .*cache folder {root}/models: .*set NARROWS_CACHE to a folder"):
        resolve(path)


CORPUS = "the cat sat on the mat; that théâtre hat, 12345 and 1,000,000 cats' don't  \n\n sit, 東京 is there."


def trained(corpus: str, size: int, alphabet: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and merges as the library's own trainer finds them."""
    tokenizer = Tokenizer(BPE())
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([corpus] * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return [piece for piece, _ in sorted(model["vocab"].items(), key=lambda kv: kv[1])], [
        tuple(m) for m in model["merges"]
    ]


def merge_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE, slowly: while two neighbours form a piece, merge the best-scored, leftmost such pair."""
    parts = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not pairs:
            return parts
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_sentencepiece_tokenizer(tmp_path: Path) -> None:
    pieces, _ = trained("▁" + CORPUS.replace(" ", "▁"), 160, [])
    learned = [piece for piece in pieces if len(piece) > 1]
    letters = [piece for piece in pieces if len(piece) == 1 and piece not in "東京"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *learned, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(learned) + len(letters))]
    spm = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    source = tiny_model(tmp_path / "source", rope_scaling=None, vocab_size=len(tokens), eos_token_id=2)
    folder = resolve(write_gguf(tmp_path / "m.gguf", source, tokenizer=spm))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known = dict(zip(tokens[259:], scores[259:], strict=True))
    rng = random.Random(0)
    words = [word for word in CORPUS.split() if "東" not in word]
    for _ in range(50):
        text = " ".join(rng.choices(words, k=8))
        assert tokenizer.encode(text).tokens == ["<s>", *merge_by_score("▁" + text.replace(" ", "▁"), known)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("東").tokens[-3:] == ["<0xE6>", "<0x9D>", "<0xB1>"]
    assert tokenizer.decode(tokenizer.encode("the 東京 \U0001f642").ids) == "the 東京 \U0001f642"
    assert tokenizer.encode("the</s>").tokens[-1] == "</s>"
    fast = AutoTokenizer.from_pretrained(folder)
    assert fast("the cat").input_ids == tokenizer.encode("the cat").ids
    assert (fast.bos_token, fast.eos_token, fast.unk_token) == ("<s>", "</s>", "<unk>")


# How each tokenizer cuts this text before any merge, by the rules its makers published.
TEXT = "It's 12345 don'T\n\n  x=1;  é"
WORDS = {
    "gpt-2": ["It", "'s", " 12345", " don", "'", "T", "\n\n ", " x", "=", "1", ";", " ", " é"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " don", "'", "T", "\n\n ", " x", "=", "1", ";", " ", " é"],
    "llama-bpe": ["It", "'s", " ", "123", "45", " don", "'T", "\n\n", " ", " x", "=", "1", ";", " ", " é"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " don", "'T", "\n\n", " ", " x", "=", "1", ";", " ", " é"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_how_text_is_cut_into_words(tmp_path: Path, pre: str) -> None:
    source = tiny_model(tmp_path / "source", rope_scaling=None)
    folder = resolve(write_gguf(tmp_path / "m.gguf", source, tokenizer={**BYTE_TOKENS, "pre": pre}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.pre_tokenizer is not None
    words = [TEXT[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert words == WORDS[pre]
    starts_with_bos = pre == "llama-bpe"
    assert (tokenizer.encode("a").tokens[0] == SPECIAL_TOKENS[0]) == starts_with_bos
