"""The tokenizer that a GGUF file describes, as tokenizer.json and tokenizer_config.json."""

import json
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from narrows.models.fields import Fields

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# How Llama 3 and Qwen2 cut text into words; they differ in how many digits stay together.
_MODERN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
# tokenizer.ggml.pre -> regular expressions that cut the text, one after the other.
_WORDS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_MODERN_WORDS % "{1,3}",),
    "qwen2": (_MODERN_WORDS % "",),
    "default": (_PUNCTUATION, _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
}


class _TokenType(IntEnum):
    """tokenizer.ggml.token_type, as far as it matters here."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(metadata: Fields, folder: Path, *, max_positions: int) -> None:
    """Raises ModelError naming the tokenizer metadata that is missing or not supported."""
    tokens = _list(metadata, "tokenizer.ggml.tokens")
    kind = metadata.text("tokenizer.ggml.model", "")
    match kind:
        case "gpt2":
            tokenizer, starts = _byte_level(metadata, tokens)
        case "llama":
            tokenizer, starts = _sentencepiece(metadata, tokens)
        case _:
            raise metadata.error("tokenizer.ggml.model", f"{kind!r} is not supported; supported are gpt2, llama")
    _add_special(metadata, tokenizer, tokens)
    names = {name: _special(metadata, name, tokens) for name in ("bos", "eos", "unknown", "padding")}
    _add_template(metadata, tokenizer, names, starts_with_bos=starts)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_config(metadata, folder, names, max_positions)


def _list(metadata: Fields, name: str) -> list[Any]:
    value = metadata.raw(name)
    if not isinstance(value, list) or not value:
        raise metadata.error(name, "is missing or no list")
    return value


def _byte_level(metadata: Fields, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether such tokenizers put bos first unless the file says otherwise."""
    pre = metadata.text("tokenizer.ggml.pre", "default")
    if pre not in _WORDS:
        raise metadata.error("tokenizer.ggml.pre", f"{pre!r} is not supported; supported are {', '.join(_WORDS)}")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "tokenizer.ggml.merges")]
    try:
        # Llama 3 takes a whole word that is in the vocabulary without asking whether merges lead to it.
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises nothing narrower
        raise metadata.error("tokenizer.ggml.merges", str(error)) from error
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(words), "isolated") for words in _WORDS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre == "llama-bpe"


def _sentencepiece(metadata: Fields, tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    """SentencePiece BPE: pieces with scores; of all pairs that form a piece the one with the best score is merged
    first. As BPE merges that is: every way to cut a piece into two pieces, ranked by the score of the whole."""
    scores = _list(metadata, "tokenizer.ggml.scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = [
        (tokens[i][:cut], tokens[i][cut:])
        for i in ranked
        for cut in range(1, len(tokens[i]))
        if tokens[i][:cut] in vocab and tokens[i][cut:] in vocab
    ]
    unknown = _special(metadata, "unknown", tokens)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    space = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _special(metadata: Fields, name: str, tokens: Sequence[str]) -> str | None:
    ids = metadata.token_ids(f"tokenizer.ggml.{name}_token_id")
    if ids and ids[0] >= len(tokens):
        raise metadata.error(f"tokenizer.ggml.{name}_token_id", f"{ids[0]} is outside the {len(tokens)} tokens")
    return tokens[ids[0]] if ids else None


def _add_special(metadata: Fields, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    """Tokens that are found in text as they stand, never built from smaller ones."""
    types = _list(metadata, "tokenizer.ggml.token_type")
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_TokenType.UNKNOWN, _TokenType.CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])


def _add_template(
    metadata: Fields, tokenizer: Tokenizer, names: dict[str, str | None], *, starts_with_bos: bool
) -> None:
    """What encoding puts around a text."""
    first = metadata.flag("tokenizer.ggml.add_bos_token", starts_with_bos) and names["bos"]
    last = metadata.flag("tokenizer.ggml.add_eos_token", False) and names["eos"]
    around = [token for token in (first, last) if token]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([first] if first else []), "$A", *([last] if last else [])],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(around)],
        )


def _write_config(metadata: Fields, folder: Path, names: dict[str, str | None], max_positions: int) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names["bos"],
        "eos_token": names["eos"],
        "unk_token": names["unknown"],
        "pad_token": names["padding"],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.raw("tokenizer.chat_template"),
    }
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
