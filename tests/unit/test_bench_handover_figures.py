"""Every figure of the paper is made from rows, here made up: paper beside measured, and a picture."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from narrows.bench.handover import schemes_named
from narrows.bench.plots import draw
from narrows.bench.testbed import Workload
from narrows.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
FIGURES = (2, 3, 9, 10, 11, 12, 13, 14, 15, 16)


@dataclass
class MadeUp:
    """Stands for common.Options: figures grow with the batch, the prompt and the ratio; schemes differ by a factor."""

    quick: bool
    workload: Workload
    config: EngineConfig
    selector: str = "exact"

    def rows(
        self,
        schemes: Sequence[Any],
        *,
        tt_over_tp: Sequence[float] = (6.5,),
        batches: Sequence[int] = (1,),
        selectors: Sequence[str] = (),
        link_gbps: Sequence[float] = (),
        oracles: Sequence[str] = (),
        workload: Workload | None = None,
        **settings: Any,
    ) -> list[dict[str, Any]]:
        named = [schemes_named([s])[0] if isinstance(s, str) else s for s in schemes]
        assert len({scheme.name for scheme in named}) == len(named)
        links = [(8.0 / rate, rate) for rate in link_gbps] or [(ratio, 8.0 / ratio) for ratio in tt_over_tp]
        size = (workload or self.workload).prompt_tokens
        rows = []
        for selector in selectors or (self.selector,):
            for ratio, rate in links:
                for batch in batches:
                    for i, scheme in enumerate(named):
                        s = (i + 2) * batch * size / 1000 * (1 + settings.get("select_ratio", 0.2))
                        times = {"ttft_s": s, "ttst_s": s * ratio, "second_token_s": 2 * s, "tbt_s": s / 10}
                        rows.append(
                            {
                                "scheme": scheme.name,
                                "selector": selector,
                                "tt_over_tp": ratio,
                                "batch": batch,
                                "prompt_tokens": size,
                                "link_gbps": rate,
                                "prefill_s": size / 1000,
                                "handover_s": ratio * size / 1000,
                                "pushed_share": 0.5,
                                "on_demand_ratio": s,
                                "ctl_s": [s, 2 * s, s],
                                "gaps_s": [s] * 8,
                                "on_demand_ratios": [s / 9] * 9,
                                "ideal_ctl_s": [1.0] * 3,
                                "tokens_until_delivery": 10.0 if i else None,
                                **times,
                                **{f"ideal_{name}": 0.5 for name in times},
                            }
                        )
        return rows


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("number", FIGURES)
def test_a_figure(number: int, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    figure = importlib.import_module(f"benchmarks.smartgen.fig{number:02}")
    options = MadeUp(quick, Workload(512 if quick else 8000), EngineConfig())
    rows, claims, panels = figure.make(options)
    assert rows and panels
    assert all(claim.paper for claim in claims)
    assert sum(claim.ours is not None for claim in claims) >= len(claims) - 1
    draw(tmp_path / "figure.png", "made up", panels)
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_ratios_have_the_right_side_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    make = importlib.import_module("benchmarks.smartgen.fig11").make
    _, claims, _ = make(MadeUp(False, Workload(8000), EngineConfig()))
    ours = {claim.text: claim.ours for claim in claims}
    # Schemes stand in the order full, partial, selective, with factors of 2, 3 and 4.
    assert ours["TTST, full / selective, largest batch"] == pytest.approx(2 / 4)
    assert ours["TTST, partial / selective, largest batch"] == pytest.approx(3 / 4)
    assert ours["TTST of full, batch 6 / batch 1"] == pytest.approx(6)


def test_all_figures_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    everything = importlib.import_module("benchmarks.smartgen.__main__")
    assert everything.FIGURES == FIGURES
    assert {f"fig{n:02}.py" for n in FIGURES} == {p.name for p in (ROOT / "benchmarks/smartgen").glob("fig*.py")}
