"""A GGUF file written out as a Hugging Face folder: config, weights, tokenizer. No torch."""

import json
from functools import partial
from pathlib import Path
from typing import Any

from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from narrows.errors import ModelError
from narrows.models.fields import Fields
from narrows.models.gguf.cache import Progress
from narrows.models.gguf.config import FileTensors, gguf_config, hf_name, undo_permutation
from narrows.models.gguf.tokenizer import write_tokenizer
from narrows.models.safetensors_writer import Entry, write_safetensors


def write_folder(path: Path, folder: Path, progress: Progress | None) -> None:
    """Convert `path` into the empty `folder`. Matrices are dequantized to bfloat16; plain F32 and F16 files keep
    their dtype.

    Raises ModelError naming what is wrong: no GGUF, truncated, or something in it that Narrows does not support.
    """
    reader = _open(path)
    metadata = Fields(path, {name: field.contents() for name, field in reader.fields.items()})
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config, generation = gguf_config(metadata, FileTensors(tensors))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(metadata, folder, max_positions=config["max_position_embeddings"])
    _write_weights(path, tensors, config, folder / "model.safetensors", progress)


def _open(path: Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        # The reader finds a cut-off file only by running past its end, in whichever step that happens.
        raise ModelError(f"{path} is truncated or no GGUF file: {error}") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    path: Path, tensors: dict[str, ReaderTensor], config: dict[str, Any], target: Path, progress: Progress | None
) -> None:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    permuted = config["model_type"] in ("llama", "mistral")
    wanted = {name: tensor for name, tensor in tensors.items() if name != "rope_freqs.weight"}

    def read(tensor: ReaderTensor) -> Any:
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(f"{path}: tensor {tensor.name}: {error}") from error
        part = tensor.name.split(".")[-2]
        return undo_permutation(values, heads[part]) if permuted and part in heads else values

    entries = [Entry(hf_name(path, name), _shape(tensor), partial(read, tensor)) for name, tensor in wanted.items()]
    write_safetensors(target, entries, config["torch_dtype"], progress)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """GGUF counts dims from the fastest one."""
    return tuple(int(size) for size in reversed(tensor.shape))
