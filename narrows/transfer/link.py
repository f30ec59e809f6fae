"""One connection to one peer, as the I/O thread sees it."""

import socket
from collections.abc import Sequence

from narrows.errors import TransportError
from narrows.transfer.base import PeerName
from narrows.transfer.frames import Buffer
from narrows.transfer.inbox import Inbox
from narrows.transfer.outbox import Outbox
from narrows.transfer.stream import FrameReader, skip

_MAX_SEGMENTS = 1024  # the kernel's limit for one call


class Link:
    """Socket, queues and clocks. `gone` is the reason once the peer is lost; any thread may read it."""

    inbox: Inbox
    reader: FrameReader

    def __init__(self, sock: socket.socket, peer: PeerName, now: float) -> None:
        self.sock = sock
        self.peer = peer
        self.outbox = Outbox()
        self.unsent: Sequence[Buffer] = ()  # rest of what was begun; must leave before anything else
        self.wants_write = False  # the selector watches for room in the socket
        self.last_heard = now
        self.last_sent = now
        self.last_turn = now
        self.gone: str | None = None

    def attach(self, inbox: Inbox, reader: FrameReader) -> None:
        self.inbox = inbox
        self.reader = reader

    def flush(self) -> None:
        """Send as much of `unsent` as the socket takes. Raises OSError when the connection is broken."""
        num_bytes = sum(map(len, self.unsent))
        try:
            sent = self.sock.sendmsg(self.unsent[:_MAX_SEGMENTS])
        except BlockingIOError:
            return
        if sent == num_bytes:
            self.unsent = ()
        else:
            self.unsent = skip([memoryview(buffer) for buffer in self.unsent], sent)

    def receive(self) -> bool:
        """One read. Returns whether more may be there; raises BlockingIOError when nothing is, OSError on a broken
        connection, TransportError on its end or on bytes that are no frames."""
        buffers = self.reader.buffers()[:_MAX_SEGMENTS]
        received = self.sock.recvmsg_into(buffers)[0]
        if not received:
            raise TransportError("the connection was closed by the other side")
        self.reader.advance(received)
        return received == sum(map(len, buffers))
