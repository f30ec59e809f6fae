"""Transports under test, and waiting for what they report: shared by the tests of narrows.transfer."""

import select
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.core.plan import RegionKey
from narrows.transfer.base import (
    Copy,
    Offsets,
    Post,
    Priority,
    Put,
    Region,
    Tag,
    Transport,
    TransportConfig,
    TransportEvent,
)
from narrows.transfer.loopback import LoopbackHub
from narrows.transfer.registry import open_transport

WAIT_S = 30.0  # longer than anything takes; a test that waits this long has failed
SLOW_GBPS = 0.02  # 64 KiB take 26 ms: a post of some blocks can be caught under way
Bytes = npt.NDArray[np.uint8]
Kinds = type | tuple[type, ...]
TAG = Tag("request-7", 3, 5)


class World:
    """Transports of one kind, all closed at the end. `slow` ones hold a post under way until it is waited for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.hub = LoopbackHub() if kind in ("null", "loopback") else None
        self.transports: list[Transport] = []
        self.seen: dict[str, list[TransportEvent]] = {}

    def open(self, name: str, *, slow: bool = False, **settings: Any) -> Transport:
        if slow and self.hub is not None:
            self.hub.pause()
        elif slow:
            settings["link_gbps"] = SLOW_GBPS
        transport = open_transport(self.kind, TransportConfig(name, **settings), hub=self.hub)
        self.transports.append(transport)
        self.seen[name] = []
        return transport

    def wait(self, transport: Transport, kind: Kinds, number: int = 1) -> list[Any]:
        """Collect events of all transports until `transport` has reported `number` of a kind; those, in order."""
        deadline = time.monotonic() + WAIT_S
        while len(found := self.found(transport, kind)) < number:
            assert time.monotonic() < deadline, f"no {kind}; {transport.name} reported {self.seen}"
            if self.hub is not None:
                self.hub.step()
            waiting = [one for one in self.transports if one.fileno() >= 0]
            select.select(waiting, [], [], 0.0 if self.hub else 1.0)
            self.collect()
        return found

    def collect(self) -> None:
        for transport in self.transports:
            self.seen[transport.name].extend(transport.poll())

    def found(self, transport: Transport, kind: Kinds) -> list[Any]:
        return [event for event in self.seen[transport.name] if isinstance(event, kind)]

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


def array(region: Region) -> Bytes:
    return np.frombuffer(region.buffer, dtype=np.uint8)


def fill(region: Region, seed: int) -> Bytes:
    """Random bytes into a region; returns a copy of them."""
    data = np.random.default_rng(seed).integers(1, 256, len(region.buffer), dtype=np.uint8)
    array(region)[:] = data
    return data


def offsets(values: Sequence[int] | npt.NDArray[np.int64]) -> Offsets:
    return np.asarray(values, dtype=np.int64)


def whole(source: Region) -> Copy:
    """All of a region to the same place."""
    return Copy(source, offsets([0]), offsets([0]), offsets([len(source.buffer)]))


def post_of(
    target: RegionKey,
    *copies: Copy,
    tag: Tag = TAG,
    priority: Priority = Priority.PROACTIVE,
    trailing: tuple[Put, ...] = (),
    note: bytes = b"",
) -> Post:
    return Post(tag, priority, target, copies, trailing, note)
