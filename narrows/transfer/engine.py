"""The common core of the socket transports: one I/O thread that owns all links, and the calls of the owner thread.

    owner thread   post, send, cancel --commands--> I/O thread --events--> poll
                   revoke: at once, under the receive lock

Subclasses say how to listen and dial (`_listen`, `_dial`), where regions live (`_allocate`) and how a block of data
moves (`_move`). Commands and events are deques, whose append and popleft are atomic.
"""

import logging
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from narrows.errors import PeerLost, TransportError
from narrows.transfer.base import (
    Done,
    Dropped,
    PeerGone,
    PeerName,
    Post,
    PostId,
    Priority,
    Region,
    TransportConfig,
    TransportEvent,
    TransportStats,
)
from narrows.transfer.frames import MAX_MESSAGE_BYTES, MAX_REQUEST_BYTES, Buffer, Frame, Kind, pack_head
from narrows.transfer.greeting import Greetings, greet
from narrows.transfer.handshake import Identity
from narrows.transfer.inbox import Inbox, Target
from narrows.transfer.link import Link
from narrows.transfer.memory import RegionTable, Revocations
from narrows.transfer.outbox import Item, Outbox, OutMessage, OutPost
from narrows.transfer.shaping import Pace, bucket_for
from narrows.transfer.signal import Signal
from narrows.transfer.stream import FrameReader

_FRAMES_PER_TURN = 16  # sent before the thread looks at what has arrived
_READS_PER_TURN = 8  # of one peer, before the others' turn
_PRECISE_S = 0.005  # shorter waits need better than epoll's millisecond
_CLOSE_S = 5.0
_CHECKS_PER_SILENCE = 8
_log = logging.getLogger(__name__)


class Engine:
    """A Transport but for the four methods below. See narrows.transfer.base for the contract."""

    kind: str

    def __init__(self, config: TransportConfig) -> None:
        self.name = PeerName(config.name)
        self.stats = TransportStats()
        self.config = config
        self._regions = RegionTable(self.kind)
        self._target = Target(self._regions, Revocations(), self.stats, self._emit)
        self._links: dict[PeerName, Link] = {}  # the newest link of each peer, live or gone
        self._addresses: dict[str, PeerName] = {}  # of peers we dialed, or that said where they listen
        self._live: list[Link] = []  # I/O thread only
        self._commands: deque[Callable[[], None]] = deque()
        self._events: deque[TransportEvent] = deque()
        self._wake = Signal()
        self._news = Signal()
        self._receiving = threading.Lock()  # held while bytes are written to regions
        self._next_post = 0
        self._closing = False
        self._failure: BaseException | None = None
        now = time.monotonic()
        self._bucket = bucket_for(config.link_gbps, now)
        self._check_every_s = config.silence_s / _CHECKS_PER_SILENCE
        self._next_check = now + self._check_every_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._on_wake)
        listener, self.address = self._listen()
        self._identity = Identity(self.kind, config.name, self.address, config.silence_s)
        self._greetings = Greetings(listener, self._selector, self._identity, config.secret, self._adopt_accepted)
        self._thread = threading.Thread(target=self._main, name=f"narrows-{self.kind}-{config.name}", daemon=True)
        self._thread.start()

    # ---- what a subclass provides

    def _listen(self) -> tuple[socket.socket, str]:
        """A listening socket and the address that peers dial."""
        raise NotImplementedError

    def _dial(self, address: str, timeout_s: float) -> socket.socket:
        """A connected socket. Raises OSError when nobody listens there, ValueError on a malformed address."""
        raise NotImplementedError

    def _tune(self, sock: socket.socket) -> None:
        """Set options of a new link's socket. Raises TransportError to turn the peer away."""

    def _bound_unsent(self, link: Link) -> None:
        """Keep the kernel from taking much more than link.pace.burst_bytes that it can not send at once."""

    def _allocate(self, num_bytes: int) -> memoryview:
        raise NotImplementedError

    def _queue(self, link: Link, item: Item) -> None:
        """I/O thread: an item joins the link's outbox."""
        link.outbox.put(item)

    def _move(self, link: Link, item: Item) -> None:
        """I/O thread: send the next frame of `item`, the head of the link's outbox."""
        self._transmit(link, item)

    def _on_region(self, link: Link, frame: Frame) -> None:
        """I/O thread: a frame about mapping regions."""
        raise TransportError("the peer asks for memory to be shared, which this transport does not do")

    def _over(self, post: OutPost) -> None:
        """I/O thread: a post has ended; release what is kept for it."""

    def _forget(self, link: Link) -> None:
        """I/O thread: a link has ended; release what is kept for it."""

    # ---- owner thread

    def allocate(self, num_bytes: int) -> Region:
        self._require_open()
        return self._regions.add(self._allocate(num_bytes))

    def connect(self, address: str, *, timeout_s: float = 10.0) -> PeerName:
        self._require_open()
        known = self._addresses.get(address)
        if known is not None and (link := self._links.get(known)) is not None and link.gone is None:
            return known
        try:
            sock = self._dial(address, timeout_s)
        except OSError as error:
            raise PeerLost(address, f"can not be reached: {error}") from error
        try:
            self._tune(sock)
            identity = greet(sock, self._identity, self.config.secret, timeout_s)
        except OSError as error:
            sock.close()
            raise PeerLost(address, f"gave up the handshake: {error}") from error
        except TransportError:
            sock.close()
            raise
        link = self._make_link(sock, identity)
        self._addresses[address] = link.peer
        self._command(partial(self._adopt, link))
        return link.peer

    def post(self, peer: PeerName, post: Post) -> PostId:
        link = self._link_to(peer)
        if len(post.tag.request.encode()) > MAX_REQUEST_BYTES:
            raise ValueError(f"post.tag.request: longer than {MAX_REQUEST_BYTES} bytes")
        self._next_post += 1
        item = OutPost(PostId(self._next_post), post, self.kind, self.config.block_bytes)
        self.stats.posts += 1
        self._command(partial(self._start, link, item))
        return item.id

    def send(self, peer: PeerName, payload: bytes, priority: Priority = Priority.ON_DEMAND) -> None:
        link = self._link_to(peer)
        if len(payload) > MAX_MESSAGE_BYTES:
            raise ValueError(f"send: a message of {len(payload)} bytes is longer than {MAX_MESSAGE_BYTES}")
        item = OutMessage(payload, priority, self.config.block_bytes)
        self._command(partial(self._start, link, item))

    def poll(self) -> Sequence[TransportEvent]:
        if self._failure is not None and not self._thread.is_alive() and not self._events:
            raise TransportError(f"transport {self.name} failed: {self._failure!r}") from self._failure
        if not self._closing and self._failure is None:  # a failed one stays readable, so that its error is met
            self._news.clear()
        events: list[TransportEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def fileno(self) -> int:
        return self._news.fileno()

    def cancel(self, request: str, generation: int) -> None:
        self._require_open()
        self._command(partial(self._cancel, request, generation))

    def revoke(self, request: str, generation: int) -> None:
        self._require_open()
        with self._receiving:
            self._target.revoked.add(request, generation)
            for link in list(self._links.values()):
                self._redirect(link)

    def close(self) -> None:
        """Drop what is not sent, end the thread, close every socket. Open posts end as Dropped events; idempotent."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise TransportError(f"transport {self.name}: its thread did not end within {_CLOSE_S} s")
        self._regions.clear()
        self._wake.close()
        self._news.close()

    def _link_to(self, peer: PeerName) -> Link:
        self._require_open()
        link = self._links.get(peer)
        if link is None:
            raise PeerLost(peer, "not connected")
        if link.gone is not None:
            raise PeerLost(peer, link.gone)
        return link

    def _require_open(self) -> None:
        if self._failure is not None:
            raise TransportError(f"transport {self.name} failed: {self._failure!r}") from self._failure
        if self._closing:
            raise TransportError(f"transport {self.name} is closed")

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()

    # ---- I/O thread: the loop

    def _main(self) -> None:
        try:
            while not self._closing:
                self._turn()
        except Exception as error:  # a bug: the owner must hear of it, and its peers' silence must not be waited for
            _log.exception("transport %s: I/O thread failed", self.name)
            self._failure = error
        finally:
            self._shut("the transport is closed" if self._failure is None else f"the transport failed: {self._failure}")

    def _turn(self) -> None:
        self._run_commands()
        wait_s = self._send()
        until_check_s = self._next_check - time.monotonic()
        for handle, events in self._select(max(0.0, until_check_s if wait_s is None else min(wait_s, until_check_s))):
            handle(events)
        if time.monotonic() >= self._next_check:
            self._check()

    def _select(self, timeout_s: float) -> list[tuple[Callable[[int], None], int]]:
        if 0.0 < timeout_s < _PRECISE_S and (fd := self._selector.fileno()) < 1024:
            # select waits to the microsecond where epoll rounds up; it takes small descriptors only
            select.select([fd], [], [], timeout_s)
            timeout_s = 0.0
        return [(key.data, events) for key, events in self._selector.select(timeout_s)]

    def _on_wake(self, _: int) -> None:
        self._wake.clear()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _send(self) -> float | None:
        """Send a few frames. Returns seconds until more can be sent, None if only an event can change that."""
        for _ in range(_FRAMES_PER_TURN):
            self._run_commands()
            if self._send_control():
                continue
            chosen = self._choose()
            if chosen is None:
                if self._bucket is not None and not any(link.unsent for link in self._live):
                    self._bucket.rest(time.monotonic())
                return None
            link, item = chosen
            if self._bucket is not None:
                wait_s = self._bucket.wait_s(item.next_bytes(), time.monotonic())
                if wait_s > 0.0:
                    return wait_s
            self._move(link, item)
        return 0.0

    def _send_control(self) -> bool:
        """Acks, refusals, heartbeats: small, so they do not wait for tokens, but they are charged."""
        sent = False
        for link in list(self._live):  # a link that breaks leaves it
            if link.outbox.passing and not link.unsent:
                frame, link.passing = link.outbox.passing.popleft()
                self._write(link, [frame], len(frame), Priority.ON_DEMAND)
                sent = True
            if link.outbox.control and not link.unsent:
                frames = b"".join(link.outbox.control)
                link.outbox.control.clear()
                self._write(link, [frames], len(frames), Priority.ON_DEMAND)
                sent = True
        return sent

    def _choose(self) -> tuple[Link, Item] | None:
        """The most urgent item of all links that take bytes; among equals the link that has rested longest."""
        best: tuple[Link, Item] | None = None
        for link in self._live:
            if link.unsent:
                continue
            item = link.outbox.head()
            if item is None:
                continue
            if best is None or (item.priority, link.last_turn) < (best[1].priority, best[0].last_turn):
                best = link, item
        return best

    def _transmit(self, link: Link, item: Item) -> None:
        """Put the next frame of `item` on the link's socket."""
        buffers = item.encode(self.config.checksums, link.pace.burst_bytes)
        num_bytes = sum(map(len, buffers))
        link.outbox.advance(item, num_bytes)
        self._write(link, buffers, num_bytes, item.priority)

    def _write(self, link: Link, buffers: Sequence[Buffer], num_bytes: int, priority: Priority) -> None:
        self._account(link, num_bytes, priority)
        link.unsent = buffers
        self._flush(link)

    def _account(self, link: Link, num_bytes: int, priority: Priority) -> None:
        now = time.monotonic()
        self.stats.sent_bytes[priority] += num_bytes
        link.last_sent = now
        link.last_turn = now
        if self._bucket is not None:
            self._bucket.charge(num_bytes, now)

    def _flush(self, link: Link) -> None:
        try:
            link.flush()
        except OSError as error:
            self._lose(link, f"sending failed: {error}")
            return
        if not link.unsent and link.outbox.head() is None:
            link.pace.rest()
        elif link.pace.judge(time.monotonic()):
            self._bound_unsent(link)
        if link.unsent and not link.wants_write:
            self._watch(link, write=True)

    def _watch(self, link: Link, *, write: bool) -> None:
        link.wants_write = write
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
        self._selector.modify(link.sock, events, partial(self._on_link, link))

    def _on_link(self, link: Link, events: int) -> None:
        if events & selectors.EVENT_READ:
            self._receive(link)
        if link.gone is None and events & selectors.EVENT_WRITE:
            if link.unsent:
                self._flush(link)
            else:
                self._watch(link, write=False)

    def _receive(self, link: Link) -> None:
        link.last_heard = time.monotonic()
        for _ in range(_READS_PER_TURN):
            with self._receiving:
                try:
                    more = link.receive()
                except BlockingIOError:
                    return
                except (OSError, TransportError) as error:
                    self._lose(link, str(error))
                    return
            if not more:
                return

    def _check(self) -> None:
        """Heartbeats and silence. If this thread itself was away, its peers get that time back."""
        now = time.monotonic()
        late_s = now - self._next_check
        self._next_check = now + self._check_every_s
        for link in list(self._live):
            if late_s > self._check_every_s:
                link.last_heard += late_s
            if now - link.last_heard > self.config.silence_s:
                self._lose(link, f"silent for {now - link.last_heard:.1f} s")
            elif now - link.last_sent > self._check_every_s and not link.outbox.control:
                link.outbox.control.append(pack_head(Kind.HEARTBEAT))
        self._greetings.expire(now)

    # ---- I/O thread: links and their posts

    def _make_link(self, sock: socket.socket, identity: Identity) -> Link:
        sock.setblocking(False)
        pace = Pace(self.config.block_bytes, fixed=self._bucket is not None)
        link = Link(sock, PeerName(identity.name), time.monotonic(), pace)
        self._bound_unsent(link)
        inbox = Inbox(link.peer, self._target, link.outbox.control.append, partial(self._answered, link))
        link.attach(inbox, FrameReader(inbox))
        # heartbeats must suit the less patient side
        self._check_every_s = min(self._check_every_s, identity.silence_s / _CHECKS_PER_SILENCE)
        self._links[link.peer] = link
        self._addresses[identity.address] = link.peer
        return link

    def _adopt_accepted(self, sock: socket.socket, identity: Identity) -> None:
        self._tune(sock)
        self._adopt(self._make_link(sock, identity))

    def _adopt(self, link: Link) -> None:
        if link.gone is not None:
            self._discard(link, link.gone)
            return
        link.last_heard = link.last_sent = time.monotonic()
        self._next_check = min(self._next_check, link.last_heard + self._check_every_s)
        self._live.append(link)
        self._selector.register(link.sock, selectors.EVENT_READ, partial(self._on_link, link))

    def _start(self, link: Link, item: Item) -> None:
        if link.gone is not None:
            if isinstance(item, OutPost):
                self._emit(Dropped(item.id, link.peer, item.tag, link.gone))
            return
        self._queue(link, item)

    def _answered(self, link: Link, frame: Frame, payload: bytes) -> None:
        if frame.head.kind == Kind.ACK:
            self._ended(link, PostId(frame.head.post), str(payload, "utf-8", "replace"))
        else:
            self._on_region(link, frame)

    def _ended(self, link: Link, id: PostId, error: str) -> None:
        post = link.outbox.end(id)
        if post is None:
            return
        self._over(post)
        if error:
            self._emit(Dropped(id, link.peer, post.tag, error))
        else:
            self._emit(Done(id, link.peer, post.tag, post.wire_bytes))

    def _cancel(self, request: str, generation: int) -> None:
        for link in self._live:
            for post in link.outbox.cancel(request, generation):
                self._over(post)
                self._emit(Dropped(post.id, link.peer, post.tag, "cancelled"))

    def _redirect(self, link: Link) -> None:
        """Owner thread, receive lock held: keep what is left of a revoked frame out of its region."""
        if link.gone is None and (frame := link.reader.frame) is not None:
            targets = link.inbox.drain(frame, link.reader.wanted)
            if targets is not None:
                link.reader.redirect(targets)
                self._wake.set()  # the refusal waits to be sent

    def _lose(self, link: Link, reason: str) -> None:
        """The peer is gone: end all its links and posts, once."""
        if link.gone is not None:
            return
        for one in [one for one in self._live if one.peer == link.peer]:
            one.gone = reason
            self._live.remove(one)
            self._selector.unregister(one.sock)
            self._discard(one, reason)
        self._emit(PeerGone(link.peer, reason))

    def _discard(self, link: Link, reason: str) -> None:
        link.close()
        for post in link.outbox.open.values():
            self._over(post)
            self._emit(Dropped(post.id, link.peer, post.tag, reason))
        link.outbox = Outbox()
        self._forget(link)

    def _emit(self, event: TransportEvent) -> None:
        self._events.append(event)
        self._news.set()

    def _shut(self, reason: str) -> None:
        """The thread ends: the owner finds Dropped for every open post, and PeerGone if it was not its own wish."""
        wished = self._failure is None
        for link in self._links.values():
            link.gone = link.gone or reason  # so that commands not yet run end at once
        for link in list(self._live):
            self._discard(link, reason)
            if not wished:
                self._emit(PeerGone(link.peer, reason))
        self._live.clear()
        self._run_commands()
        self._greetings.close()
        self._selector.close()
