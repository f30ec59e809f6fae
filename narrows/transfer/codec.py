"""Messages as bytes: the dataclasses of core.wire as MessagePack with their type's name, checked when decoded."""

import msgspec

from narrows.core import wire
from narrows.core.wire import BetweenInstances, ToCoordinator, ToInstance
from narrows.errors import TransportError

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
    """Type name, a zero byte, then the fields as MessagePack."""
    return type(message).__name__.encode() + b"\0" + msgspec.msgpack.encode(message)


def decode(frame: bytes) -> ToInstance | ToCoordinator | BetweenInstances:
    """The reverse of encode. Raises TransportError on what is not a message of ours."""
    name, _, body = frame.partition(b"\0")
    try:
        return msgspec.msgpack.decode(body, type=_TYPES[name.decode()])
    except (KeyError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise TransportError(f"not a message: {error}") from error
