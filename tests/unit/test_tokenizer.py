"""Tokenizer and chat template against transformers, and what they refuse."""

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from narrows.errors import ModelError, RequestError
from narrows.server.tokenizer import Tokenizer
from narrows.testing.models import tiny_model

CHATS: list[list[Mapping[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 日本 👍\n<b>&amp;"}],
    [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "  and <|im_end|> written out  "},
    ],
]
# Whitespace control, loop control, tojson, generation marks, variables, undefined names: what real templates use.
BUSY_TEMPLATE = """
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content %}
{%- else %}
    {%- set first = 'You are ' ~ (who or 'nobody') %}
{%- endif %}
{{ bos_token }}[{{ first | trim }}]{{ eos_token }}
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {% if message.role == 'assistant' %}
    {% generation %}
<a>{{ message.content }}</a>
    {% endgeneration %}
    {% else %}
<u n="{{ ns.count }}">{{ message | tojson }}{{ message.content | tojson(indent=2) }}</u>
    {% endif %}
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}<a>{% endif %}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def with_config(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of a model's tokenizer with other settings."""
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def reference_ids(folder: Path, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
    theirs = AutoTokenizer.from_pretrained(folder)
    ids = theirs.apply_chat_template([dict(m) for m in messages], tokenize=True, return_dict=False, **settings)
    return list(ids)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_become_the_tokens_of_transformers(
    folder: Path, messages: list[Mapping[str, Any]], add_generation_prompt: bool
) -> None:
    ids = Tokenizer(folder).apply_chat(messages, add_generation_prompt=add_generation_prompt)
    assert ids == reference_ids(folder, messages, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("variables", [{}, {"who": "Ada <3"}])
@pytest.mark.parametrize("tools", [None, [{"name": "größe", "parameters": {"x": 1}}]])
def test_a_busy_template_renders_as_in_transformers(
    folder: Path,
    tmp_path: Path,
    messages: list[Mapping[str, Any]],
    variables: dict[str, Any],
    tools: list[dict[str, Any]] | None,
) -> None:
    with_config(
        folder, tmp_path, chat_template=BUSY_TEMPLATE, bos_token={"__type": "AddedToken", "content": "<|endoftext|>"}
    )
    ours = Tokenizer(tmp_path).render_chat(messages, tools=tools, variables=variables)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert ours == theirs.apply_chat_template(
        [dict(m) for m in messages], tokenize=False, add_generation_prompt=True, tools=tools, **variables
    )


def test_the_template_may_be_a_file_or_a_list(folder: Path, tmp_path: Path) -> None:
    listed = [{"name": "rag", "template": "no"}, {"name": "default", "template": "listed {{ messages[0].content }}"}]
    with_config(folder, tmp_path, chat_template=listed)
    assert Tokenizer(tmp_path).render_chat(CHATS[0]) == "listed Hi"
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    assert Tokenizer(tmp_path).render_chat(CHATS[0]) == "file Hi"


def test_a_template_knows_the_date(folder: Path, tmp_path: Path) -> None:
    with_config(folder, tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}")
    assert Tokenizer(tmp_path, now=lambda: datetime(2031, 2, 3)).render_chat(CHATS[0]) == "03 Feb 2031"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_refuses_is_the_senders_error(
    folder: Path, tmp_path: Path, template: str, problem: str
) -> None:
    with_config(folder, tmp_path, chat_template=template)
    with pytest.raises(RequestError, match=problem) as caught:
        Tokenizer(tmp_path).render_chat(CHATS[0])
    assert caught.value.field == "messages"


def test_variables_can_not_replace_the_messages(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"chat_template_kwargs\.messages"):
        Tokenizer(folder).render_chat(CHATS[0], variables={"messages": []})


def test_no_template_is_a_clear_error(folder: Path, tmp_path: Path) -> None:
    with_config(folder, tmp_path, chat_template=None)
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(tmp_path).apply_chat(CHATS[0])


def test_broken_folders_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    with_config(folder, tmp_path, chat_template="{% if %}")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template, line 1"):
        Tokenizer(tmp_path)
    for template, problem in (
        ([{"name": "rag", "template": ""}], "none called 'default'"),
        ([{"name": "default"}], "objects with name and template"),
        ([{"name": "default", "template": 5}], "must be text, not int"),
        (5, "must be text, not int"),
    ):
        with_config(folder, tmp_path, chat_template=template)
        with pytest.raises(ModelError, match=rf"tokenizer_config\.json: chat_template .*{problem}"):
            Tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("a\n{% for %}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: chat_template, line 2"):
        Tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja can not be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[1")
    with pytest.raises(ModelError, match="not JSON"):
        Tokenizer(tmp_path)


@given(text=st.text())
def test_encode_and_decode_are_each_others_inverse(folder: Path, text: str) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_other_threads_run_while_a_long_text_is_tokenized(folder: Path) -> None:
    """With Python's lock kept, this thread would wake up at most a few times before the end."""
    tokenizer, text = Tokenizer(folder), "The quick brown fox jumps. " * 100_000
    ended = threading.Event()

    def work() -> None:
        tokenizer.encode(text)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    wakings = 0
    while not ended.wait(0.001):
        wakings += 1
    worker.join()
    assert wakings > 50


# The longest token of these vocabularies is "<|long|>" of 8 characters, the longest text one token can stand for.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def backend_of(model: models.Model, special: AddedToken, **parts: Any) -> Backend:
    backend = Backend(model)
    backend.add_special_tokens([special])
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def bpe(tokens: Sequence[str], **settings: Any) -> models.BPE:
    return models.BPE({token: id for id, token in enumerate(tokens)}, [], **settings)


LONG = AddedToken("<|long|>", special=True, normalized=False)
SPLIT, REGEX = pre_tokenizers.Split, Regex(r"\s+")
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
FALLBACK = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}


@pytest.mark.parametrize(
    ("backend", "most"),
    [
        (backend_of(bpe(ALPHABET), LONG, pre_tokenizer=LEVEL), 8),
        (
            backend_of(
                bpe(ALPHABET), LONG, pre_tokenizer=pre_tokenizers.Sequence([SPLIT(REGEX, "merged_with_next"), LEVEL])
            ),
            8,
        ),
        (backend_of(bpe(ALPHABET), LONG, pre_tokenizer=LEVEL, normalizer=normalizers.NFC()), 32),
        (
            backend_of(
                bpe(["<unk>", *BYTES], **FALLBACK),
                LONG,
                normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            ),
            8,
        ),
        # Each of these can make one token, or none, of any amount of text.
        (backend_of(bpe(["<unk>", *BYTES[1:]], **FALLBACK), LONG), None),
        (backend_of(bpe(["<unk>", "a"], unk_token="<unk>", fuse_unk=True), LONG), None),
        (backend_of(bpe(ALPHABET[1:]), LONG, pre_tokenizer=LEVEL), None),
        (backend_of(bpe(ALPHABET), AddedToken("<|long|>", special=True, rstrip=True), pre_tokenizer=LEVEL), None),
        (
            backend_of(bpe(ALPHABET), LONG, pre_tokenizer=pre_tokenizers.Sequence([SPLIT(REGEX, "removed"), LEVEL])),
            None,
        ),
        (backend_of(bpe(ALPHABET), LONG, pre_tokenizer=LEVEL, normalizer=normalizers.Strip()), None),
        (backend_of(bpe(ALPHABET), LONG, pre_tokenizer=LEVEL, normalizer=normalizers.Replace(REGEX, "  ")), None),
        (backend_of(bpe(ALPHABET), LONG, pre_tokenizer=LEVEL, normalizer=normalizers.Replace(" ", "")), None),
        (backend_of(models.WordLevel({"<unk>": 0}, "<unk>"), LONG), None),
    ],
)
def test_how_much_text_a_token_can_stand_for(tmp_path: Path, backend: Backend, most: int | None) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.max_chars_per_token == most
    texts = (
        " " * 900,
        "!" * 900,
        "e\u0301" * 300,
        "\u1f82" * 300,
        "<|long|>  " * 90,
        "\0" * 900,
        "日本" * 300,
        "aaa " * 200,
    )
    fewest = {text: len(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    if most is None:
        assert any(len(text) > 8 * num for text, num in fewest.items()), fewest
    else:
        assert all(len(text) <= most * num for text, num in fewest.items()), fewest


def test_special_tokens(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids[1:2] == [tokenizer.eos_token_id]
    assert ids[1] in tokenizer.special_ids
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert tokenizer.token_bytes(ids[1]) == b"<|im_end|>"
    assert tokenizer.bos_token_id is None
    assert tokenizer.vocab_size == 260
    assert (tokenizer.token(10**6), tokenizer.token_bytes(10**6)) == ("", b"")


def test_saved_truncation_and_padding_are_off_and_bos_is_optional(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"<s>": 0, "a": 1}, []))
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(3)
    backend.enable_padding(length=9, pad_token="a", pad_id=1)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("aaaaa") == [0, 1, 1, 1, 1, 1]
    assert tokenizer.encode("aaaaa", add_special_tokens=False) == [1, 1, 1, 1, 1]


def test_bytes_of_tokens_with_byte_fallback(tmp_path: Path) -> None:
    backend = Backend(models.BPE({"<unk>": 0, "<0xE2>": 1, "▁a": 2, "é": 3}, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.token_bytes(id) for id in (1, 2, 3)] == [b"\xe2", b" a", "é".encode()]
