"""Messages as bytes: the dataclasses of core.wire as MessagePack with their type's name, checked when decoded."""

import zlib

import msgspec

from narrows.core import wire
from narrows.core.wire import BetweenInstances, ToCoordinator, ToInstance
from narrows.errors import TransportError

_CRC_BYTES = 4

_TYPES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        wire.Reserve,
        wire.Prefill,
        wire.Push,
        wire.Release,
        wire.Shutdown,
        wire.Ready,
        wire.Progress,
        wire.Heartbeat,
        wire.Traced,
        wire.Refused,
        wire.Adopt,
        wire.HandOver,
        wire.Fetch,
        wire.Fetched,
        wire.Refusal,
        wire.Grant,
        wire.Settled,
    )
}


def encode(message: ToInstance | ToCoordinator | BetweenInstances) -> bytes:
    """A checksum, the type's name, a zero byte, then the fields as MessagePack."""
    body = type(message).__name__.encode() + b"\0" + msgspec.msgpack.encode(message)
    return zlib.crc32(body).to_bytes(_CRC_BYTES, "little") + body


def decode(frame: bytes) -> ToInstance | ToCoordinator | BetweenInstances:
    """The reverse of encode. Raises TransportError on what is not a message of ours, or damaged: a list of entries
    with one wrong bit would be answered with other entries."""
    body = frame[_CRC_BYTES:]
    if zlib.crc32(body).to_bytes(_CRC_BYTES, "little") != frame[:_CRC_BYTES]:
        raise TransportError("not a message, or a damaged one: its checksum is wrong")
    name, _, fields = body.partition(b"\0")
    try:
        return msgspec.msgpack.decode(fields, type=_TYPES[name.decode()])
    except (KeyError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise TransportError(f"not a message: {error}") from error
