"""Calibration texts: what users give is read or refused with the line; and which model a folder holds."""

import json
import pydoc_data.topics
from pathlib import Path

import pytest

from narrows.errors import ConfigError, ModelError
from narrows.models.fingerprint import folder_fingerprint
from narrows.profile.measuring import texts
from narrows.profile.measuring.texts import read_texts


def test_without_files_it_is_prose_that_python_brings() -> None:
    assert sorted(read_texts([])) == sorted(pydoc_data.topics.topics.values())


def test_text_and_jsonl_in_the_order_given(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo", encoding="utf-8")
    records = [
        {"text": "üben", "prompt": "not this"},
        {"id": 3, "prompt": "p"},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
    ]
    lines.write_text("\n\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    assert read_texts([lines, plain]) == ["üben", "p", "s\n\nu", "one\ntwo"]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2 is not JSON"),
        ('{"body": "x"}', 'line 2 has neither "text" nor "prompt"'),
        ('{"text": 5}', "line 2 has neither"),
        ('{"prompt": [{"role": "user"}]}', "line 2 has neither"),
        ("[1]", "line 2 has neither"),
        ("[" * 200_000, "line 2 is not JSON"),
        ('{"text": "\\ud800"}', "line 2 has half of a surrogate pair"),
    ],
)
def test_a_line_that_is_no_text_is_named(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "fine"}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"text: .*x.jsonl, {named}"):
        read_texts([file])


def test_a_byte_order_mark_is_no_text_and_null_is_no_field(tmp_path: Path) -> None:
    marked, lines = tmp_path / "marked.txt", tmp_path / "lines.jsonl"
    marked.write_bytes(b"\xef\xbb\xbfone")
    lines.write_bytes(b'\xef\xbb\xbf{"text": null, "prompt": "two"}')
    assert read_texts([marked, lines]) == ["one", "two"]


def test_files_that_hold_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"text: .*missing can not be read: No such file"):
        read_texts([tmp_path / "missing"])
    with pytest.raises(ConfigError, match="can not be read: Is a directory"):
        read_texts([tmp_path])
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match=r"binary is not UTF-8 text .* at byte 2"):
        read_texts([tmp_path / "binary"])
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(ConfigError, match="hold no text"):
        read_texts([tmp_path / "empty"])


def test_no_more_than_a_limit_is_read_and_nothing_is_cut_in_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("aaaü" * 2, encoding="utf-8")  # ten bytes
    lines.write_text('{"text": "b"}\n{"text": "c"}\n', encoding="utf-8")  # 14 bytes a line
    for limit, expected in ((9, ["aaaüaaa"]), (26, ["aaaüaaaü", "b"]), (99, ["aaaüaaaü", "b", "c"])):
        monkeypatch.setattr(texts, "MOST_BYTES", limit)
        assert read_texts([plain, lines]) == expected


def model_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in "ab":
        (folder / f"{name}.safetensors").write_bytes(bytes(range(256)) * 1024)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_fingerprint_is_of_config_and_weights_wherever_they_are(tmp_path: Path) -> None:
    one, two = model_folder(tmp_path / "one"), model_folder(tmp_path / "two")
    (two / "tokenizer.json").write_text("[]")
    same = folder_fingerprint(one)
    assert folder_fingerprint(two) == same and len(same) == 16
    changes = [
        lambda: (two / "config.json").write_text("{ }"),
        lambda: patch(two / "a.safetensors", 0),
        lambda: patch(two / "a.safetensors", -1),  # as of a model that was tuned in its last layers only
        lambda: (two / "b.safetensors").write_bytes(b"short"),
        lambda: (two / "b.safetensors").rename(two / "c.safetensors"),
    ]
    seen = {same}
    for change in changes:
        change()
        seen.add(folder_fingerprint(two))
    assert len(seen) == 1 + len(changes)
    with pytest.raises(ModelError, match=r"config\.json can not be read: No such file"):
        folder_fingerprint(tmp_path)


def patch(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
