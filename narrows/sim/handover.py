"""A simulated hand-over: full, or by SmartGen's three paths (section 4), on the link of its prefill instance.

The mechanism is the courier's (transfer.courier), its rule for the amount transfer.plan's; what is not simulated is
which entries they are. A step selects `select_ratio` of the context in each layer that selects; of those it lacks
`on_demand_ratio` when decode begins, and less in proportion as the rest arrives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from narrows.core.scheme import SCHEMES, Scheme
from narrows.core.wire import Delivered
from narrows.errors import ConfigError
from narrows.kv.blocks import NUM_BLOCKS, blocks_for
from narrows.kv.layout import DENSE_LAYERS
from narrows.sim.link import Link, Priority, Transfer
from narrows.transfer.plan import num_pushed

METADATA, PROACTIVE, ON_DEMAND, SPECULATIVE = "metadata", "proactive", "on_demand", "speculative"
FULL_FROM = 0.95  # the courier's: an adaptive hand-over is full when so much of it crosses during prefill
PACKED = 0.75  # of its bytes, what is fetched packed (bfloat16)
_DUST = 0.5  # of a byte: less than that is nothing


@dataclass(frozen=True, slots=True)
class HandOverModel:
    """What hand-overs of a scenario have in common. Sizes are of one token in one layer, all KV heads."""

    num_layers: int
    token_bytes: float  # of KV
    metadata_bytes: float = 0.0  # of the selector's metadata
    scheme: Scheme = SCHEMES["full"]
    select_ratio: float = 0.1  # of the context that a step reads
    on_demand_ratio: float = 0.1  # of the entries it reads, when decode begins
    pieces: int = 8  # the layers of a chunk are pushed in so many pieces, each when its last layer is stored

    def __post_init__(self) -> None:
        for name in ("select_ratio", "on_demand_ratio"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name}: {value} is not allowed; use a number from 0 to 1")
        if self.pieces < 1:
            raise ConfigError(f"pieces: {self.pieces} is not allowed; use at least 1")

    @property
    def dense_layers(self) -> int:
        return min(DENSE_LAYERS, self.num_layers)

    def kv_bytes(self, num_tokens: int) -> float:
        return self.num_layers * self.token_bytes * num_tokens

    def all_metadata(self, num_tokens: int) -> float:
        return (self.num_layers - self.dense_layers) * self.metadata_bytes * num_tokens

    def edges(self) -> list[int]:
        """Layers at which pieces begin and end."""
        count = min(self.pieces, self.num_layers)
        return [self.num_layers * i // count for i in range(count + 1)]


class HandOver:
    """One attempt's. `on_ready` is called when decode has what it begins with, `on_delivered` when all is there.

    Bytes of KV are in one of four places: not stored yet, `must` or `extra` or `rest` (stored, wait for a landing or
    for the link), crossed.
    """

    def __init__(
        self,
        model: HandOverModel,
        link: Link,
        num_tokens: int,
        on_ready: Callable[[], Any],
        on_delivered: Callable[[], Any],
    ) -> None:
        self.model = model
        self.num_tokens = num_tokens
        self.landed = False
        self.ready = False
        self.ended = False
        self.full = model.scheme.full
        self.sent = dict.fromkeys((METADATA, PROACTIVE, ON_DEMAND, SPECULATIVE), 0.0)
        self.prefill_s = self.transfer_s = 0.0
        self.num_pushed = 0
        self._share = 1.0  # of the KV in layers that select, to be pushed before decode begins
        self._link = link
        self._on_ready = on_ready
        self._on_delivered = on_delivered
        self._computed = False
        self._backlog: list[tuple[int, int, int]] = []  # stored before the landing: layers from, to, tokens
        self._open: dict[Transfer, bool] = {}  # on their way: whether decode can not begin without it
        self._kv_crossed = 0.0
        self._lacked = 1.0  # of the KV, when decode began
        self._granted: Transfer | None = None

    # ---- prefill's side

    def land(self, prefill_s: float) -> None:
        """Decode has made room; `prefill_s` is Tp of equation 2. What is stored may go."""
        self.landed = True
        self._decide(prefill_s)
        backlog, self._backlog = self._backlog, []
        for piece in backlog:
            self._push(*piece)
        self._look()

    def store(self, first_layer: int, last_layer: int, num_tokens: int) -> None:
        """The KV of so many more tokens is stored in layers first_layer to last_layer - 1."""
        if self.landed:
            self._push(first_layer, last_layer, num_tokens)
        else:
            self._backlog.append((first_layer, last_layer, num_tokens))

    def finish(self) -> None:
        """The prompt is computed: only what decode needs to begin still goes, as urgent as a fetch."""
        self._computed = True
        if not self.full and self.landed:
            for transfer, must in list(self._open.items()):
                left = transfer.num_bytes - self._drop(transfer)
                if must:
                    self._send(left, Priority.ON_DEMAND, transfer.path, must=True)
        self._look()

    def cancel(self) -> None:
        """The attempt is over; nothing more is sent."""
        self.ended = True
        for transfer in list(self._open):
            self._drop(transfer)

    def _decide(self, prefill_s: float) -> None:
        """Full or selective and how much, as the courier does."""
        model, scheme = self.model, self.model.scheme
        num_blocks = blocks_for(self.num_tokens, scheme.num_blocks or NUM_BLOCKS)
        blocks, dense = model.num_layers * num_blocks, model.dense_layers * num_blocks
        kv, metadata = model.kv_bytes(self.num_tokens), model.all_metadata(self.num_tokens)
        self.prefill_s = prefill_s
        self.transfer_s = (kv + metadata + self._link.waiting_bytes) / self._link.bytes_per_s
        count = blocks
        if not scheme.full:
            if scheme.fraction is not None:
                count = max(int(scheme.fraction * blocks), dense)
            else:
                count = num_pushed(model.num_layers, num_blocks, prefill_s, self.transfer_s)
                self.full = scheme.adaptive and count >= FULL_FROM * blocks
                count = max(int(count - blocks * metadata / (kv + metadata)), dense)
        self.num_pushed = blocks if self.full else count
        self._share = (count - dense) / (blocks - dense) if blocks > dense else 1.0

    def _push(self, first_layer: int, last_layer: int, num_tokens: int) -> None:
        """Post one piece: what decode needs, what equation 2 pushes, and the rest when the link is idle."""
        model = self.model
        dense = max(0, min(last_layer, model.dense_layers) - first_layer) * model.token_bytes * num_tokens
        kv = (last_layer - first_layer) * model.token_bytes * num_tokens
        if self.full:
            self._send(kv, Priority.PROACTIVE, PROACTIVE, must=True)
            return
        selecting = last_layer - max(first_layer, min(model.dense_layers, last_layer))
        urgent = Priority.ON_DEMAND if self._computed else Priority.PROACTIVE
        self._send(selecting * model.metadata_bytes * num_tokens, urgent, METADATA, must=True)
        self._send(dense, urgent, PROACTIVE, must=True)
        if not self._computed:
            pushed = (kv - dense) * self._share
            self._send(pushed, Priority.PROACTIVE, PROACTIVE, must=False)
            if model.scheme.speculative != 0.0:
                self._send(kv - dense - pushed, Priority.SPECULATIVE, SPECULATIVE, must=False)

    def _send(self, num_bytes: float, priority: Priority, path: str, *, must: bool) -> Transfer | None:
        if num_bytes < _DUST:
            return None
        transfer: Transfer

        def crossed() -> None:
            del self._open[transfer]
            self._count(path, transfer.num_bytes)
            if not self.ended:
                self._look()

        transfer = self._link.send(num_bytes, priority, path, crossed)
        if not transfer.done:
            self._open[transfer] = must
        return transfer

    def _drop(self, transfer: Transfer) -> float:
        """Send no more of a transfer; returns what crosses of it, which counts."""
        crossed = self._link.cancel(transfer)
        del self._open[transfer]
        self._count(transfer.path, crossed)
        return crossed

    def _count(self, path: str, num_bytes: float) -> None:
        self.sent[path] += num_bytes
        if path != METADATA:
            self._kv_crossed += num_bytes / (PACKED if path == ON_DEMAND and self.model.scheme.packed else 1.0)

    def _look(self) -> None:
        """Whether decode can begin, and whether all is there."""
        if self._computed and self.landed and not self.ready and not any(self._open.values()):
            self.ready = True
            self._lacked = self.lacking
            self._on_ready()
        if self.ready and not self.ended and not self.lacking:
            self.ended = True
            self._on_delivered()

    # ---- decode's side

    @property
    def num_bytes(self) -> int:
        """What has crossed so far."""
        return round(sum(self.sent.values()))

    @property
    def lacking(self) -> float:
        """Which part of the KV has not crossed."""
        left = self.model.kv_bytes(self.num_tokens) - self._kv_crossed
        return left / self.model.kv_bytes(self.num_tokens) if left > max(_DUST, 1e-9 * self._kv_crossed) else 0.0

    def fetch(self, context: int, on_done: Callable[[], Any]) -> tuple[int, int]:
        """A step's fetches: returns (tokens x layers selected, of these fetched). `on_done` comes when they are there;
        not at all when there are none, that is 0 of them."""
        model = self.model
        selecting = model.num_layers - model.dense_layers
        selected = model.select_ratio * context * selecting
        lacking = model.on_demand_ratio * self.lacking / self._lacked if self._lacked else 0.0
        fetched = min(selected * lacking, self.lacking * self.num_tokens * selecting)
        num_bytes = fetched * model.token_bytes * (PACKED if model.scheme.packed else 1.0)
        if fetched < 1.0 or num_bytes < _DUST:
            return round(selected), 0

        def crossed() -> None:
            if not self.ended:
                self._count(ON_DEMAND, num_bytes)
                self._look()
            on_done()

        self._link.send(num_bytes, Priority.ON_DEMAND, ON_DEMAND, crossed)
        return round(selected), round(fetched)

    def grant(self) -> None:
        """A step begins: some more of the rest may cross behind everything else (section 4.3)."""
        share = self.model.scheme.speculative
        if self.ended or share == 0.0 or (self._granted is not None and self._granted in self._open):
            return
        kv = self.model.kv_bytes(self.num_tokens)
        part = self.lacking if share is None else min(share, self.lacking)
        self._granted = self._send(part * kv, Priority.SPECULATIVE, SPECULATIVE, must=False)

    def delivered(self, request: str, generation: int) -> Delivered:
        """What crossed, by path."""
        return Delivered(
            request,
            generation,
            metadata_bytes=round(self.sent[METADATA]),
            proactive_bytes=round(self.sent[PROACTIVE]),
            on_demand_bytes=round(self.sent[ON_DEMAND]),
            speculative_bytes=round(self.sent[SPECULATIVE]),
            wasted_bytes=max(0, round(self._kv_crossed - self.model.kv_bytes(self.num_tokens))),
            pushed_blocks=self.num_pushed,
            num_blocks=blocks_for(self.num_tokens, self.model.scheme.num_blocks or NUM_BLOCKS) * self.model.num_layers,
            prefill_s=self.prefill_s,
            transfer_s=self.transfer_s,
            full=self.full,
        )
