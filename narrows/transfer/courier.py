"""The sending side of all hand-overs of one prefill instance: three paths over one link (SmartGen section 4).

    stored / land / finish ──▶ proactive    metadata first, then KV blocks in the order of their importance, as many as
                                            cross while prefill computes (equation 2); behind them the note
    Fetch from decode      ──▶ on demand    gathered into one piece, answered at once, ahead of everything else
    Grant from decode      ──▶ speculative  the remaining blocks, a few at a time, behind everything else

Little is handed to the transport at once, so what goes next is decided late: a link slower than predicted leaves more
to the other paths instead of delaying decode. A hand-over that is full by its scheme, or by equation 2 on a fast link,
posts every layer whole as soon as it is stored and its note behind the last.

Two threads use a courier: the one that computes (`open`, `land`, `store`, `finish`, `cancel`, `take_news`) and one that
serves the link while that computes (`serve`). A lock makes each call whole; `news` wakes the first.
"""

import contextlib
import logging
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from narrows.core.plan import Landing
from narrows.core.scheme import Scheme
from narrows.core.trace import GATHER, Tracer
from narrows.core.wire import Delivered, Fetch, Grant, Refusal, Settled
from narrows.errors import PeerLost, TransportError
from narrows.transfer.answers import Answer, Gatherer
from narrows.transfer.base import (
    Done,
    Dropped,
    Message,
    PeerGone,
    PeerName,
    Post,
    PostId,
    Priority,
    Transport,
    TransportEvent,
)
from narrows.transfer.codec import decode, encode
from narrows.transfer.meter import LinkMeter
from narrows.transfer.parcel import METADATA, ON_DEMAND, PATHS, PROACTIVE, SPECULATIVE, Key, Parcel, Plan, Source
from narrows.transfer.plan import Ints, Slots
from narrows.transfer.signal import Signal

CONNECT_TIMEOUT_S = 2.0
WINDOW_S = 0.03  # how much of the link's time is handed to the transport ahead
LEAST_WINDOW, MOST_WINDOW = 32 * 1024, 16 * 2**20
ENDINGS_KEPT = 4096  # of hand-overs that are over, for fetches that cross with the last of the KV

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """A hand-over that can not go on."""

    key: Key
    error: str


News = Delivered | Failure


@dataclass(slots=True)
class _Flight:
    """A post on its way. `piece` is its place in the staging ring."""

    peer: PeerName
    path: str
    num_bytes: int
    posted_s: float
    parcel: Parcel | None = None
    answer: Answer | None = None
    piece: int | None = None


class Courier:
    """See the module's text. `clock` gives seconds."""

    def __init__(
        self, source: Source, transport: Transport, clock: Callable[[], float], tracer: Tracer | None = None
    ) -> None:
        self._tracer = tracer
        self.news = Signal()
        self.closed = False  # set by its owner before the transport closes
        self._source = source
        self._transport = transport
        self._clock = clock
        self._lock = threading.RLock()
        self._parcels: dict[Key, Parcel] = {}  # in order of their opening
        self._endings: OrderedDict[Key, bool] = OrderedDict()  # True: everything had arrived
        self._flights: dict[PostId, _Flight] = {}
        self._meters: dict[PeerName, LinkMeter] = {}
        self._decided: dict[PeerName, bool | None] = {}  # how the last hand-over went, for the log
        self._news: list[News] = []
        self._answers: deque[tuple[PeerName, Answer]] = deque()  # in order; they wait for room to be gathered in
        self._gatherer: Gatherer | None = None  # made when the first fetch comes

    # ---- the computing side

    def open(self, key: Key, slots: Slots, num_cached: int) -> None:
        """A prompt of len(slots) tokens has its pages; the KV of the first `num_cached` is there."""
        with self._lock:
            layers = self._source.layout.num_layers
            stored = np.full(layers, num_cached, dtype=np.int64)
            self._parcels[key] = Parcel(key, slots.astype(np.int64), stored, np.zeros(layers, dtype=np.int64))

    def land(self, landing: Landing, plan: Plan) -> None:
        """Decode has made room: what is stored may go."""
        with self._lock:
            parcel = self._parcels.get((landing.request, landing.generation))
            if parcel is None or parcel.ended:
                return
            try:
                peer = self._transport.connect(landing.address, timeout_s=CONNECT_TIMEOUT_S)
            except PeerLost as error:
                self._fail(parcel, f"its KV can not be sent to {landing.instance}: {error}")
                return
            parcel.bind(self._source, landing, peer, plan)
            self._pump()

    def store(self, key: Key, layer: int, num_tokens: int) -> None:
        """The KV (and metadata) of the prompt's first `num_tokens` tokens is in the pool, in this layer."""
        with self._lock:
            parcel = self._parcels.get(key)
            if parcel is None:
                return
            parcel.stored[layer] = num_tokens
            parcel.undescribed = True
            if parcel.bound is not None:
                parcel.bound.delivery.store(layer, num_tokens)
                self._pump()

    def finish(self, key: Key, note: Callable[[Scheme, bool], bytes]) -> None:
        """The prompt is computed. `note(scheme, full)`, from which decode goes on, follows all that it waits for."""
        with self._lock:
            parcel = self._parcels.get(key)
            if parcel is not None:
                parcel.note = note
                self._pump()

    def cancel(self, key: Key) -> None:
        """Send no more of this attempt; news of it follows when nothing of it is on its way any more."""
        with self._lock:
            parcel = self._parcels.get(key)
            if parcel is None:
                return
            parcel.cancelled = True
            if parcel.open_posts:
                self._transport.cancel(*key)
            self._close(parcel)

    def take_news(self) -> list[News]:
        """What has ended or failed since the last call."""
        with self._lock:
            self.news.clear()
            news, self._news = self._news, []
            return news

    # ---- the link's side

    def serve(self) -> bool:
        """Take in what the transport has, send what can go; False when there was nothing. Does not block."""
        with self._lock:
            events = self._transport.poll()
            for event in events:
                self._on_event(event)
            if events:
                self._pump()
            return bool(events)

    def _on_event(self, event: TransportEvent) -> None:
        if isinstance(event, Done | Dropped):
            flight = self._flights.pop(event.post, None)
            if flight is not None:
                self._on_landed(flight, event)
        elif isinstance(event, Message):
            self._on_message(event)
        elif isinstance(event, PeerGone):
            self._answers = deque(item for item in self._answers if item[0] != event.peer)

    def _on_landed(self, flight: _Flight, event: Done | Dropped) -> None:
        meter, parcel = self._meters[flight.peer], flight.parcel
        num_bytes = event.num_bytes if isinstance(event, Done) else 0
        if isinstance(event, Done):
            meter.landed(flight.num_bytes, self._clock())
        else:
            meter.dropped(flight.num_bytes)
        if self._tracer is not None:
            self._tracer.add(
                flight.path, f"layer {event.tag.layer}", flight.posted_s, layer=event.tag.layer, num_bytes=num_bytes
            )
        if flight.piece is not None and self._gatherer is not None:
            self._gatherer.ring.give_back(flight.piece)
        if flight.answer is not None:
            flight.answer.count(num_bytes)
            if isinstance(event, Dropped):
                self._refuse(flight.peer, flight.answer.fetch, f"its answer did not arrive: {event.error}")
        if parcel is not None:
            parcel.open_posts.discard(event.post)
            parcel.in_flight[flight.path] -= flight.num_bytes
            parcel.sent[flight.path] += num_bytes
            if isinstance(event, Dropped) and not parcel.ended:
                self._fail(parcel, f"its KV did not arrive at {event.peer}: {event.error}")
            self._close(parcel)

    def _on_message(self, event: Message) -> None:
        try:
            message = decode(event.payload)
        except TransportError as error:
            _log.warning("%s sent a damaged message: %s", event.peer, error)
            return
        if isinstance(message, Grant):
            for request, generation in message.requests:
                parcel = self._parcels.get((request, generation))
                if parcel is not None and parcel.bound is not None:
                    parcel.credit += self._granted(parcel, message)
        elif isinstance(message, Fetch):
            self._on_fetch(event.peer, message)

    def _granted(self, parcel: Parcel, grant: Grant) -> float:
        """Tokens of one layer that may be sent for it (section 4.3): by attention a share of a layer, so in a step that
        share of everything, or what crosses in the idle windows."""
        assert parcel.bound is not None
        share = parcel.bound.plan.scheme.speculative
        if share is not None:
            return share * parcel.num_tokens * grant.layers
        rate = self._meters[parcel.bound.peer].bytes_per_s or 0.0
        return grant.idle_s * rate / self._source.layout.token_bytes

    def _on_fetch(self, peer: PeerName, fetch: Fetch) -> None:
        try:
            answer = Answer(fetch, self._parcels, self._endings, self._source.layout.num_kv_heads)
        except TransportError as error:
            self._refuse(peer, fetch, str(error))
        else:
            self._answers.append((peer, answer))

    def _refuse(self, peer: PeerName, fetch: Fetch, error: str) -> None:
        _log.warning("a fetch of %s is not answered: %s", peer, error)
        self._send(peer, Refusal(fetch.ticket, error))

    def _send(self, peer: PeerName, message: Refusal | Settled) -> None:
        with contextlib.suppress(PeerLost):  # it waits for nothing any more
            self._transport.send(peer, encode(message))

    # ---- what goes next

    def _pump(self) -> None:
        self._pump_answers()
        for parcel in list(self._parcels.values()):
            if parcel.bound is not None and not parcel.ended:
                try:
                    self._advance(parcel)
                except PeerLost as error:
                    self._fail(parcel, f"its KV can not be sent to {parcel.bound.landing.instance}: {error}")
                self._close(parcel)

    def _pump_answers(self) -> None:
        while self._answers:
            peer, answer = self._answers[0]
            if self._gatherer is None:
                self._gatherer = Gatherer(self._source, self._transport.allocate)
            began_s = self._clock()
            try:
                step = self._gatherer.next_post(answer, f"fetch:{self._transport.name}", encode(answer.note))
            except TransportError as error:
                self._answers.popleft()
                self._refuse(peer, answer.fetch, str(error))
                continue
            if step is None:
                return
            if self._tracer is not None:
                self._tracer.add(GATHER, f"layer {answer.fetch.layer}", began_s, layer=answer.fetch.layer)
            if not answer.rows:
                self._answers.popleft()
            post, piece = step
            try:
                self._post(peer, post, ON_DEMAND, answer=answer, piece=piece)
            except (TransportError, ValueError) as error:
                answer.rows.clear()
                if piece is not None:
                    self._gatherer.ring.give_back(piece)
                self._refuse(peer, answer.fetch, str(error))

    def _advance(self, parcel: Parcel) -> None:
        """Hand the transport what this parcel may send now."""
        self._decide(parcel)
        if parcel.full:
            self._advance_full(parcel)
        else:
            self._advance_selective(parcel)

    def _decide(self, parcel: Parcel) -> None:
        """Full or selective, and how much is pushed: once the link's rate is known, or the scheme says."""
        bound = parcel.bound
        assert bound is not None
        if parcel.full is not None or parcel.decide_by_scheme(self._source.layout):
            return
        rate = self._meter(bound.peer).bytes_per_s
        if rate is None:
            if parcel.note is None or parcel.open_posts:
                return
            # Too little has gone there to learn from: what went elsewhere left by the same way.
            known = [meter.bytes_per_s for meter in self._meters.values() if meter.bytes_per_s is not None]
            rate = known[-1] if known else math.inf
        waiting = sum(other.in_flight[path] for other in self._parcels.values() for path in (METADATA, PROACTIVE))
        pushed, blocks = parcel.decide_by_rate(self._source, rate, waiting)
        # Each hand-over is decided anew; a person wants to hear of it when it comes out otherwise than the last.
        is_news = self._decided.get(bound.peer) is not parcel.full and math.isfinite(rate)
        level = logging.INFO if is_news else logging.DEBUG
        self._decided[bound.peer] = parcel.full
        _log.log(
            level,
            "%s: %s transfer to %s: %.1f MB take %.2f s at %.2f Gbit/s, prefill %.2f s; %d of %d KV blocks are pushed",
            parcel.key[0],
            "full" if parcel.full else "selective",
            bound.landing.instance,
            self._source.layout.num_layers * self._source.layout.token_bytes * parcel.num_tokens / 1e6,
            parcel.transfer_s,
            rate * 8e-9,
            bound.plan.prefill_s,
            pushed,
            blocks,
        )

    def _advance_full(self, parcel: Parcel) -> None:
        assert parcel.bound is not None
        delivery = parcel.bound.delivery
        for layer in range(self._source.layout.num_layers):
            tokens = delivery.take_layer(layer)
            if len(tokens):
                self._push(
                    parcel, PROACTIVE, Priority.PROACTIVE, np.full(len(tokens), layer, dtype=np.int64), tokens, None
                )
        if parcel.note is not None and not parcel.begun and not delivery.num_left:
            self._begin(parcel, Priority.PROACTIVE)

    def _advance_selective(self, parcel: Parcel) -> None:
        """Metadata, then blocks in their order, then the note; then what decode grants.

        Once the prompt is computed only what decode can not begin without is pushed, and is as urgent as what a step
        waits for: a request that waits for its second token must not starve behind the steps of others.
        """
        bound = parcel.bound
        assert bound is not None
        delivery, done = bound.delivery, parcel.note is not None
        window = self._window(bound.peer)
        priority = Priority.ON_DEMAND if done else Priority.PROACTIVE
        if parcel.full is False and self._source.rows.row_bytes:
            while parcel.undescribed and self._has_room(parcel, window, METADATA, PROACTIVE):
                post = parcel.metadata_post(self._source, priority, window // 2)
                if post is None:
                    parcel.undescribed = False
                else:
                    self._post(bound.peer, post, METADATA, parcel)
        while not parcel.begun and self._has_room(parcel, window, METADATA, PROACTIVE):
            only_dense = done or parcel.full is None
            taken = delivery.take(self._batch(window), proactive=parcel.full is False, dense=only_dense)
            if not len(taken[1]):
                break
            self._push(parcel, PROACTIVE, priority, *taken)
        if done and not parcel.begun and parcel.full is False and not self._owes(parcel):
            self._begin(parcel, Priority.ON_DEMAND)
        if bound.plan.scheme.speculative != 0.0 and parcel.full is False and (parcel.begun or not done):
            self._speculate(parcel, window)

    def _owes(self, parcel: Parcel) -> bool:
        """Whether something that decode can not begin without has not arrived."""
        assert parcel.bound is not None
        undescribed = parcel.undescribed and self._source.rows.row_bytes > 0
        on_its_way = parcel.in_flight[METADATA] + parcel.in_flight[PROACTIVE] > 0
        return undescribed or on_its_way or not parcel.bound.delivery.has_dense()

    def _speculate(self, parcel: Parcel, window: int) -> None:
        """While prefill computes an idle link is enough; later decode grants the time."""
        assert parcel.bound is not None
        while self._has_room(parcel, window, *PATHS):
            allowed = min(int(parcel.credit), self._batch(window)) if parcel.begun else self._batch(window)
            if allowed < 1:
                return
            taken = parcel.bound.delivery.take(allowed, proactive=False)
            if not len(taken[1]):
                return
            if parcel.begun:
                parcel.credit -= len(taken[1]) / self._source.layout.num_kv_heads
            self._push(parcel, SPECULATIVE, Priority.SPECULATIVE, *taken)

    def _begin(self, parcel: Parcel, priority: Priority) -> None:
        """The note: behind what was posted with the same priority."""
        bound = parcel.bound
        assert bound is not None
        self._post(bound.peer, parcel.note_post(self._source, priority, bool(parcel.full)), PROACTIVE, parcel)
        parcel.begun = True
        parcel.pushed_blocks = bound.delivery.pushed

    def _has_room(self, parcel: Parcel, window: int, *paths: str) -> bool:
        """Whether less is on its way on these paths than the window."""
        return sum(parcel.in_flight[path] for path in paths) < window

    def _window(self, peer: PeerName) -> int:
        rate = self._meter(peer).bytes_per_s
        return LEAST_WINDOW if rate is None else int(min(max(rate * WINDOW_S, LEAST_WINDOW), MOST_WINDOW))

    def _batch(self, window: int) -> int:
        """Tokens of one layer that are posted at once."""
        return max(1, window // 2 // self._source.layout.token_bytes)

    def _push(
        self, parcel: Parcel, path: str, priority: Priority, layers: Ints, tokens: Ints, heads: Ints | None
    ) -> None:
        assert parcel.bound is not None
        self._post(parcel.bound.peer, parcel.kv_post(self._source, priority, layers, tokens, heads), path, parcel)

    def _post(
        self,
        peer: PeerName,
        post: Post,
        path: str,
        parcel: Parcel | None = None,
        *,
        answer: Answer | None = None,
        piece: int | None = None,
    ) -> None:
        flight = _Flight(peer, path, post.num_bytes, self._clock(), parcel, answer, piece)
        id = self._transport.post(peer, post)
        self._meter(peer).sent(flight.num_bytes, flight.posted_s)
        self._flights[id] = flight
        if parcel is not None:
            parcel.open_posts.add(id)
            parcel.in_flight[path] += flight.num_bytes

    def _meter(self, peer: PeerName) -> LinkMeter:
        return self._meters.setdefault(peer, LinkMeter())

    # ---- endings

    def _fail(self, parcel: Parcel, error: str) -> None:
        if not parcel.ended:
            parcel.failed = True
            self._tell(Failure(parcel.key, error))

    def _close(self, parcel: Parcel) -> None:
        """Forget a parcel of which nothing is on its way, when it is cancelled or all of it has arrived."""
        if parcel.open_posts or parcel.key not in self._parcels:
            return
        bound = parcel.bound
        delivered = not parcel.ended and parcel.begun and bound is not None and not bound.delivery.num_left
        if parcel.cancelled or delivered:
            del self._parcels[parcel.key]
            self._endings[parcel.key] = delivered
            if len(self._endings) > ENDINGS_KEPT:
                self._endings.popitem(last=False)
            self._tell(parcel.delivered(self._source))
            if delivered and bound is not None and not parcel.full:
                self._send(bound.peer, Settled(*parcel.key))

    def _tell(self, news: News) -> None:
        self._news.append(news)
        self.news.set()
