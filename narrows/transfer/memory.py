"""Memory that peers write to, and who may."""

import mmap
import secrets
from collections import OrderedDict

from narrows.core.plan import RegionKey
from narrows.errors import TransportError
from narrows.transfer.base import Region

_MAX_REVOKED = 65536  # requests remembered; the oldest is forgotten first, long after its last frame


def check_size(num_bytes: int) -> None:
    if num_bytes <= 0:
        raise ValueError(f"allocate: num_bytes must be positive, got {num_bytes}")


def allocate_private(num_bytes: int) -> memoryview:
    """Zeroed, page-aligned memory of this process; freed when its last view is gone."""
    check_size(num_bytes)
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class RegionTable:
    """The registered regions of one transport, by token: random, so that a key of another incarnation finds none."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._buffers: dict[int, memoryview] = {}

    def add(self, buffer: memoryview) -> Region:
        token = secrets.randbits(63)
        self._buffers[token] = buffer
        return Region(RegionKey(self._kind, f"{token:x}", len(buffer)), buffer)

    def clear(self) -> None:
        """Forget all; memory that nobody has a view of is freed."""
        self._buffers.clear()

    def find(self, token: int) -> memoryview | None:
        return self._buffers.get(token)


def token_of(key: RegionKey, kind: str) -> int:
    """The key's token as a number. Raises TransportError for a key that another kind of transport made."""
    if key.transport != kind:
        raise TransportError(f"region key of a {key.transport} transport used on a {kind} one")
    try:
        token = int(key.token, 16)
    except ValueError:
        token = -1
    if not 0 <= token < 1 << 63:
        raise TransportError(f"region key with a malformed token {key.token!r}")
    return token


def misfit(buffer: memoryview | None, offset: int, num_bytes: int) -> str | None:
    """Why a write of `num_bytes` at `offset` can not be done in this region; None when it can."""
    if buffer is None:
        return "the target region is unknown here"
    if offset < 0 or num_bytes < 0 or offset + num_bytes > len(buffer):
        return f"bytes {offset} to {offset + num_bytes} lie outside the target region of {len(buffer)} bytes"
    return None


class Revocations:
    """Attempts that may not write any more: of each request all generations up to the highest revoked one."""

    def __init__(self) -> None:
        self._highest: OrderedDict[str, int] = OrderedDict()

    def add(self, request: str, generation: int) -> None:
        self._highest[request] = max(generation, self._highest.get(request, generation))
        self._highest.move_to_end(request)
        if len(self._highest) > _MAX_REVOKED:
            self._highest.popitem(last=False)

    def covers(self, request: str, generation: int) -> bool:
        highest = self._highest.get(request)
        return highest is not None and generation <= highest
