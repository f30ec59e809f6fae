"""How fast transports move scattered blocks between two processes, beside raw sockets and memcpy in the same run.

    this process, first core                 peer process, second core
    post(blocks at random places)  ------>   region, written at random places
    raw: sendmsg of the same blocks ----->   recvmsg_into of the same places
    memcpy: the same blocks between two private arrays of this process

Rounds of ours and of the reference alternate, and medians are reported, since such machines are noisy.
"""

import contextlib
import ctypes
import multiprocessing
import os
import select
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.bench.results import document
from narrows.core.plan import RegionKey
from narrows.transfer.base import (
    Copy,
    Done,
    Message,
    PeerName,
    Post,
    Priority,
    Region,
    Tag,
    Transport,
    TransportConfig,
)
from narrows.transfer.registry import open_transport

_SEGMENTS = 1024  # the kernel's limit for one call
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Layout:
    """Blocks of one size at random places on both sides."""

    block_bytes: int
    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * len(self.sources)


def make_layout(total_bytes: int, block_bytes: int, seed: int = 0) -> Layout:
    """As many blocks as fit, each once on either side, in random order."""
    rng = np.random.default_rng(seed)
    count = total_bytes // block_bytes
    return Layout(block_bytes, rng.permutation(count) * block_bytes, rng.permutation(count) * block_bytes)


@dataclass(slots=True)
class _Remote:
    """The peer process as this one sees it."""

    pipe: Connection
    address: str
    key: RegionKey
    raw: socket.socket  # to the same process, past the transport
    name: PeerName = field(default=PeerName(""))


@contextlib.contextmanager
def _pinned() -> Iterator[int]:
    """This process on its first core; gives the core for the other side. On one core both measure the scheduler."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield max(cores)
    finally:
        os.sched_setaffinity(0, cores)


def _serve(pipe: Connection, kind: str, total_bytes: int, core: int) -> None:
    """The peer process: receives until told to stop. Answers each message with the time it came."""
    os.sched_setaffinity(0, {core})
    transport = open_transport(kind, TransportConfig(f"peer-{os.getpid()}"))
    region = transport.allocate(total_bytes)
    np.frombuffer(region.buffer, np.uint8)[:] = 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((transport.address, region.key, listener.getsockname()[1]))
        connection, _ = listener.accept()
    while True:
        waiting: list[Any] = [pipe, transport]
        ready = select.select(waiting, [], [])[0]
        if transport in ready:
            for event in transport.poll():
                if isinstance(event, Message):
                    pipe.send(time.monotonic())
        if pipe in ready:
            order = pipe.recv()
            if order is None:
                break
            _receive_raw(connection, region, order)
    connection.close()
    transport.close()


def _receive_raw(connection: socket.socket, region: Region, layout: Layout) -> None:
    """The reference's receiving side: every block of `layout` straight to its place, then one byte back."""
    size = layout.block_bytes
    blocks = [region.buffer[at : at + size] for at in layout.targets.tolist()]
    first = 0
    while first < len(blocks):
        received = connection.recvmsg_into(blocks[first : first + _SEGMENTS])[0]
        first = _skip(blocks, first, received, size)
    connection.sendall(b"\1")


def _skip(blocks: list[memoryview], first: int, num_bytes: int, size: int) -> int:
    """Blocks up to the returned one are through; that one keeps its rest."""
    whole, part = divmod(num_bytes + size - len(blocks[first]), size)
    first += whole
    if part:
        blocks[first] = blocks[first][part - (size - len(blocks[first])) :]
    return first


def _send_raw(connection: socket.socket, region: Region, layout: Layout) -> float:
    """The reference's sending side. Returns seconds from the first byte to the answer."""
    size = layout.block_bytes
    blocks = [region.buffer[at : at + size] for at in layout.sources.tolist()]
    begin = time.perf_counter()
    first = 0
    while first < len(blocks):
        sent = connection.sendmsg(blocks[first : first + _SEGMENTS])
        first = _skip(blocks, first, sent, size)
    assert connection.recv(1)
    return time.perf_counter() - begin


@contextlib.contextmanager
def _pair(kind: str, total_bytes: int, core: int, **settings: Any) -> Iterator[tuple[Transport, Region, _Remote]]:
    """A transport here, one in another process on `core`, and a region of each."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, kind, total_bytes, core), daemon=True)
    process.start()
    there.close()  # so that its death is an error here and not a wait
    transport = open_transport(kind, TransportConfig(f"bench-{os.getpid()}", **settings))
    try:
        address, key, port = here.recv()
        remote = _Remote(here, address, key, socket.create_connection(("127.0.0.1", port)))
        remote.name = transport.connect(remote.address)
        region = transport.allocate(total_bytes)
        np.frombuffer(region.buffer, np.uint8)[:] = 2
        yield transport, region, remote
        remote.raw.close()
    finally:
        here.send(None)
        transport.close()
        process.join(10.0)
        here.close()


def _post(transport: Transport, region: Region, remote: _Remote, layout: Layout, priority: Priority) -> None:
    lengths = np.full(len(layout.sources), layout.block_bytes, dtype=np.int64)
    copy = Copy(region, layout.sources, layout.targets, lengths)
    transport.post(remote.name, Post(Tag("bench", 0, 0), priority, remote.key, (copy,)))


def _wait_done(transport: Transport, number: int = 1) -> None:
    while number:
        select.select([transport], [], [])
        for event in transport.poll():
            assert isinstance(event, Done), event
            number -= 1


def _time_post(transport: Transport, region: Region, remote: _Remote, layout: Layout) -> float:
    begin = time.perf_counter()
    _post(transport, region, remote, layout, Priority.PROACTIVE)
    _wait_done(transport)
    return time.perf_counter() - begin


def _time_raw(region: Region, remote: _Remote, layout: Layout) -> float:
    remote.pipe.send(layout)
    return _send_raw(remote.raw, region, layout)


def _time_memcpy(source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], layout: Layout) -> float:
    sources = (layout.sources + source.ctypes.data).tolist()
    targets = (layout.targets + target.ctypes.data).tolist()
    begin = time.perf_counter()
    for to, of in zip(targets, sources, strict=True):
        _memmove(to, of, layout.block_bytes)
    return time.perf_counter() - begin


def measure_throughput(
    kind: str, block_bytes: Sequence[int], total_bytes: int, rounds: int, core: int
) -> list[dict[str, Any]]:
    """One row a block size: ours beside raw sockets (tcp) or memcpy (shm)."""
    rows = []
    with _pair(kind, total_bytes, core) as (transport, region, remote):
        private = np.ones(total_bytes, np.uint8), np.ones(total_bytes, np.uint8)
        for size in block_bytes:
            layout = make_layout(total_bytes, size)

            def reference(layout: Layout = layout) -> float:
                return _time_raw(region, remote, layout) if kind == "tcp" else _time_memcpy(*private, layout)

            ours, theirs = _alternate(
                lambda layout=layout: _time_post(transport, region, remote, layout),  # type: ignore[misc]
                reference,
                rounds,
            )
            rows.append(_row(kind, size, layout.num_bytes / 1e9 / ours, layout.num_bytes / 1e9 / theirs))
    return rows


def _alternate(ours: Callable[[], float], reference: Callable[[], float], rounds: int) -> tuple[float, float]:
    """Median seconds of either, one warm-up round aside."""
    times = [(ours(), reference()) for _ in range(rounds + 1)][1:]
    return statistics.median(pair[0] for pair in times), statistics.median(pair[1] for pair in times)


def _row(transport: str, block_bytes: int, gb_per_s: float, reference_gb_per_s: float) -> dict[str, Any]:
    return {
        "transport": transport,
        "block_bytes": block_bytes,
        "gb_per_s": round(gb_per_s, 4),
        "reference_gb_per_s": round(reference_gb_per_s, 4),
        "ratio": round(gb_per_s / reference_gb_per_s, 3),
    }


def measure_shaped(kind: str, link_gbps: float, seconds: float, core: int) -> dict[str, Any]:
    """A shaped link's rate beside the one asked for."""
    rate = link_gbps / 8
    layout = make_layout(int(rate * seconds * 1e9), 8192)
    with _pair(kind, layout.num_bytes, core, link_gbps=link_gbps) as (transport, region, remote):
        elapsed = statistics.median(_time_post(transport, region, remote, layout) for _ in range(3))
    return _row(f"{kind} shaped to {link_gbps:g} Gbit/s", 8192, layout.num_bytes / 1e9 / elapsed, rate)


def measure_wait(kind: str, link_gbps: float, messages: int, core: int) -> dict[str, Any]:
    """How long an on-demand message takes over a link full of speculative blocks, beside an idle one."""
    frame_bytes = TransportConfig("x").block_bytes
    block_s = frame_bytes / (link_gbps / 8 * 1e9)
    layout = make_layout(int((messages + 20) * 3 * frame_bytes), 8192)
    with _pair(kind, layout.num_bytes, core, link_gbps=link_gbps) as (transport, region, remote):
        idle = [_message_s(transport, remote, block_s * 1.37) for _ in range(messages)]
        _post(transport, region, remote, layout, Priority.SPECULATIVE)
        busy = [_message_s(transport, remote, block_s * 1.37) for _ in range(messages)]
        assert not transport.poll(), "the link was not saturated to the end"
    return {
        "transport": kind,
        "link_gbps": link_gbps,
        "block_ms": round(block_s * 1e3, 3),
        "idle_ms": round(statistics.median(idle) * 1e3, 3),
        "busy_ms": round(statistics.median(busy) * 1e3, 3),
        "busy_p90_ms": round(sorted(busy)[int(0.9 * messages)] * 1e3, 3),
        "busy_max_ms": round(max(busy) * 1e3, 3),
    }


def _message_s(transport: Transport, remote: _Remote, pause_s: float) -> float:
    """Seconds until a message sent now is in the peer's hands; both processes read the machine's one clock."""
    time.sleep(pause_s)
    sent = time.monotonic()
    transport.send(remote.name, b"x" * 200)
    return float(remote.pipe.recv()) - sent


def run(
    transports: Sequence[str] = ("tcp", "shm"),
    block_bytes: Sequence[int] = (8192, 1 << 20),
    link_gbps: Sequence[float] = (0.2, 1.0, 2.0),
    total_bytes: int = 256 << 20,
    rounds: int = 7,
) -> dict[str, Any]:
    """Measure, print a table, return the JSON document (see the benchmarks' contract). About half a minute."""
    with _pinned() as core:
        rows = [row for kind in transports for row in measure_throughput(kind, block_bytes, total_bytes, rounds, core)]
        rows += [measure_shaped(kind, gbps, 0.5, core) for kind in transports for gbps in link_gbps]
        waits = [measure_wait(kind, 1.0, 60, core) for kind in transports] if link_gbps else []
    _print(rows, waits)
    config = {"total_bytes": total_bytes, "rounds": rounds, "link_gbps": list(link_gbps)}
    return document("transport", config, rows) | {"waits": waits}


def _print(rows: list[dict[str, Any]], waits: list[dict[str, Any]]) -> None:
    print(f"{'transport':<26}{'block bytes':>12}{'GB/s':>9}{'reference':>11}{'ratio':>7}")
    for row in rows:
        print(
            f"{row['transport']:<26}{row['block_bytes']:>12}{row['gb_per_s']:>9.3f}"
            f"{row['reference_gb_per_s']:>11.3f}{row['ratio']:>7.2f}"
        )
    for wait in waits:
        print(
            f"{wait['transport']} at {wait['link_gbps']:g} Gbit/s: an on-demand message takes {wait['idle_ms']} ms "
            f"on an idle link, {wait['busy_ms']} ms under speculative load (p90 {wait['busy_p90_ms']}, "
            f"max {wait['busy_max_ms']}); one block takes {wait['block_ms']} ms"
        )
