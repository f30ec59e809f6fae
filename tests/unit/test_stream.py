"""Streaming text: whatever way the tokens come, the text is the decoder's, cut where str.find would cut it."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from narrows.core.ids import RequestId
from narrows.core.request import FinishReason, SampledToken, SamplingParams
from narrows.runtime.client import Output
from narrows.server.stream import Detokenizer, Piece, StopScanner, TextStream

SAMPLE = [
    "the naïve café costs 5 € in 日本 and 中国",
    "日本語の文章 👍🏽 👨‍👩‍👧 done",
    "Übergrößenträger, ещё раз",
    "a  b   c\n\n\td",
] * 3
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from("abc  é€日本中国👍🏽ё\n"), st.characters(codec="utf-8", exclude_characters="▁")),
    max_size=40,
)


@cache
def byte_level() -> Tokenizer:
    """GPT-2's kind: tokens are byte strings that need not be whole characters; two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Llama 2's kind: characters outside the vocabulary are spelled in byte tokens; a leading space is dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcé日", "▁a", "ab"]
    merges = [("▁", "a"), ("a", "b")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    return [*(detokenizer.push(id) for id in ids), detokenizer.finish()]


@given(ids=st.lists(st.integers(0, byte_level().get_vocab_size() - 1), max_size=60))
def test_any_tokens_give_what_the_decoder_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level(), ids)) == byte_level().decode(ids)


@given(
    unit=st.sampled_from(["ÿ", "â", "âĤ", "Ĥ", "ðŁĳ", "âðŁ"]),
    num=st.integers(50, 140),
    rest=st.text(alphabet="âĤ¬ðŁĳįÿa", max_size=6),
)
def test_long_runs_of_broken_characters_give_what_the_decoder_gives(unit: str, num: int, rest: str) -> None:
    # Each letter is one byte: a first or later one of a character of 3 or 4 bytes, or one that is never valid.
    ids = [byte_level().token_to_id(char) for char in (unit * num)[:num] + rest]
    assert "".join(pieces_of(byte_level(), ids)) == byte_level().decode(ids)


@pytest.mark.parametrize("token", ["ÿ", "â", "<s>"])
def test_the_window_stays_short(token: str) -> None:
    decoded: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return byte_level().decode(list(ids))

    detokenizer = Detokenizer(decode)
    for _ in range(2000):
        detokenizer.push(byte_level().token_to_id(token))
    assert max(decoded) <= 64


@given(text=TEXTS)
def test_text_comes_in_whole_characters(text: str) -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text).ids
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids) == text
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
            assert pieces[-1] == ""  # nothing is held back that is complete


@given(ids=st.lists(st.sampled_from([1, 2, *range(259, byte_fallback().get_vocab_size())]), max_size=40))
def test_the_leading_space_is_dropped_once(ids: list[int]) -> None:
    assert "".join(pieces_of(byte_fallback(), ids)) == byte_fallback().decode(ids)


def test_an_invalid_byte_does_not_take_back_what_was_shown() -> None:
    tokenizer = byte_fallback()
    ids = [*(3 + byte for byte in "中".encode()), 3 + 0xFF, tokenizer.token_to_id("a")]
    assert pieces_of(tokenizer, ids) == ["", "", "中", "", "\N{REPLACEMENT CHARACTER}a", ""]


# Stop strings


def cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, bool]:
    """By definition: read one character at a time, end at the first moment some stop string is complete."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


AB = st.text(alphabet="ab", min_size=1, max_size=5)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=6), max_size=8), stops=st.lists(AB, max_size=3), include=...)
def test_stop_strings_cut_the_same_for_any_division(pieces: list[str], stops: list[str], include: bool) -> None:
    scanner = StopScanner(stops, include)
    shown, stopped = "", False
    for piece in pieces:
        text, stopped = scanner.push(piece)
        shown += text
        if stopped:
            break
    assert (shown + ("" if stopped else scanner.finish()), stopped) == cut("".join(pieces), stops, include)


@given(text=st.text(alphabet="abc", max_size=20), stop=AB)
def test_one_stop_string_cuts_where_find_finds_it(text: str, stop: str) -> None:
    scanner = StopScanner([stop])
    shown = ""
    for char in text:
        more, stopped = scanner.push(char)
        shown += more
        if stopped:
            break
    else:
        shown += scanner.finish()
    found = text.find(stop)
    assert shown == (text if found < 0 else text[:found])


@given(text=st.text(alphabet="ab", max_size=12), stops=st.lists(AB, min_size=1, max_size=3))
def test_only_a_possible_beginning_is_held_back(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = ""
    for number, char in enumerate(text, start=1):
        more, stopped = scanner.push(char)
        shown += more
        if stopped:
            return
        seen = text[:number]
        held = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert shown == seen[: number - held]


# Whole requests


def outputs(tokens: Sequence[int], groups: Sequence[int], reason: FinishReason) -> list[Output]:
    """The tokens in groups of the given sizes (the last takes the rest), and the ending."""
    result, start = [], 0
    for size in groups:
        result.append(Output(RequestId("r"), tuple(map(SampledToken, tokens[start : start + size]))))
        start += size
    return [*result, Output(RequestId("r"), tuple(map(SampledToken, tokens[start:])), reason)]


def play(stream: TextStream, news: Sequence[Output]) -> list[Piece]:
    pieces = []
    for output in news:
        pieces.append(stream.push(output))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


@given(text=TEXTS, groups=st.lists(st.integers(0, 5), max_size=10), stop=st.sampled_from(["日本", "b", "€ ", "zz"]))
def test_grouping_of_tokens_changes_nothing(text: str, groups: list[int], stop: str) -> None:
    ids = byte_level().encode(text).ids
    pieces = play(
        TextStream(byte_level().decode, SamplingParams(stop=(stop,))), outputs(ids, groups, FinishReason.LENGTH)
    )
    expected, stopped = cut(text, [stop], include=False)
    assert "".join(piece.text for piece in pieces) == expected
    assert pieces[-1].finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert all(piece.finish_reason is None for piece in pieces[:-1])


def ids_of(text: str) -> list[int]:
    """One token a character."""
    return [byte_level().token_to_id({" ": "Ġ", "\n": "Ċ"}.get(char, char)) for char in text]


def test_a_stop_string_may_span_tokens_and_ends_the_request() -> None:
    stream = TextStream(byte_level().decode, SamplingParams(stop=("END",)))
    pieces = play(stream, outputs(ids_of("a ENough END more"), [1] * 17, FinishReason.LENGTH))
    assert [piece.text for piece in pieces] == ["a", " ", "", "", "ENo", "u", "g", "h", " ", "", "", ""]
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert stream.num_tokens == len("a ENough END")


def test_the_stop_string_can_be_kept() -> None:
    stream = TextStream(byte_level().decode, SamplingParams(stop=("END",)), include_stop=True)
    pieces = play(stream, outputs(ids_of("a END b"), [], FinishReason.LENGTH))
    assert [(piece.text, piece.finish_reason) for piece in pieces] == [("a END", FinishReason.STOP)]


def test_what_may_be_a_stop_string_is_shown_when_the_request_ends() -> None:
    pieces = play(
        TextStream(byte_level().decode, SamplingParams(stop=("END",))),
        outputs(ids_of("a EN"), [4], FinishReason.LENGTH),
    )
    assert [piece.text for piece in pieces] == ["a ", "EN"]


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    params = SamplingParams(stop=("x",), min_tokens=2)
    pieces = play(TextStream(byte_level().decode, params), outputs(ids_of("xxaxb"), [1] * 5, FinishReason.LENGTH))
    assert "".join(piece.text for piece in pieces) == "xxa"
    assert pieces[-1].finish_reason is FinishReason.STOP


def test_tokens_know_where_their_text_begins() -> None:
    ids = byte_level().encode("é<s>€!").ids
    pieces = play(TextStream(byte_level().decode, SamplingParams()), outputs(ids, [], FinishReason.STOP))
    bytes_of_each = [byte_level().id_to_token(id) for id in ids]
    # An unfinished character is not text yet, and a special token never is.
    expected = {"Ã©": 0, "Ã": 0, "©": 0, "<s>": 1, "âĤ": 1, "âĤ¬": 1, "â": 1, "Ĥ": 1, "¬": 1, "!": 2}
    assert [token.offset for token in pieces[0].tokens] == [expected[token] for token in bytes_of_each]
