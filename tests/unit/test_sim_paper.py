"""`narrows simulate --paper`: what counts as right, and the models beside hand calculation and closed forms."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narrows.cli import main
from narrows.sim import calibration
from narrows.sim.paper import nanocp, smartgen
from narrows.sim.paper.claims import HOLDS, Claim, number, ordering, score


def test_a_number_is_right_within_a_fifth() -> None:
    assert number("", "", 2.0, 2.4).is_right and number("", "", 2.0, 1.6).is_right
    assert not number("", "", 2.0, 2.41).is_right and not number("", "", 2.0, None).is_right


def test_an_ordering_says_what_is_found_instead() -> None:
    assert ordering("", "", a=1.0, b=2.0, c=3.0).ours == HOLDS
    found = ordering("", "", a=1.0, b=3.0, c=2.0)
    assert found.paper == "a < b < c" and found.ours == "a 1 < c 2 < b 3" and not found.is_right
    assert not ordering("", "", a=1.0, b=1.0).is_right


def test_what_was_used_for_calibration_does_not_count() -> None:
    claims = [
        number("", "", 2.0, 2.0, chose=calibration.NANOCP_CP),
        number("", "", 2.0, 2.0),
        number("", "", 2.0, 4.0),
        number("", "", 2.0, 2.0, "us"),
        number("", "", 2.0, None),
        ordering("", "", a=2.0, b=1.0),
    ]
    found = score(claims)
    assert found.ratios == (1, 2) and found.others == (1, 1) and found.orderings == (0, 1)
    with pytest.raises(AssertionError):
        number("", "", 2.0, 2.0, chose="of no constant")


def test_attention_of_a_straggler_by_hand() -> None:
    # 64 requests of 2,049 tokens and one of 524,289, 65 sequences of 352 tokens' worth; 128 heads of 576 + 512
    # multiply-adds a token at FlashMLA's 660 TFLOP/s; 5 us to launch.
    tokens = 64 * 2_049 + 524_289 + 65 * 352
    by_hand = 5.0 + tokens * 2 * 128 * (576 + 512) / 660e12 * 1e6
    found = nanocp.micro()
    for systems in found.values():
        assert systems["32DP"]["attention"] == pytest.approx(by_hand)
        assert systems["32DP"]["cp"] == 0.0
    # Uniform CP8: all 8 members attend for all 513 requests, and to an eighth of every token.
    tokens = 64 * 2_049 + 524_289 / 8 + 513 * 352
    by_hand = 5.0 + tokens * 2 * 128 * (576 + 512) / 660e12 * 1e6
    assert found[1]["4DP8CP"]["attention"] == pytest.approx(by_hand, rel=1e-3)


def test_a_replay_places_every_token() -> None:
    lengths = [100, 70_000, 5, 200_000] * 8
    for policy in (nanocp.NANOCP, nanocp.DP, nanocp.LEAST_CACHE, nanocp.CP8):
        active = nanocp.place(policy, lengths, 16)
        assert active.num_requests == len(lengths) and int(active.shards.sum()) == sum(lengths)
        assert (active.degrees == 1).all() == (policy in (nanocp.DP, nanocp.LEAST_CACHE))


@pytest.mark.parametrize("limit", [3.0, 11.0, 30.0, 95.0])
@pytest.mark.parametrize("start", [5.0, 40.0])
def test_the_highest_rate_is_found_to_a_step(monkeypatch: pytest.MonkeyPatch, limit: float, start: float) -> None:
    def measure(effort: object, model: str, mix: str, rate: float, policy: str) -> nanocp.Figures:
        good = rate <= (limit if policy == "best" else limit / 2)
        return nanocp.Figures(0.0, 0.0, 1.0 if good else 0.5, 0.0, 0.0, 0, 0, 0, 0)

    monkeypatch.setattr(nanocp, "measure", measure)
    search = nanocp.Search(nanocp.Effort(step=1.06), "", "")
    policy, at = search.best(("worse", "best"), lambda figures: figures.attained >= 0.99, search.index(start))
    assert policy == "best" and search.rate(at) <= limit < search.rate(at + 1)


def test_a_run_measures_what_arrives_behind_the_warm_up() -> None:
    effort = nanocp.Effort(4.0, 2.0, 10, 1.5)
    found = nanocp.measure(effort, nanocp.V3, "sharegpt", 20.0, nanocp.NANOCP)
    # One request on an instance: the small kernels of 61 layers and a millisecond are the least of a step.
    assert found.tpot_ms > 61 * 0.175 + 1 and found.tpot_p99_ms >= found.tpot_ms
    assert found.attained == 1.0 and found.blocked == 0 and 0 < found.most_active <= 80


def test_full_transfer_by_closed_forms() -> None:
    batch = smartgen.Batch(size=6, prompt=10_000)
    # 60,000 tokens of 40 layers, 8 heads of 128, keys and values in two bytes, over 25 Gbit/s.
    assert batch.transfer_s == pytest.approx(60_000 * 40 * 8 * 128 * 2 * 2 / (25e9 / 8))
    timed = smartgen.run(batch, smartgen.FULL)
    step_s = batch.compute_s + batch.load_s
    assert timed.ttft_s == pytest.approx(batch.prefill_s)
    # The link is busy from the first moment on, for three quarters of the KV are there.
    assert timed.ttst_s == pytest.approx(batch.transfer_s + step_s, rel=1e-3)
    assert timed.tbt_s == pytest.approx(step_s)
    assert len(timed.tokens_s) == smartgen.OUTPUT


def test_partial_transfer_fetches_before_it_loads() -> None:
    batch = smartgen.Batch(prompt=10_000)
    timed = smartgen.run(batch, smartgen.PARTIAL)
    step_s = batch.compute_s + batch.load_s
    # At most all that is selected crosses, and the first two layers of 40 are there.
    most_s = batch.size * batch.select_ratio * batch.kv_bytes / batch.link_bytes_per_s
    assert step_s < timed.tbt_s < step_s + most_s + 40 * 2 * 30e-6 + 1e-3


def test_the_command_writes_the_contract(tmp_path: Path) -> None:
    file = tmp_path / "smartgen.json"
    result = CliRunner().invoke(main, ["simulate", "--paper", "smartgen", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "orderings right" in result.output
    rows = json.loads(file.read_text())["results"]
    assert {"claim", "where", "paper", "ours", "used_for_calibration"} <= set(rows[0])
    chosen = [row for row in rows if row["used_for_calibration"]]
    assert any(row["paper"] == 6.5 for row in chosen)


def test_the_command_refuses_what_it_would_ignore() -> None:
    result = CliRunner().invoke(main, ["simulate", "--paper", "smartgen", "--rate", "5"])
    assert result.exit_code == 2 and "--paper" in result.output


def test_every_claim_has_its_name_or_its_value() -> None:
    for claim in smartgen.all_claims():
        assert isinstance(claim, Claim) and claim.claim and claim.where
        assert claim.ours is not None
