"""The thread of a socket transport: it owns all links, sends what waits and takes what arrives.

    owner thread --commands--> _run_commands    _send     one frame at a time, most urgent first, if tokens allow
                               _select          _receive  frames into regions, under the receive lock
    owner thread <--events--   _emit            _check    heartbeats, silence

Commands and events are deques, whose append and popleft are atomic. Subclasses say how to listen (`_listen`) and may
change how a block of data moves (`_move`).
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

from narrows.errors import TransportError
from narrows.transfer.base import (
    Done,
    Dropped,
    PeerGone,
    PeerName,
    PostId,
    Priority,
    TransportConfig,
    TransportEvent,
    TransportStats,
)
from narrows.transfer.frames import Buffer, Frame, Kind, pack_head
from narrows.transfer.greeting import Greetings
from narrows.transfer.handshake import Identity
from narrows.transfer.inbox import Inbox, Target
from narrows.transfer.link import Link
from narrows.transfer.memory import RegionTable, Revocations
from narrows.transfer.outbox import Item, Outbox, OutPost
from narrows.transfer.shaping import Pace, bucket_for
from narrows.transfer.signal import Signal
from narrows.transfer.stream import FrameReader

_FRAMES_PER_TURN = 16  # sent before the thread looks at what has arrived
_READS_PER_TURN = 8  # of one peer, before the others' turn
_PRECISE_S = 0.005  # shorter waits need better than epoll's millisecond
_CHECKS_PER_SILENCE = 8
_log = logging.getLogger(__name__)


class IoLoop:
    """What runs in the I/O thread; only `_command` and `_make_link` are for the owner thread too."""

    kind: str

    def __init__(self, config: TransportConfig) -> None:
        self.name = PeerName(config.name)
        self.stats = TransportStats()
        self.config = config
        self._regions = RegionTable(self.kind)
        self._target = Target(self._regions, Revocations(), self.stats, self._emit)
        self._links: dict[PeerName, Link] = {}  # the newest link of each peer, live or gone
        self._addresses: dict[str, PeerName] = {}  # of peers we dialed, or that said where they listen
        self._live: list[Link] = []  # changed by the I/O thread only
        self._commands: deque[Callable[[], None]] = deque()
        self._events: deque[TransportEvent] = deque()
        self._wake = Signal()
        self._news = Signal()
        self._receiving = threading.Lock()  # held while bytes are written to regions
        self._closing = False
        self._ending: str | None = None  # why the thread ends, once it does
        self._failure: BaseException | None = None
        now = time.monotonic()
        self._bucket = bucket_for(config.link_gbps, now)
        self._idle = True  # nothing waited to be sent when last looked
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

    def _tune(self, sock: socket.socket) -> None:
        """Set options of a new link's socket. Raises TransportError to turn the peer away."""

    def _bound_unsent(self, link: Link) -> None:
        """Keep the kernel from taking much more than link.pace.burst_bytes that it can not send at once."""

    def _queue(self, link: Link, item: Item) -> None:
        """an item joins the link's outbox."""
        link.outbox.put(item)

    def _move(self, link: Link, item: Item) -> None:
        """send the next frame of `item`, the head of the link's outbox."""
        self._transmit(link, item)

    def _on_region(self, link: Link, frame: Frame) -> None:
        """a frame about mapping regions."""
        raise TransportError("the peer asks for memory to be shared, which this transport does not do")

    def _over(self, post: OutPost) -> None:
        """a post has ended; release what is kept for it."""

    def _forget(self, link: Link) -> None:
        """a link has ended; release what is kept for it."""

    # ---- the loop

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
                self._idle = not any(link.unsent for link in self._live)
                return None
            link, item = chosen
            if self._bucket is not None:
                if self._idle:
                    self._idle = False
                    self._bucket.rest(time.monotonic())
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

    # ---- links and their posts

    def _make_link(self, sock: socket.socket, identity: Identity, *, dialed: bool) -> Link:
        sock.setblocking(False)
        pace = Pace(self.config.block_bytes, fixed=self._bucket is not None)
        link = Link(sock, PeerName(identity.name), time.monotonic(), pace, dialed=dialed)
        self._bound_unsent(link)
        inbox = Inbox(link.peer, self._target, link.outbox.control.append, partial(self._answered, link))
        link.attach(inbox, FrameReader(inbox))
        # heartbeats must suit the less patient side
        self._check_every_s = min(self._check_every_s, identity.silence_s / _CHECKS_PER_SILENCE)
        current = self._links.get(link.peer)
        if current is None or current.gone is not None:  # else both dialed at once: what is sent stays on one link
            self._links[link.peer] = link
        self._addresses[identity.address] = link.peer
        return link

    def _adopt_accepted(self, sock: socket.socket, identity: Identity) -> None:
        self._tune(sock)
        for link in list(self._live):
            if link.peer == identity.name and not link.dialed:
                self._lose(link, "the peer has connected anew")  # it lost this link before we did
        self._adopt(self._make_link(sock, identity, dialed=False))

    def _adopt(self, link: Link) -> None:
        if link.gone is not None or self._ending is not None:
            link.gone = link.gone or self._ending
            self._discard(link, link.gone or "")
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
        self._ending = reason
        wished = self._failure is None
        for link in list(self._links.values()):
            link.gone = link.gone or reason  # so that commands not yet run end at once
        for link in list(self._live):
            self._discard(link, reason)
            if not wished:
                self._emit(PeerGone(link.peer, reason))
        self._live.clear()
        self._run_commands()
        self._greetings.close()
        self._selector.close()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake.set()
