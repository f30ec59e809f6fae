"""SmartGen's published results (sections 3 and 5): one batch on its testbed, by the simulator's hand-over.

Each request of a batch has a prefill GPU of its own, and all of them send to one decode GPU, whose link is what limits
(section 3.1). Requests of a batch are alike, so one of them is simulated on its share of that link. Decode keeps KV in
host memory and loads what it selects: a step takes what weights take, and what loading takes; fetches go beside loading
where lanes are parallel and before it where not (section 4.2).

    arrival ──▶ prefill, pushes ──first token──▶ what decode must have ──▶ steps: fetch, load, compute; the rest follows
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from itertools import pairwise

import numpy as np

from narrows.core.scheme import SCHEMES, Scheme
from narrows.profile.timing import Work
from narrows.sim import calibration
from narrows.sim.calibration import Constant
from narrows.sim.handover import ON_DEMAND as ON_DEMAND_PATH
from narrows.sim.handover import HandOver, HandOverModel
from narrows.sim.hardware import L20, V100S, Hardware
from narrows.sim.link import Link, Priority
from narrows.sim.loop import Loop
from narrows.sim.model_shapes import LLAMA_3_1_8B, QWEN3_8B, QWEN3_14B, ModelShape
from narrows.sim.paper.claims import Claim, Paper, Task, number, ordering
from narrows.sim.roofline import Roofline

OUTPUT = 64  # tokens (section 5.1)
MULTIFIELD, GOVREPORT = 7_000, 10_000  # prompt tokens on average (section 5.1)
GROWTH = "smartgen/fig11/TBT of full transfer grows 3.0x from batch 1 to 6"
ON_DEMAND = "smartgen/fig15/on-demand ratio up to 51 % below random, 38 % below sequential"

# What only this model needs, in calibration's manner.
CONSTANTS = {
    "host_share": Constant(
        0.13, "of PCIe's peak", "gathering selected entries in host memory: 28.5 ms for each request of 7 K", (GROWTH,)
    ),
    "cached": Constant(0.75, "of a prompt", "section 5.1: prefix cache hit ratio"),
    "selected": Constant(
        0.1, "of the context", "InfiniGen (OSDI 2024): less than 10 % on average with its alpha; 20 % is only the most"
    ),
    "metadata": Constant(0.15, "of KV's bytes", "section 4.4: InfiniGen with a partial ratio of 0.3"),
    "lacked_random": Constant(1.0, "of the share that has not crossed", "what is pushed at random is as good as any"),
    "lacked_profile": Constant(0.49, "of the share that has not crossed", "51 % less than random", (ON_DEMAND,)),
    "lacked_sequential": Constant(0.79, "of the share that has not crossed", "profile is 38 % less", (ON_DEMAND,)),
}


def constant(name: str) -> float:
    return CONSTANTS[name].value


@dataclass(frozen=True, slots=True)
class Batch:
    """What is run together. `gbps` is the decode instance's link."""

    size: int = 6
    prompt: int = MULTIFIELD
    model: ModelShape = QWEN3_14B
    hardware: Hardware = L20
    gbps: float = 25.0
    select_ratio: float = constant("selected")

    @property
    def cost(self) -> Roofline:
        return Roofline(self.hardware, self.model, weights="bf16")

    @property
    def kv_bytes(self) -> float:
        """Of one request's prompt."""
        return self.prompt * self.model.num_layers * self.model.kv_bytes_per_token_layer()

    @property
    def link_bytes_per_s(self) -> float:
        return self.gbps * 1e9 / 8

    @property
    def transfer_s(self) -> float:
        """All KV of the batch alone on the link."""
        return self.size * self.kv_bytes / self.link_bytes_per_s

    @property
    def prefill_s(self) -> float:
        """One request, on its GPU; the cached part is there."""
        return self.cost.prefill_s([Work(self.prompt - self.cached, self.prompt)])

    @property
    def cached(self) -> int:
        return int(constant("cached") * self.prompt)

    @property
    def compute_s(self) -> float:
        """A decode step but for its KV: reading the weights, while the batch is small."""
        return float(self.cost._product_s(np.array([self.size]), self.model.params, "bf16")[0])

    @property
    def load_s(self) -> float:
        """A decode step's selected entries from host memory to the GPU."""
        selected = self.size * self.select_ratio * self.kv_bytes
        return selected / (self.hardware.fabric_bytes_per_s * constant("host_share"))


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of one request's tokens."""

    ttft_s: float
    tokens_s: tuple[float, ...]  # of all tokens, from arrival
    delivered_at: int | None  # the step in which the last of the KV came; None: not all came

    @property
    def ttst_s(self) -> float:
        """From arrival, as TTFT is; the paper does not say from when."""
        return self.tokens_s[1]

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens, from the second on."""
        return [b - a for a, b in pairwise(self.tokens_s[1:])]

    @property
    def tbt_s(self) -> float:
        return float(np.mean(self.gaps_s))

    def ctl_s(self, token: int) -> float:
        """Cumulative latency for each token so far."""
        return self.tokens_s[token - 1] / token


def run(batch: Batch, scheme: Scheme) -> Timed:
    """One request of the batch under a scheme of hand-over."""
    return _Request(batch, scheme).run()


class _Request:
    def __init__(self, batch: Batch, scheme: Scheme) -> None:
        self._batch, self._scheme = batch, scheme
        token_bytes = batch.model.kv_bytes_per_token_layer()
        self._loop = Loop()
        link = self._link = Link(
            self._loop, batch.link_bytes_per_s / batch.size, latency_s=batch.hardware.link_latency_s
        )
        model = HandOverModel(
            batch.model.num_layers,
            token_bytes,
            0.0 if scheme.full else constant("metadata") * token_bytes,
            scheme,
            batch.select_ratio,
        )
        self._handover = HandOver(model, link, batch.prompt, self._step, lambda: None)
        self._tokens_s: list[float] = []
        self._delivered_at: int | None = None
        self._began_s = 0.0
        self._lacked = constant("lacked_" + scheme.order)

    def run(self) -> Timed:
        batch, handover, loop = self._batch, self._handover, self._loop
        prefill_s, layers = batch.prefill_s, batch.model.num_layers
        handover.land(prefill_s)
        handover.store(0, layers, batch.cached)
        for first, last in pairwise(handover.model.edges()):
            loop.at(prefill_s * last / layers, bind(handover.store, first, last, batch.prompt - batch.cached))
        loop.at(prefill_s, self._prefilled, rank=1)
        loop.run()
        return Timed(self._tokens_s[0], tuple(self._tokens_s), self._delivered_at)

    def _prefilled(self) -> None:
        self._tokens_s.append(self._loop.now_s)
        self._handover.finish()

    def _step(self) -> None:
        """What is fetched lies on the GPU for this step only: what is kept for later ones comes speculatively."""
        batch, handover = self._batch, self._handover
        self._began_s = self._loop.now_s
        self._note()
        missing = self._lacked * batch.select_ratio * handover.lacking
        if missing:
            self._link.send(missing * batch.kv_bytes, Priority.ON_DEMAND, ON_DEMAND_PATH, self._arrived)
            handover.grant()
        else:
            self._fetched(0.0)

    def _arrived(self) -> None:
        self._fetched(self._loop.now_s - self._began_s)

    def _fetched(self, waited_s: float) -> None:
        batch, parallel = self._batch, self._scheme.parallel_lanes
        loading_s = max(batch.load_s, waited_s) if parallel else batch.load_s + waited_s
        round_trips_s = 0.0
        if waited_s and not parallel:  # each layer asks and waits
            round_trips_s = 2 * batch.hardware.link_latency_s * batch.model.num_layers
        self._loop.at(self._began_s + batch.compute_s + loading_s + round_trips_s, self._stepped)

    def _stepped(self) -> None:
        self._tokens_s.append(self._loop.now_s)
        if len(self._tokens_s) < OUTPUT:
            self._step()
        else:
            self._note()
            self._handover.cancel()

    def _note(self) -> None:
        if self._handover.ended and self._delivered_at is None:
            self._delivered_at = len(self._tokens_s) - 1


FULL, PARTIAL = SCHEMES["full"], replace(SCHEMES["partial"], name="partial")
PROFILE = replace(PARTIAL, name="+profile", order="profile")
PARALLEL = replace(PROFILE, name="+parallel", parallel_lanes=True)
SMARTGEN = replace(PARALLEL, name="SmartGen", speculative=0.1)


def spread_over(batch: Batch, schemes: Sequence[Scheme] = (FULL, PARTIAL, SMARTGEN)) -> dict[str, Timed]:
    return {scheme.name: run(batch, scheme) for scheme in schemes}


def paper(quick: bool = False) -> Paper:  # noqa: ARG001
    """All of it takes seconds, so `quick` changes nothing."""
    constants = {
        name: {"value": c.value, "source": c.source, "claims": list(c.claims)} for name, c in CONSTANTS.items()
    }
    return Paper([Task("all", all_claims)], lambda found: found["all"], {"own_constants": constants})


def all_claims() -> list[Claim]:
    return [
        *_figure_2(),
        *_figure_9_10(),
        *_figure_11(),
        *_figure_12(),
        *_figure_13(),
        *_figure_14(),
        *_figure_15(),
        *_figure_16(),
    ]


def _calibrated(claim: Claim) -> Claim:
    return replace(claim, used_for_calibration=True)


def _figure_2() -> list[Claim]:
    eight_k, ten_k = 48_000 // 6, 60_000 // 6
    llama, qwen8, qwen14 = (Batch(prompt=eight_k, model=model) for model in (LLAMA_3_1_8B, QWEN3_8B, QWEN3_14B))
    long, narrow = Batch(prompt=ten_k), Batch(prompt=ten_k, gbps=15.0)
    lengths = [Batch(prompt=total // 6) for total in (12_000, 24_000, 48_000, 60_000)]
    gaps = {f"{b.prompt * 6 // 1000}K": b.transfer_s / b.prefill_s for b in lengths}
    return [
        number(
            "Llama-3.1-8B, 48K tokens: transfer over prefill",
            "1",
            6.5,
            llama.transfer_s / llama.prefill_s,
            chose=calibration.SMARTGEN_RATIO,
        ),
        number(
            "transfer of the largest model over that of the smallest", "3.1", 1.3, qwen14.transfer_s / llama.transfer_s
        ),
        number("Qwen3-14B, 60K tokens, 25 Gbps: transfer over prefill", "3.1", 4.7, long.transfer_s / long.prefill_s),
        number("the same at 15 Gbps", "3.1", 7.1, narrow.transfer_s / narrow.prefill_s),
        ordering("prefill of 48K tokens stays below 0.6 s", "3.1", prefill=qwen14.prefill_s, limit=0.6),
        ordering(
            "transfer rises with the model",
            "3.1",
            **{"Llama-3.1-8B": llama.transfer_s, "Qwen3-8B": qwen8.transfer_s, "Qwen3-14B": qwen14.transfer_s},
        ),
        Claim(
            "transfer takes longer than prefill at all lengths",
            "3.1, fig. 2b",
            "all",
            "holds" if min(gaps.values()) > 1 else ", ".join(f"{k} {v:.3g}" for k, v in gaps.items()),
        ),
    ]


def _figure_9_10() -> list[Claim]:
    gov = spread_over(Batch(prompt=GOVREPORT))
    multi = spread_over(Batch())
    claims = [number("GovReport: TTST, full over SmartGen", "5.2", 4.3, gov["full"].ttst_s / gov["SmartGen"].ttst_s)]
    for token in (2, 16, OUTPUT):
        values = {name: timed.ctl_s(token) for name, timed in multi.items()}
        where = f"5.2, fig. 9, {token} tokens"
        for other in ("full", "partial"):
            claims.append(ordering("CTL", where, SmartGen=values["SmartGen"], **{other: values[other]}))
    return claims


def _figure_11() -> list[Claim]:
    one, six = spread_over(Batch(size=1)), spread_over(Batch(size=6))
    full, partial, ours = (six[name] for name in ("full", "partial", "SmartGen"))
    where = "5.2, fig. 11, batch of 6"
    claims = [
        number("TTST, full over SmartGen", where, 3.7, full.ttst_s / ours.ttst_s),
        number("TTST, full over partial", where, 2.9, full.ttst_s / partial.ttst_s),
        number("TTST, partial over SmartGen", where, 1.2, partial.ttst_s / ours.ttst_s),
        number("TBT, partial over SmartGen", where, 1.5, partial.tbt_s / ours.tbt_s),
        number("TBT, partial over full", where, 1.5, partial.tbt_s / full.tbt_s),
        ordering("TTST", where, SmartGen=ours.ttst_s, partial=partial.ttst_s, full=full.ttst_s),
        number('TBT, SmartGen over full: "close to the ideal"', where, 1.0, ours.tbt_s / full.tbt_s),
        ordering("TBT", where, SmartGen=ours.tbt_s, partial=partial.tbt_s),
        ordering("TBT", where, full=full.tbt_s, partial=partial.tbt_s),
    ]
    for figure, title, grown in (("ttst_s", "TTST", (10.4, 4.0, 2.0)), ("tbt_s", "TBT", (3.0, 3.6, 2.7))):
        for name, times in zip(("full", "partial", "SmartGen"), grown, strict=True):
            ratio = getattr(six[name], figure) / getattr(one[name], figure)
            claim = number(f"{title} of {name}, batch of 6 over 1", "5.2, fig. 11", times, ratio)
            claims.append(_calibrated(claim) if (name, title) == ("full", "TBT") else claim)
    return claims


def _figure_12() -> list[Claim]:
    wide, middle, narrow = (spread_over(Batch(gbps=gbps)) for gbps in (32.0, 25.0, 15.0))

    def over(rows: dict[str, Timed], figure: str, a: str) -> float:
        return float(getattr(rows[a], figure) / getattr(rows["SmartGen"], figure))

    where = "5.2, fig. 12"
    return [
        number("32 Gbps: TTST, full over SmartGen", where, 2.5, over(wide, "ttst_s", "full")),
        number("15 Gbps: TTST, full over SmartGen", where, 3.3, over(narrow, "ttst_s", "full")),
        number("32 Gbps: TBT, partial over SmartGen", where, 1.4, over(wide, "tbt_s", "partial")),
        number("15 Gbps: TBT, partial over SmartGen", where, 1.6, over(narrow, "tbt_s", "partial")),
        ordering(
            "gain in TTST over full",
            where,
            **{f"{g} Gbps": over(r, "ttst_s", "full") for g, r in ((32, wide), (25, middle), (15, narrow))},
        ),
        ordering(
            "gain in TBT over partial",
            where,
            **{f"{g} Gbps": over(r, "tbt_s", "partial") for g, r in ((32, wide), (25, middle), (15, narrow))},
        ),
        ordering(
            "TTST of SmartGen exceeds a step's time at 15 Gbps",
            where,
            ideal=narrow["full"].tbt_s,
            SmartGen=narrow["SmartGen"].ttst_s,
        ),
    ]


def _figure_13() -> list[Claim]:
    claims = []
    schemes = (FULL, PARTIAL, PROFILE, PARALLEL, SMARTGEN)
    published = {"L20": (L20, (3.0, 1.5, 1.03, 1.1, 1.3)), "V100S": (V100S, (1.5, 1.6, 1.1, 1.2, 1.2))}
    for name, (hardware, (ttst, tbt, profile, parallel, speculative)) in published.items():
        rows = spread_over(Batch(hardware=hardware), schemes)
        where = f"5.3, fig. 13, {name}"
        t = {scheme: timed.tbt_s for scheme, timed in rows.items()}
        claims += [
            number("TTST, full over partial", where, ttst, rows["full"].ttst_s / rows["partial"].ttst_s),
            number("TBT, partial over full", where, tbt, t["partial"] / t["full"]),
            number("TBT, partial over + profile", where, profile, t["partial"] / t["+profile"]),
            number("TBT, + profile over + parallel", where, parallel, t["+profile"] / t["+parallel"]),
            number("TBT, + parallel over + speculative", where, speculative, t["+parallel"] / t["SmartGen"]),
            ordering(
                "TBT",
                where,
                speculative=t["SmartGen"],
                parallel=t["+parallel"],
                profile=t["+profile"],
                partial=t["partial"],
            ),
        ]
    return claims


def _figure_14() -> list[Claim]:
    ratios = (0.05, 0.1, 0.2)
    timed = {ratio: run(Batch(), replace(SMARTGEN, name=f"{ratio:.0%}", speculative=ratio)) for ratio in ratios}
    reused = run(Batch(), PARALLEL)
    where = "5.3, fig. 14"
    ends = {ratio: found.delivered_at or OUTPUT for ratio, found in timed.items()}
    first = {ratio: max(found.gaps_s[:4]) for ratio, found in timed.items()}
    return [
        number("speculative ratio 20 %: all delivered within", where, 5, ends[0.2], "steps"),
        number("speculative ratio 10 %: all delivered within", where, 10, ends[0.1], "steps"),
        number("speculative ratio 5 %: all delivered within", where, 20, ends[0.05], "steps"),
        number("20 %: longest of the first gaps over that at 5 %", where, 1.4, first[0.2] / first[0.05]),
        ordering("steps to deliver all", where, **{f"{r:.0%}": float(ends[r]) for r in (0.2, 0.1, 0.05)}),
        ordering("TBT at the end", where, **{"10 %": timed[0.1].gaps_s[20], "KV reusing": reused.gaps_s[20]}),
    ]


def _figure_15() -> list[Claim]:
    half = {
        order: run(Batch(), replace(PARTIAL, name=order, order=order, fraction=0.5))
        for order in ("profile", "sequential", "random")
    }
    t = {order: timed.tbt_s for order, timed in half.items()}
    where = "5.3, fig. 15"
    return [
        number("TBT, random over profile", where, 1.3, t["random"] / t["profile"]),
        number("TBT, sequential over profile", where, 1.2, t["sequential"] / t["profile"]),
        ordering("TBT", where, **t),
    ]


def _figure_16() -> list[Claim]:
    short, long = spread_over(Batch(prompt=1_000)), spread_over(Batch(prompt=16_000))
    few, many = spread_over(Batch(select_ratio=0.1)), spread_over(Batch(select_ratio=0.6))
    claims = []
    length, ratio = "5.4, fig. 16a, 6K to 96K tokens", "5.4, fig. 16c, selection 10 to 60 %"
    for figure, title, published in (("ttst_s", "TTST", (3.1, 1.4, 1.0)), ("tbt_s", "TBT", (0.5, 0.8, 0.5))):
        grown = {name: getattr(long[name], figure) - getattr(short[name], figure) for name in short}
        for name, value in zip(("full", "partial", "SmartGen"), published, strict=True):
            claims.append(number(f"growth of {title}, {name}", length, value, grown[name], "s"))
        if figure == "ttst_s":
            claims.append(ordering("growth of TTST", length, **{n: grown[n] for n in ("SmartGen", "partial", "full")}))
        else:
            claims.append(ordering("growth of TBT", length, **{n: grown[n] for n in ("SmartGen", "partial")}))
    for figure, title, times in (("ttst_s", "TTST", (2.0, 1.8)), ("tbt_s", "TBT", (2.1, 1.7))):
        for name, value in zip(("partial", "SmartGen"), times, strict=True):
            over = getattr(many[name], figure) / getattr(few[name], figure)
            claims.append(number(f"{title} of {name}, 60 % over 10 %", ratio, value, over))
    return claims
