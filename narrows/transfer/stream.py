"""Incremental reading of frames: payload goes straight into where it belongs.

    while connected:
        received = socket.recvmsg_into(reader.buffers())
        reader.advance(received)        # calls sink.begin and sink.finish

One read takes the rest of a payload and the head of the next frame, so a stream of data frames costs one call each.
"""

from collections.abc import Sequence
from typing import Protocol

from narrows.transfer.frames import MAX_HEAD_BYTES, Frame, head_bytes, parse_head

_SCRATCH_BYTES = 2 * MAX_HEAD_BYTES
_BETWEEN_BYTES = 4096  # read ahead between frames: many small frames at once, and little payload to copy on
_AFTER_BYTES = 512  # read ahead behind a payload: the head of a usual data frame


class FrameSink(Protocol):
    """What takes the frames of one peer."""

    def begin(self, frame: Frame) -> list[memoryview]:
        """Where the payload goes: writable, together `payload_bytes` long. Raises TransportError to end the link."""
        ...

    def finish(self, frame: Frame) -> None:
        """The payload is there."""
        ...


class FrameReader:
    """The state of one incoming stream."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._have = 0  # bytes in scratch that are not parsed
        self._frame: Frame | None = None  # whose payload is being received
        self._targets: list[memoryview] = []  # what is left of it
        self._wanted = 0  # bytes left of it

    @property
    def frame(self) -> Frame | None:
        """The frame whose payload is partly here, if any."""
        return self._frame

    def buffers(self) -> list[memoryview]:
        """Where the next received bytes go, in order."""
        if self._frame is not None:
            return [*self._targets, self._scratch[:_AFTER_BYTES]]
        # an incomplete head needs room up to its largest size
        room = _BETWEEN_BYTES if self._have < _BETWEEN_BYTES // 2 else _SCRATCH_BYTES
        return [self._scratch[self._have : room]]

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more have been written to buffers(), which is void now. Raises TransportError on a bad stream."""
        if self._frame is None:
            self._have += num_bytes
        elif num_bytes < self._wanted:
            self._wanted -= num_bytes
            self._targets = _skip(self._targets, num_bytes)
            return
        else:
            self._have = num_bytes - self._wanted
            self._complete(self._frame)
        self._parse()

    def redirect(self, targets: list[memoryview]) -> None:
        """Send the rest of the current payload elsewhere: `targets` must hold as much as is wanted."""
        assert sum(map(len, targets)) == self._wanted
        self._targets = targets

    @property
    def wanted(self) -> int:
        """Bytes left of the current payload."""
        return self._wanted

    def _complete(self, frame: Frame) -> None:
        self._frame = None
        self._targets = []
        self._wanted = 0
        self._sink.finish(frame)

    def _parse(self) -> None:
        at = 0
        while (frame := parse_head(self._scratch[at : self._have])) is not None:
            at += head_bytes(frame)
            targets = self._sink.begin(frame)
            size = frame.head.payload_bytes
            here = min(size, self._have - at)
            _scatter(self._scratch[at : at + here], targets)
            at += here
            if here < size:
                self._frame = frame
                self._targets = _skip(targets, here)
                self._wanted = size - here
                self._have = 0
                return
            self._sink.finish(frame)
        rest = self._have - at
        if at and rest:
            self._scratch[:rest] = bytes(self._scratch[at : self._have])
        self._have = rest


def _skip(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """The buffers without their first `num_bytes`."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []


def _scatter(data: memoryview, targets: Sequence[memoryview]) -> None:
    """Copy `data` into the first bytes of `targets`."""
    at = 0
    for target in targets:
        if at == len(data):
            return
        size = min(len(target), len(data) - at)
        target[:size] = data[at : at + size]
        at += size


skip = _skip
