"""Transports between real processes: data, and peers that are killed, stopped and started again."""

import multiprocessing
import os
import select
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrows.core.plan import RegionKey
from narrows.errors import PeerLost
from narrows.testing.transports import WAIT_S, World, array, fill, offsets, post_of, whole
from narrows.transfer.base import (
    Arrived,
    Copy,
    Done,
    Dropped,
    Message,
    PeerGone,
    Priority,
    Put,
    TransportConfig,
)
from narrows.transfer.registry import open_transport

BETWEEN = ["tcp", "shm"]


def _child(kind: str, name: str, region_bytes: int, settings: dict[str, Any], pipe: Connection) -> None:
    """A peer that owns one region: tells what it sees, and shows its bytes when asked."""
    transport = open_transport(kind, TransportConfig(name, **settings))
    region = transport.allocate(region_bytes)
    pipe.send((transport.address, region.key))
    while True:
        ready = select.select([pipe, transport], [], [])[0]
        if transport in ready:
            for event in transport.poll():
                if isinstance(event, Arrived):
                    pipe.send((event, bytes(region.buffer[: event.num_bytes])))
                else:
                    pipe.send((event, None))
        if pipe in ready and pipe.recv() == "stop":
            transport.close()
            return


class Child:
    """A peer process. Killed at the latest when the test ends."""

    def __init__(self, kind: str, name: str, region_bytes: int = 1 << 20, **settings: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_child, args=(kind, name, region_bytes, settings, there), daemon=True)
        self.process.start()
        there.close()
        self.address: str
        self.key: RegionKey
        self.address, self.key = self.receive()

    def receive(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the peer process says nothing"
        return self.pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        self.process.close()
        self.pipe.close()


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()


@pytest.fixture(params=BETWEEN)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    files = sorted(Path("/dev/shm").iterdir())
    world = World(request.param)
    yield world
    world.close()
    assert sorted(Path("/dev/shm").iterdir()) == files


def test_blocks_messages_and_masks_between_processes(world: World, children: list[Child]) -> None:
    size, count = 128, 8192
    child = Child(world.kind, "child", size * count + 4)
    children.append(child)
    a = world.open("a")
    source = a.allocate(size * count)
    data = fill(source, 1).reshape(count, size)
    rng = np.random.default_rng(2)
    source_at, target_at = rng.permutation(count), rng.permutation(count)
    copy = Copy(source, offsets(source_at * size), offsets(target_at * size), offsets(np.full(count, size)))
    peer = a.connect(child.address)
    a.post(peer, post_of(child.key, copy, trailing=(Put(child.key, size * count, b"mask"),), note=b"all"))
    a.send(peer, b"a word", Priority.SPECULATIVE)
    world.wait(a, Done)
    # over shared memory the message may overtake: the first post waits for the region to be mapped
    told = [child.receive(), child.receive()]
    [(arrived, seen)] = [pair for pair in told if isinstance(pair[0], Arrived)]
    assert arrived.note == b"all"
    expected = np.empty_like(data)
    expected[target_at] = data[source_at]
    # what the reader of the region finds when Arrived comes
    assert seen == expected.tobytes() + b"mask"
    assert (Message(a.name, b"a word"), None) in told


def test_a_killed_peer_is_noticed_at_once_and_replaced(world: World, children: list[Child]) -> None:
    # slow enough to be killed in the middle, patient enough that silence is not how it is noticed
    child = Child(world.kind, "child-1", 4 << 20)
    children.append(child)
    a = world.open("a", slow=True, silence_s=1000.0)
    source = a.allocate(4 << 20)
    fill(source, 1)
    peer = a.connect(child.address)
    ids = [a.post(peer, post_of(child.key, whole(source))) for _ in range(3)]
    a.send(peer, b"urgent")
    assert child.receive()[0] == Message(a.name, b"urgent")
    child.signal(signal.SIGKILL)
    [gone] = world.wait(a, PeerGone)
    assert gone.peer == "child-1"
    assert [event.post for event in world.wait(a, Dropped, 3)] == ids
    with pytest.raises(PeerLost):
        a.send(peer, b"anyone?")
    with pytest.raises(PeerLost):
        a.connect(child.address, timeout_s=5.0)

    again = Child(world.kind, "child-2", 4 << 20)
    children.append(again)
    small = Copy(source, offsets([0]), offsets([0]), offsets([5000]))
    a.post(a.connect(again.address), post_of(again.key, small))
    world.wait(a, Done)
    assert again.receive()[1] == bytes(source.buffer[:5000])
    assert len(world.found(a, PeerGone)) == 1
    assert not _sockets_of("child-1", child)


def _sockets_of(name: str, child: Child) -> list[str]:
    """Abstract sockets that a dead process left behind."""
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if f"narrows-{child.process.pid}-" in line]


def test_a_stopped_peer_is_given_up_after_its_silence(world: World, children: list[Child]) -> None:
    child = Child(world.kind, "child", 8 << 20, silence_s=1.0)
    children.append(child)
    a, b = world.open("a", silence_s=1.0), world.open("b")
    source = a.allocate(8 << 20)
    peer = a.connect(child.address)
    other = a.connect(b.address)
    target = b.allocate(8 << 20)
    child.signal(signal.SIGSTOP)
    # the post to the other peer goes through while this one hangs
    a.post(peer, post_of(child.key, whole(source)))
    a.post(other, post_of(target.key, whole(source)))
    world.wait(b, Arrived)
    [gone] = world.wait(a, PeerGone)
    assert gone.peer == peer
    assert "silent" in gone.reason
    [dropped] = world.wait(a, Dropped)
    assert dropped.peer == peer
    # when it goes on, it finds its peer gone, once, and is not confused
    child.signal(signal.SIGCONT)
    events = []
    while not (events and isinstance(events[-1], PeerGone)):
        events.append(child.receive()[0])
    again = a.connect(child.address)
    a.send(again, b"welcome back")
    assert child.receive()[0] == Message(a.name, b"welcome back")


def test_stopping_this_side_is_not_the_peers_fault(world: World, children: list[Child]) -> None:
    """Stopped and continued, a process finds its peer's bytes waiting and does not declare it silent."""
    child = Child(world.kind, "child", silence_s=1.0)
    children.append(child)
    a = world.open("a", silence_s=60.0)
    peer = a.connect(child.address)
    a.send(peer, b"ready?")
    child.receive()
    child.signal(signal.SIGSTOP)
    select.select([], [], [], 2.0)  # twice the child's silence
    child.signal(signal.SIGCONT)
    a.send(peer, b"still there?")
    assert child.receive() == (Message(a.name, b"still there?"), None)


def test_shared_memory_survives_its_owner(children: list[Child]) -> None:
    """The target is killed while blocks are written to its memory: no crash, no leftover."""
    world = World("shm")
    child = Child("shm", "child", 64 << 20)
    children.append(child)
    a = world.open("a")
    source = a.allocate(64 << 20)
    peer = a.connect(child.address)
    ids = [a.post(peer, post_of(child.key, whole(source))) for _ in range(20)]
    child.signal(signal.SIGKILL)
    world.wait(a, PeerGone)
    assert len(world.wait(a, (Done, Dropped), len(ids))) == len(ids)
    assert not array(source).any()
    world.close()
