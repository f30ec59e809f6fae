"""One connection to one peer, as the I/O thread sees it."""

import os
import socket
import sys
from collections import deque
from collections.abc import Sequence

from narrows.errors import TransportError
from narrows.transfer.base import PeerName
from narrows.transfer.frames import Buffer
from narrows.transfer.inbox import Inbox
from narrows.transfer.outbox import Outbox
from narrows.transfer.shaping import Pace
from narrows.transfer.stream import FrameReader, skip

_MAX_SEGMENTS = 1024  # the kernel's limit for one call
_ANCILLARY_BYTES = socket.CMSG_SPACE(8 * 4)  # of eight descriptors


class Link:
    """Socket, queues and clocks. `gone` is the reason once the peer is lost; any thread may read it."""

    inbox: Inbox
    reader: FrameReader

    def __init__(self, sock: socket.socket, peer: PeerName, now: float, pace: Pace, *, dialed: bool) -> None:
        self.sock = sock
        self.peer = peer
        self.outbox = Outbox()
        self.unsent: Sequence[Buffer] = ()  # rest of what was begun; must leave before anything else
        self.wants_write = False  # the selector watches for room in the socket
        self.last_heard = now
        self.last_sent = now
        self.last_turn = now
        self.pace = pace
        self.dialed = dialed
        self.gone: str | None = None
        self.passing: int | None = None  # descriptor to go with the first byte of `unsent`
        self.descriptors: deque[int] = deque()  # received and not yet claimed; ours to close

    def attach(self, inbox: Inbox, reader: FrameReader) -> None:
        self.inbox = inbox
        self.reader = reader

    def flush(self) -> None:
        """Send as much of `unsent` as the socket takes. Raises OSError when the connection is broken."""
        num_bytes = sum(map(len, self.unsent))
        try:
            sent = self.sock.sendmsg(self.unsent[:_MAX_SEGMENTS], self._ancillary())
        except BlockingIOError:
            return
        self.passing = None
        self.pace.count(sent)
        if sent == num_bytes:
            self.unsent = ()
        else:
            self.unsent = skip([memoryview(buffer) for buffer in self.unsent], sent)

    def receive(self) -> bool:
        """One read. Returns whether more may be there; raises BlockingIOError when nothing is, OSError on a broken
        connection, TransportError on its end or on bytes that are no frames."""
        buffers = self.reader.buffers()[:_MAX_SEGMENTS]
        if self.sock.family == socket.AF_UNIX:
            received, ancillary, _, _ = self.sock.recvmsg_into(buffers, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self.descriptors.extend(memoryview(data).cast("i").tolist())
        else:
            received = self.sock.recvmsg_into(buffers)[0]
        if not received:
            raise TransportError("the connection was closed by the other side")
        self.reader.advance(received)
        return received == sum(map(len, buffers))

    def close(self) -> None:
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _ancillary(self) -> list[tuple[int, int, bytes]]:
        if self.passing is None:
            return []
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self.passing.to_bytes(4, sys.byteorder))]
