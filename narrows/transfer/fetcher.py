"""The on-demand path where it asks, and the grants of the speculative one: decode's side of SmartGen 4.2 and 4.3.

One request and one answer for each layer and prefill peer of a step, whatever the number of requests. While an answer
is waited for, all other events of the transport collect in `deferred`, in order, for whoever owns them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from narrows.core.trace import FETCH, WAIT, Tracer
from narrows.core.wire import Fetch, Fetched, Grant, Refusal, Settled, Wanted
from narrows.errors import PeerLost, TransportError
from narrows.transfer.base import Arrived, Message, PeerGone, PeerName, Region, Transport, TransportEvent
from narrows.transfer.codec import decode, encode
from narrows.transfer.positions import Positions, encode_positions

FETCH_TAG = "fetch:"  # begins the request name in the tags of answers
GRANT_S = 0.01  # grants of layers that follow each other faster go in one message


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the KV of one request of a step comes from."""

    request: str
    generation: int
    peer: PeerName
    num_tokens: int  # of it that prefill computed


@dataclass(slots=True)
class _Ticket:
    """An open fetch: the requests each peer still owes."""

    layer: int
    sent_s: float
    owed: dict[PeerName, list[int]]
    broken: set[int] = field(default_factory=set)
    delivered: set[int] = field(default_factory=set)


class Fetcher:
    """Implements the Remote of attention.selective. `wait_for_news(seconds)` returns when the transport may have
    something, or earlier; `clock` gives seconds."""

    def __init__(
        self,
        transport: Transport,
        num_heads: int,
        clock: Callable[[], float],
        wait_for_news: Callable[[float], None],
        *,
        patience_s: float,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self.deferred: list[TransportEvent] = []
        self.settled: set[tuple[str, int]] = set()  # hand-overs that will write nothing more; the owner empties it
        self.wait_for_news = wait_for_news
        self._transport = transport
        self._num_heads = num_heads
        self._clock = clock
        self._patience_s = patience_s
        self._origins: Sequence[Origin | None] = ()
        self._grants = True
        self._tickets: dict[int, _Ticket] = {}
        self._next = 1
        self._memory: list[Region | None] = [None, None]  # of even and of odd layers
        self._lost: set[PeerName] = set()
        self._idle_since_s: float | None = None
        self._granted_s = 0.0  # when the last grant went
        self._layers = 0  # attentions since then
        self._idle_s = 0.0  # the usual window between the start of an attention and the next fetch

    def begin(self, origins: Sequence[Origin | None], *, grants: bool = True) -> None:
        """The requests of the next step, None where all KV is here. `grants`: let prefill send in idle windows."""
        self._origins = origins
        self._grants = grants
        self._idle_since_s = None
        self._tickets.clear()

    # ---- Remote

    def rows(self, layer: int, num_bytes: int) -> memoryview:
        region = self._memory[layer % 2]
        if region is None or len(region.buffer) < num_bytes:
            region = self._memory[layer % 2] = self._transport.allocate(1 << (num_bytes - 1).bit_length())
        return region.buffer[:num_bytes]

    def fetch(
        self, layer: int, wanted: Sequence[tuple[int, list[Positions]]], row_bytes: int, *, packed: bool = False
    ) -> int:
        self._end_idle_window()
        region = self._memory[layer % 2]
        assert region is not None
        by_peer: dict[PeerName, list[Wanted]] = {}
        ticket = _Ticket(layer, self._clock(), {})
        for request, heads in wanted:
            origin = self._origins[request]
            assert origin is not None
            positions = encode_positions(heads, origin.num_tokens)
            target = request * self._num_heads * row_bytes
            item = Wanted(origin.request, origin.generation, positions, target, row_bytes)
            by_peer.setdefault(origin.peer, []).append(item)
            ticket.owed.setdefault(origin.peer, []).append(request)
        number, self._next = self._next, self._next + 1
        self._tickets[number] = ticket
        for peer, items in by_peer.items():
            try:
                if peer in self._lost:
                    raise PeerLost(peer, "it is gone")
                self._transport.send(peer, encode(Fetch(number, layer, region.key, tuple(items), packed)))
            except PeerLost:
                ticket.broken.update(ticket.owed.pop(peer, ()))  # nothing was asked: nothing will be written
        return number

    def wait(self, ticket: int) -> tuple[set[int], set[int]]:
        open_ticket, began_s = self._tickets[ticket], self._clock()
        heard_s, received = began_s, -1
        while open_ticket.owed:
            events = self._transport.poll()
            for event in events:
                if not self.take(event):
                    self.deferred.append(event)
            now_s = self._clock()
            if events or self._transport.stats.received_bytes != received:
                heard_s, received = now_s, self._transport.stats.received_bytes
            elif now_s - heard_s > self._patience_s:
                for peer in list(open_ticket.owed):
                    self._break(ticket, open_ticket, peer)
            elif open_ticket.owed:
                self.wait_for_news(self._patience_s / 4)
        del self._tickets[ticket]
        if self._tracer is not None:
            self._tracer.add(WAIT, f"layer {open_ticket.layer}", began_s, layer=open_ticket.layer)
        return open_ticket.broken, open_ticket.delivered

    def attention_starts(self, layer: int) -> None:
        self._end_idle_window()
        self._idle_since_s = now_s = self._clock()
        self._layers += 1
        if not self._grants or now_s - self._granted_s < GRANT_S:
            return
        layers, self._layers, self._granted_s = self._layers, 0, now_s
        by_peer: dict[PeerName, list[tuple[str, int]]] = {}
        for origin in self._origins:
            if origin is not None and origin.peer not in self._lost:
                by_peer.setdefault(origin.peer, []).append((origin.request, origin.generation))
        for peer, requests in by_peer.items():
            try:
                self._transport.send(peer, encode(Grant(tuple(requests), layers, layers * self._idle_s)))
            except PeerLost:
                self._lost.add(peer)

    # ---- events

    def take(self, event: TransportEvent) -> bool:
        """Take in an event; False when it is not this object's (a peer's end is everybody's)."""
        if isinstance(event, Arrived) and event.tag.request.startswith(FETCH_TAG):
            if event.note:
                self._on_answer(event.peer, event.tag.generation, event.note)
            return True
        if isinstance(event, Message):
            self._on_answer(event.peer, None, event.payload)
            return True
        if isinstance(event, PeerGone):
            self._lost.add(event.peer)
            for number, ticket in self._tickets.items():
                self._break(number, ticket, event.peer)
        return False

    def _on_answer(self, peer: PeerName, number: int | None, frame: bytes) -> None:
        """An answer's note, or a refusal. What is damaged breaks what it may have been about."""
        try:
            message = decode(frame)
        except TransportError:
            message = None
        if isinstance(message, Settled):
            self.settled.add((message.request, message.generation))
            return
        if isinstance(message, Fetched | Refusal):
            number = message.ticket
        tickets = self._tickets if number is None else {number: self._tickets.get(number)}
        for name, ticket in tickets.items():
            if ticket is None or peer not in ticket.owed:
                continue  # given up meanwhile
            if isinstance(message, Fetched):
                for request in ticket.owed.pop(peer):
                    origin = self._origins[request]
                    assert origin is not None
                    key = (origin.request, origin.generation)
                    if key in message.lost:
                        ticket.broken.add(request)
                    elif key in message.delivered:
                        ticket.delivered.add(request)
                if self._tracer is not None:
                    self._tracer.add(FETCH, f"layer {ticket.layer}", ticket.sent_s, layer=ticket.layer)
            else:
                self._break(name, ticket, peer)

    def _break(self, number: int, ticket: _Ticket, peer: PeerName) -> None:
        """What this peer owes will not be taken any more. Its answer may still be written, where the transport can not
        refuse it: so nothing else lands there again."""
        owed = ticket.owed.pop(peer, None)
        if owed is not None:
            ticket.broken.update(owed)
            self._transport.revoke(f"{FETCH_TAG}{peer}", number)
            self._memory[ticket.layer % 2] = None

    def _end_idle_window(self) -> None:
        if self._idle_since_s is not None:
            self._idle_s += 0.2 * (self._clock() - self._idle_since_s - self._idle_s)
            self._idle_since_s = None
