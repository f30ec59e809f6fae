"""The bench of hand-overs runs, keeps the contract of benchmarks and finds prefixes cached; figures are not tested."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narrows.cli import main

CONTRACT = {
    *("scheme", "selector", "tt_over_tp", "batch", "prompt_tokens", "ttft_s", "ttst_s", "second_token_s", "tbt_s"),
    *("ctl_s", "on_demand_ratio", "metadata_bytes", "proactive_bytes", "on_demand_bytes", "speculative_bytes"),
    "tokens_sha256",
}


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_rows_have_the_promised_fields_and_the_same_tokens(tmp_path: Path) -> None:
    json_file, png = tmp_path / "rows.json", tmp_path / "rows.png"
    words = (
        f"bench handover --selector exact --scheme full,partial,oracle --batch 2 --prompt-tokens 256 --output-tokens 6 \
        --rounds 1 --follow-tokens 0 --json {json_file} --png {png}"
    )
    done = CliRunner().invoke(main, words.split())
    assert done.exit_code == 0, done.output
    result = json.loads(json_file.read_text())
    assert result["name"] == "handover"
    assert {"config", "results", "environment", "targets"} <= set(result)
    rows = {row["scheme"]: row for row in result["results"]}
    assert set(rows) == {"full", "partial", "oracle"}
    for row in rows.values():
        assert set(row) >= CONTRACT
        assert len(row["ctl_s"]) == 6
        assert row["cached_tokens"] == 192
        assert row["tokens_equal_ideal"] and row["preemptions"] == 0
        assert row["link_use"] <= 1.05
    assert len({row["tokens_sha256"] for row in rows.values()}) == 1
    # Both prompts' KV: 256 and 255 tokens, 23,040 bytes each; frames come on top.
    assert 1.0 <= rows["full"]["proactive_bytes"] / (511 * 23040) <= 1.05
    assert rows["full"]["on_demand_bytes"] == rows["full"]["speculative_bytes"] == 0
    assert rows["partial"]["on_demand_bytes"] > 0 == rows["partial"]["speculative_bytes"]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tt-over-tp fast", "list of numbers"),
        ("--batch 1,two", "list of whole numbers"),
        ("--scheme fast", "scheme: fast is not known"),
        ("--selector none", "selector: none is not known"),
        ("--prompt-tokens 9000", "prompt_tokens: 9000"),
        ("--text poems --prompt-tokens 200", "text: 'poems'"),
    ],
)
def test_what_can_not_be_is_said_in_a_line(words: str, said: str) -> None:
    done = CliRunner().invoke(main, ["bench", "handover", *words.split()])
    assert done.exit_code != 0
    assert said in done.output
    assert "Traceback" not in done.output
