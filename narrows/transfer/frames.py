"""What travels on a stream between two transports.

    head (fixed) | request, UTF-8 | rows | payload

Rows are (offset, length) of int64 for DATA, (region, offset, length) for PUT and END, whose payload is the puts'
bytes in order, then END's note. All integers are little-endian. The head, request and rows are covered by `head_crc`,
so bytes that are not frames are noticed; `payload_crc` counts when CHECKED is set.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from narrows.errors import TransportError
from narrows.transfer.base import Tag

MAGIC = 0x3157524E  # "NRW1"
MAX_REQUEST_BYTES = 1024
MAX_ROWS = 512  # below the kernel's limit of 1,024 segments a call
MAX_PAYLOAD_BYTES = 64 << 20  # a longer one is not a frame of ours
MAX_MESSAGE_BYTES = 1 << 20

CHECKED = 1  # payload_crc is set
MORE = 2  # MESSAGE: another part follows

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Frame kinds and what `post` and `value` mean in them."""

    DATA = 1  # value: token of the target region
    PUT = 2  # literal writes, all data of the post having gone before
    END = 3  # literal writes and the note; value: bytes of the whole post
    ABORT = 4  # nothing more of this post follows
    ACK = 5  # answer to END or ABORT, or a refusal; payload: the error, empty if the post has landed
    MESSAGE = 6  # value: priority class
    HEARTBEAT = 7
    REGION_REQUEST = 8  # value: token of a region to be mapped
    REGION = 9  # value: token; post: its size, 0 if unknown; a descriptor travels with it


class Head(NamedTuple):
    """The fixed part of a frame."""

    magic: int
    kind: int
    flags: int
    request_bytes: int
    row_bytes: int
    payload_bytes: int
    layer: int
    generation: int
    post: int
    value: int
    payload_crc: int
    head_crc: int


_HEAD = struct.Struct("<IBBHIIiqqQII")
DATA_ROW = struct.Struct("<qq")  # offset, length
PUT_ROW = struct.Struct("<qqq")  # region token, offset, length
_CRC_BYTES = 4
HEAD_BYTES = _HEAD.size
MAX_HEAD_BYTES = HEAD_BYTES + MAX_REQUEST_BYTES + MAX_ROWS * PUT_ROW.size


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed head with what follows it, payload aside."""

    head: Head
    tag: Tag
    rows: bytes


NO_TAG = Tag(request="", generation=0, layer=0)


def pack_head(
    kind: Kind,
    *,
    tag: Tag = NO_TAG,
    post: int = 0,
    value: int = 0,
    rows: bytes = b"",
    payload: Sequence[Buffer] = (),
    flags: int = 0,
    checksum: bool = False,
) -> bytes:
    """Head, request and rows of a frame whose payload is `payload`, to be sent right after."""
    request = tag.request.encode()
    crc = 0
    if checksum and payload:
        flags |= CHECKED
        for part in payload:
            crc = zlib.crc32(part, crc)
    num_bytes = sum(map(len, payload))
    fixed = _HEAD.pack(
        MAGIC,
        kind,
        flags,
        len(request),
        len(rows),
        num_bytes,
        tag.layer,
        tag.generation,
        post,
        value,
        crc,
        0,
    )
    head_crc = zlib.crc32(rows, zlib.crc32(request, zlib.crc32(fixed[:-_CRC_BYTES])))
    return b"".join((fixed[:-_CRC_BYTES], head_crc.to_bytes(_CRC_BYTES, "little"), request, rows))


def parse_head(data: memoryview) -> Frame | None:
    """The frame head at the start of `data`, or None while it is incomplete.

    Raises TransportError when the bytes can not be a frame.
    """
    if len(data) < HEAD_BYTES:
        return None
    head = Head._make(_HEAD.unpack_from(data))
    if head.magic != MAGIC:
        raise TransportError("the peer sent bytes that are not a frame")
    rows_at = HEAD_BYTES + head.request_bytes
    end = rows_at + head.row_bytes
    if end > MAX_HEAD_BYTES or head.payload_bytes > MAX_PAYLOAD_BYTES:
        raise TransportError("the peer sent a frame beyond the size limits")
    if len(data) < end:
        return None
    if zlib.crc32(data[HEAD_BYTES:end], zlib.crc32(data[: HEAD_BYTES - _CRC_BYTES])) != head.head_crc:
        raise TransportError("the peer sent a frame head with a wrong checksum")
    try:
        request = str(data[HEAD_BYTES:rows_at], "utf-8")
    except UnicodeDecodeError as error:
        raise TransportError("the peer sent a request name that is not UTF-8") from error
    return Frame(head, Tag(request, head.generation, head.layer), bytes(data[rows_at:end]))


def head_bytes(frame: Frame) -> int:
    """Bytes of the frame before its payload."""
    return HEAD_BYTES + frame.head.request_bytes + frame.head.row_bytes
