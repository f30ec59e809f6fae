"""What arrives from one peer: checked before a byte is written, answered when a post has ended.

A refused post is drained: the answer goes back at once, its later frames go nowhere, and its END or ABORT closes it.
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from narrows.errors import TransportError
from narrows.transfer.base import Arrived, Message, PeerName, Priority, TransportEvent, TransportStats
from narrows.transfer.frames import CHECKED, DATA_ROW, MAX_MESSAGE_BYTES, MORE, PUT_ROW, Frame, Kind, pack_head
from narrows.transfer.memory import RegionTable, Revocations, misfit

_SUMP_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Target:
    """What all links of one transport share on the receiving side."""

    regions: RegionTable
    revoked: Revocations
    stats: TransportStats
    emit: Callable[[TransportEvent], None]


class Inbox:
    """The FrameSink of one peer. `reply` queues a control frame to it, `answer` takes frames about our own posts."""

    def __init__(
        self,
        peer: PeerName,
        target: Target,
        reply: Callable[[bytes], None],
        answer: Callable[[Frame, bytes], None],
    ) -> None:
        self._peer = peer
        self._target = target
        self._reply = reply
        self._answer = answer
        self._refused: set[int] = set()  # posts whose frames are drained
        self._parts: dict[int, bytearray] = {}  # messages partly here, by class
        self._payload: list[memoryview] = []  # of the frame begun last
        self._staging = b""  # the same, where it does not go to a region
        self._sump: memoryview | None = None

    def begin(self, frame: Frame) -> list[memoryview]:
        size = frame.head.payload_bytes
        if frame.head.kind == Kind.DATA:
            self._payload = self._open_data(frame)
        elif size > MAX_MESSAGE_BYTES and frame.head.kind == Kind.MESSAGE:
            raise TransportError(f"the peer sent a message of {size} bytes")
        else:
            self._payload = [memoryview(bytearray(size))]
        return self._payload

    def finish(self, frame: Frame) -> None:
        head = frame.head
        payload, self._payload = self._payload, []
        intact = not head.flags & CHECKED or _crc(payload) == head.payload_crc
        match head.kind:
            case Kind.DATA:
                if head.post not in self._refused and not intact:
                    self._refuse(frame, "a data frame arrived with a wrong checksum")
            case Kind.PUT | Kind.END:
                self._close(frame, payload[0], intact)
            case Kind.ABORT:
                if head.post in self._refused:
                    self._refused.discard(head.post)
                else:
                    self._acknowledge(frame, "cancelled")
            case Kind.MESSAGE:
                if not intact:
                    raise TransportError("a message arrived with a wrong checksum")
                self._take_message(frame, payload[0])
            case Kind.ACK | Kind.REGION | Kind.REGION_REQUEST:
                self._answer(frame, bytes(payload[0]))
            case Kind.HEARTBEAT:
                pass
            case _:
                raise TransportError(f"the peer sent a frame of unknown kind {head.kind}")

    def drain(self, frame: Frame, num_bytes: int) -> list[memoryview] | None:
        """Where the rest of a begun data frame goes now that its attempt is revoked; None when it may go on."""
        head = frame.head
        if head.kind != Kind.DATA or head.post in self._refused:
            return None
        if not self._target.revoked.covers(frame.tag.request, head.generation):
            return None
        self._refuse(frame, _REVOKED)
        return self._drained(num_bytes)

    def _open_data(self, frame: Frame) -> list[memoryview]:
        head = frame.head
        if head.post in self._refused:
            self._target.stats.refused_frames += 1
            return self._drained(head.payload_bytes)
        buffer = self._target.regions.find(head.value)
        rows = list(_unpack(DATA_ROW, frame.rows))
        if sum(length for _, length in rows) != head.payload_bytes:
            raise TransportError("the peer sent a data frame whose rows do not add up")
        error = _REVOKED if self._target.revoked.covers(frame.tag.request, head.generation) else None
        error = error or _first_misfit(buffer, rows)
        if error or buffer is None:
            self._refuse(frame, error or "the target region is unknown here")
            return self._drained(head.payload_bytes)
        return [buffer[offset : offset + length] for offset, length in rows]

    def _close(self, frame: Frame, payload: memoryview, intact: bool) -> None:
        """Apply puts; with an END also report the arrival."""
        head = frame.head
        ends = head.kind == Kind.END
        if head.post in self._refused:
            self._target.stats.refused_frames += 1
            if ends:
                self._refused.discard(head.post)
            return
        writes, note, error = self._resolve(frame, payload)
        if not intact:
            error = "a trailing write arrived with a wrong checksum"
        if self._target.revoked.covers(frame.tag.request, head.generation):
            error = _REVOKED
        if error:
            self._refuse(frame, error)
            if ends:
                self._refused.discard(head.post)
            return
        for place, data in writes:
            place[:] = data
        if ends:
            self._target.stats.received_bytes += head.value
            self._target.emit(Arrived(self._peer, frame.tag, note, head.value))
            self._acknowledge(frame, "")

    def _resolve(
        self, frame: Frame, payload: memoryview
    ) -> tuple[list[tuple[memoryview, memoryview]], bytes, str | None]:
        """The puts of a frame as (place, bytes), the note behind them, and what is wrong with them."""
        writes: list[tuple[memoryview, memoryview]] = []
        at = 0
        for token, offset, length in _unpack(PUT_ROW, frame.rows):
            buffer = self._target.regions.find(token)
            error = misfit(buffer, offset, length)
            if error or buffer is None:
                return [], b"", error or "the target region is unknown here"
            writes.append((buffer[offset : offset + length], payload[at : at + length]))
            at += length
        if at > len(payload):
            raise TransportError("the peer sent a frame of trailing writes whose rows do not add up")
        return writes, bytes(payload[at:]), None

    def _take_message(self, frame: Frame, payload: memoryview) -> None:
        whole = self._parts.setdefault(frame.head.value, bytearray())
        whole += payload
        if len(whole) > MAX_MESSAGE_BYTES or frame.head.value not in list(Priority):
            raise TransportError("the peer sent a message that is too long or of no class")
        if not frame.head.flags & MORE:
            del self._parts[frame.head.value]
            self._target.stats.received_bytes += len(whole)
            self._target.emit(Message(self._peer, bytes(whole)))

    def _refuse(self, frame: Frame, error: str) -> None:
        self._target.stats.refused_frames += 1
        self._refused.add(frame.head.post)
        self._acknowledge(frame, error)

    def _acknowledge(self, frame: Frame, error: str) -> None:
        payload = error.encode()
        self._reply(pack_head(Kind.ACK, tag=frame.tag, post=frame.head.post, payload=(payload,)) + payload)

    def _drained(self, num_bytes: int) -> list[memoryview]:
        if self._sump is None:
            self._sump = memoryview(bytearray(_SUMP_BYTES))
        whole, rest = divmod(num_bytes, _SUMP_BYTES)
        return [self._sump] * whole + [self._sump[:rest]]


_REVOKED = "the target has revoked this attempt"


def _unpack(row: struct.Struct, rows: bytes) -> Iterator[tuple[int, ...]]:
    if len(rows) % row.size:
        raise TransportError("the peer sent a frame with a broken table")
    return row.iter_unpack(rows)


def _first_misfit(buffer: memoryview | None, rows: list[tuple[int, ...]]) -> str | None:
    size = -1 if buffer is None else len(buffer)
    for offset, length in rows:
        if offset < 0 or length < 0 or offset + length > size:
            return misfit(buffer, offset, length)
    return None


def _crc(parts: list[memoryview]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc
