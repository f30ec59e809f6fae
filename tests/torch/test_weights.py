"""Reading safetensors folders: what is accepted, and what is refused by name."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from narrows.errors import ModelError
from narrows.kernels.reference import ReferenceKernels
from narrows.models.layers.decoder import Model
from narrows.models.load import load_model
from narrows.models.safetensors_writer import encode
from narrows.testing.driver import Driver
from narrows.testing.models import tiny_model

Tensors = dict[str, Tensor]
Q = "model.layers.1.self_attn.q_proj.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(folder, dtype, ReferenceKernels())


def logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return Driver(load(folder, dtype), ReferenceKernels()).step({0: range(20)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def change(folder: Path, edit: Callable[[Tensors], object]) -> None:
    """Rewrite the folder's weights; the map of the old file must not outlive it."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path)


def shard(folder: Path) -> dict[str, str]:
    """Split the weights over two files with an index; returns the index's weight_map."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    path.unlink()
    names = sorted(tensors)
    where = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    write_index(folder, where)
    return where


def write_index(folder: Path, where: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def refused(folder: Path, *named: str) -> None:
    with pytest.raises(ModelError) as caught:
        load(folder)
    for word in named:
        assert word in str(caught.value)


def test_sharded_equals_single(folder: Path) -> None:
    single = logits(folder)
    shard(folder)
    assert torch.equal(logits(folder), single)
    (folder / "model.safetensors.index.json").unlink()
    assert torch.equal(logits(folder), single)  # all files of the folder, as there is nothing else to go by


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_stored_dtypes(tmp_path: Path, stored: str) -> None:
    """A folder in half precision is the float32 folder with rounded weights, as torch rounds."""
    exact, half = tiny_model(tmp_path / "exact"), tiny_model(tmp_path / "half", torch_dtype=stored)
    change(exact, lambda t: t.update({name: v.to(getattr(torch, stored)).float() for name, v in t.items()}))
    assert torch.equal(logits(half), logits(exact))
    assert torch.equal(logits(half, torch.bfloat16), logits(exact, torch.bfloat16))


def test_bfloat16_rounding_equals_torch() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-30, 34).repeat(64)
    ties = torch.tensor([1.00390625, 1.01171875, -1.00390625, 0.0, -0.0])  # halfway between two bfloat16
    for x in (values, ties):
        ours = torch.from_numpy(encode(x.numpy(), "bfloat16")).view(torch.bfloat16)
        assert torch.equal(ours.view(torch.int16), x.to(torch.bfloat16).view(torch.int16))


def test_computed_and_tied_tensors_are_ignored(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, tie_word_embeddings=True)
    expected = logits(folder)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(260, 64)}
    change(folder, lambda t: t.update(extra))
    assert torch.equal(logits(folder), expected)


def test_fewer_positions_than_the_model_has(folder: Path) -> None:
    assert load_model(folder, torch.float32, ReferenceKernels(), max_positions=64).max_positions == 64
    assert load_model(folder, torch.float32, ReferenceKernels(), max_positions=10**6).max_positions == 512


def test_missing_tensor(folder: Path) -> None:
    change(folder, lambda t: t.pop(Q))
    refused(folder, Q, "missing", "[64, 64]")


def test_wrong_shape(folder: Path) -> None:
    change(folder, lambda t: t.update({Q: torch.ones(64, 32)}))
    refused(folder, "model.safetensors", Q, "[64, 32]", "[64, 64]")


def test_unused_tensor(folder: Path) -> None:
    change(folder, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    refused(folder, "model.layers.0.self_attn.q_norm.weight", "LlamaForCausalLM")


def test_unknown_dtype(folder: Path) -> None:
    change(folder, lambda t: t.update({Q: torch.ones(64, 64, dtype=torch.int8)}))
    refused(folder, Q, "I8", "BF16")


@pytest.mark.parametrize("keep", [0, 5, 200, -1, -5000])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "model.safetensors", "truncated")


def test_no_safetensors_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 1000)
    refused(folder, "model.safetensors", "no safetensors file")


def test_missing_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors is missing")


def test_index_that_does_not_match_its_files(folder: Path) -> None:
    where = shard(folder)
    write_index(folder, where | {Q: next(file for file in where.values() if file != where[Q])})
    refused(folder, Q, "safetensors")
    write_index(folder, where | {Q: "../elsewhere.safetensors"})
    refused(folder, "weight_map", "../elsewhere.safetensors")
    write_index(folder, [1, 2])
    refused(folder, "weight_map")
    (folder / "model.safetensors.index.json").write_text("{")
    refused(folder, "model.safetensors.index.json", "can not be read")


def test_one_tensor_in_two_files(folder: Path) -> None:
    save_file({Q: torch.ones(64, 64)}, folder / "other.safetensors")
    refused(folder, Q, "model.safetensors", "other.safetensors")


def test_pickles_are_never_opened(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (folder / "ran",))

    (folder / "model.safetensors").unlink()
    refused(folder, "no safetensors file")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refused(folder, "pytorch_model.bin", "never opened", "safetensors")
    assert not (folder / "ran").exists()
