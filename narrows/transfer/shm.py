"""Shared memory on one machine: the source writes into the target's region, frames without data go by a unix socket.

    source                                 target
    REGION_REQUEST token          ->
                                  <-       REGION token, size + the region's descriptor (SCM_RIGHTS)
    copies blocks into its mapping of it
    PUT, END                      ->       trailing writes are applied here, so a revoked attempt's never are
                                  <-       ACK

Regions are memfds and sockets have abstract names: nothing is in the file system, so nothing can be left there.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
import warnings
from dataclasses import dataclass

import numpy as np

from narrows.errors import ConfigError, TransportError
from narrows.transfer.base import Region, TransportConfig
from narrows.transfer.engine import Engine
from narrows.transfer.frames import Frame, Kind, pack_head
from narrows.transfer.link import Link
from narrows.transfer.memory import check_size, token_of
from narrows.transfer.outbox import Item, OutPost
from narrows.transfer.runs import Ints

_BACKLOG = 128
_FRAME_BYTES = 256 * 1024  # copied between two looks for commands: some tens of microseconds
_COPY_BYTES = 1 << 20  # copied between two looks at the sockets
_UCRED = struct.Struct("iII")  # pid, uid, gid

_memmove = ctypes.CDLL(None).memmove  # releases the GIL, which slice assignment does not
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A peer's region in this process."""

    memory: mmap.mmap
    address: int


@dataclass(frozen=True, slots=True)
class _Moves:
    """A post's pieces as addresses."""

    targets: Ints
    sources: Ints
    lengths: Ints


class ShmTransport(Engine):
    """Addresses are `@` and an abstract socket name."""

    kind = "shm"

    def __init__(self, config: TransportConfig) -> None:
        if not hasattr(os, "memfd_create"):
            raise ConfigError("transport: shm needs Linux (memfd); use tcp here")
        if config.checksums:
            warnings.warn("transport shm: checksums cover trailing writes and messages, not blocks", stacklevel=2)
        self._descriptors: dict[int, int] = {}  # own regions' memfds, by token
        self._mappings: dict[Link, dict[int, _Mapping]] = {}
        self._requested: dict[Link, set[int]] = {}
        self._moves: dict[OutPost, _Moves] = {}
        super().__init__(config)

    def allocate(self, num_bytes: int) -> Region:
        self._require_open()
        check_size(num_bytes)
        descriptor = os.memfd_create("narrows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, num_bytes)
            # a peer that could shrink it would make every reader of the region die of SIGBUS
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            region = self._regions.add(memoryview(mmap.mmap(descriptor, num_bytes)))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptors[token_of(region.key, self.kind)] = descriptor
        return region

    def close(self) -> None:
        super().close()
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _listen(self) -> tuple[socket.socket, str]:
        name = f"narrows-{os.getpid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}")
        listener.listen(_BACKLOG)
        return listener, f"@{name}"

    def _dial(self, address: str, timeout_s: float) -> socket.socket:
        if not address.startswith("@"):
            raise TransportError(f"address {address!r} is not one of a shm transport")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(f"\0{address[1:]}")
        except OSError:
            sock.close()
            raise
        return sock

    def _tune(self, sock: socket.socket) -> None:
        _, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if uid != os.geteuid():
            raise TransportError(f"the other side runs as user {uid}, this side as {os.geteuid()}")

    def _queue(self, link: Link, item: Item) -> None:
        super()._queue(link, item)
        if not isinstance(item, OutPost) or not item.at_data:
            return
        if item.region in self._mappings.setdefault(link, {}):
            self._prepare(link, item)
            return
        item.waits = True
        requested = self._requested.setdefault(link, set())
        if item.region not in requested:
            requested.add(item.region)
            link.outbox.control.append(pack_head(Kind.REGION_REQUEST, value=item.region))

    def _on_region(self, link: Link, frame: Frame) -> None:
        token = frame.head.value
        if frame.head.kind == Kind.REGION_REQUEST:
            self._give_region(link, token)
            return
        size = frame.head.post
        descriptor = link.descriptors.popleft() if size > 0 and link.descriptors else None
        try:
            if token in self._requested.get(link, ()):
                self._requested[link].discard(token)
                self._take_region(link, token, size, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _give_region(self, link: Link, token: int) -> None:
        buffer, descriptor = self._regions.find(token), self._descriptors.get(token)
        if buffer is None or descriptor is None:
            link.outbox.control.append(pack_head(Kind.REGION, value=token))
        else:
            link.outbox.passing.append((pack_head(Kind.REGION, value=token, post=len(buffer)), descriptor))

    def _take_region(self, link: Link, token: int, size: int, descriptor: int | None) -> None:
        waiting = link.outbox.waiting_for(token)
        if descriptor is None:
            for post in waiting:
                self._ended(link, post.id, "the target region is unknown here")
            return
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(descriptor).st_size < size:
            raise TransportError("the peer shared memory that is smaller than it said, or may shrink")
        memory = mmap.mmap(descriptor, size)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        self._mappings.setdefault(link, {})[token] = _Mapping(memory, address)
        for post in waiting:
            post.waits = False
            self._prepare(link, post)

    def _prepare(self, link: Link, post: OutPost) -> None:
        """Turn a post's pieces into addresses; one that does not fit its region ends here."""
        mapping = self._mappings[link][post.region]
        pieces = post.pieces
        size = len(mapping.memory)
        outside = np.flatnonzero((pieces.targets < 0) | (pieces.targets > size - pieces.lengths))
        if len(outside):
            at, length = int(pieces.targets[outside[0]]), int(pieces.lengths[outside[0]])
            self._ended(link, post.id, f"bytes {at} to {at + length} lie outside the target region of {size} bytes")
            return
        bases = np.array([np.frombuffer(buffer, np.uint8).ctypes.data for buffer in post.buffers], dtype=np.int64)
        self._moves[post] = _Moves(
            pieces.targets + mapping.address, pieces.sources + bases[pieces.buffers], pieces.lengths
        )

    def _move(self, link: Link, item: Item) -> None:
        if isinstance(item, OutPost) and item.at_data:
            self._copy(link, item)
        else:
            self._transmit(link, item)

    def _copy(self, link: Link, post: OutPost) -> None:
        """Copy blocks until something new is to be done, a shaped link's next block must wait, or it is time to look
        at the sockets."""
        moves = self._moves[post]
        limit = 0 if self._bucket is not None else _FRAME_BYTES
        copied = 0
        while True:
            low, high, num_bytes = post.take_pieces(limit)
            for target, source, length in zip(
                moves.targets[low:high].tolist(),
                moves.sources[low:high].tolist(),
                moves.lengths[low:high].tolist(),
                strict=True,
            ):
                _memmove(target, source, length)
            copied += num_bytes
            link.outbox.advance(post, num_bytes)
            if not post.at_data or self._bucket is not None or self._commands or copied >= _COPY_BYTES:
                break
        self._account(link, copied, post.priority)

    def _over(self, post: OutPost) -> None:
        self._moves.pop(post, None)

    def _forget(self, link: Link) -> None:
        self._mappings.pop(link, None)
        self._requested.pop(link, None)
