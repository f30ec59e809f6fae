"""Damaged, delayed and lost traffic; strangers at the door."""

import contextlib
import random
import select
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from narrows.errors import PeerLost, TransportError
from narrows.testing.faults import Faults, FaultyTransport, Relay
from narrows.testing.transports import TAG, WAIT_S, World, array, fill, offsets, post_of, whole
from narrows.transfer.base import Arrived, Copy, Done, Dropped, Message, PeerGone, PeerName, Priority, Put, Tag
from narrows.transfer.frames import Kind, pack_head

MARK = b"a mark that no other bytes of this test contain"


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(getattr(request, "param", "tcp"))
    yield world
    world.close()


def test_a_damaged_block_is_noticed_and_its_mask_not_set(world: World) -> None:
    a, b = world.open("a", checksums=True), world.open("b")
    source, target, mask = a.allocate(200_000), b.allocate(200_000), b.allocate(10)
    fill(source, 1)
    source.buffer[150_000 : 150_000 + len(MARK)] = MARK
    with Relay(b.address) as relay:
        peer = a.connect(relay.address)
        relay.corrupt(MARK)
        post = post_of(target.key, whole(source), trailing=(Put(mask.key, 0, b"\1"),), note=b"n")
        a.post(peer, post)
        [dropped] = world.wait(a, Dropped)
        assert "wrong checksum" in dropped.error
        assert not array(mask).any()
        assert not world.found(b, Arrived)
        # the link goes on, and the same post again comes through
        a.post(peer, post)
        world.wait(a, Done)
        assert mask.buffer[0] == 1
        assert (array(target) == array(source)).all()


def test_a_damaged_trailing_write_is_noticed(world: World) -> None:
    a, b = world.open("a", checksums=True), world.open("b")
    mask = b.allocate(1000)
    with Relay(b.address) as relay:
        peer = a.connect(relay.address)
        relay.corrupt(MARK)
        a.post(peer, post_of(mask.key, trailing=(Put(mask.key, 0, MARK),)))
        [dropped] = world.wait(a, Dropped)
        assert "wrong checksum" in dropped.error
        assert not array(mask).any()


def test_a_damaged_message_ends_the_link_as_it_can_not_be_dropped(world: World) -> None:
    a, b = world.open("a", checksums=True), world.open("b")
    with Relay(b.address) as relay:
        peer = a.connect(relay.address)
        relay.corrupt(MARK)
        a.send(peer, MARK)
        [gone] = world.wait(b, PeerGone)
        assert "wrong checksum" in gone.reason
        world.wait(a, PeerGone)


def test_a_damaged_head_ends_the_link(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    target = b.allocate(1000)
    with Relay(b.address) as relay:
        peer = a.connect(relay.address)
        relay.corrupt(MARK)
        a.post(peer, post_of(target.key, tag=Tag(MARK.decode(), 0, 0)))
        [gone] = world.wait(b, PeerGone)
        assert "checksum" in gone.reason
        world.wait(a, Dropped)
        world.wait(a, PeerGone)


def test_a_black_hole_is_noticed_by_both_sides(world: World) -> None:
    a, b = world.open("a", silence_s=0.4), world.open("b", silence_s=0.4)
    source, target = a.allocate(10_000_000), b.allocate(10_000_000)
    with Relay(b.address) as relay:
        peer = a.connect(relay.address)
        a.send(peer, b"hello")
        world.wait(b, Message)
        relay.black_hole()
        a.post(peer, post_of(target.key, whole(source)))
        for transport in (a, b):
            [gone] = world.wait(transport, PeerGone)
            assert "silent" in gone.reason
        assert len(world.wait(a, Dropped)) == 1


def test_a_peer_that_lost_us_first_may_come_back(world: World) -> None:
    a, b = world.open("a", silence_s=1.0), world.open("b", silence_s=1000.0)
    target = b.allocate(100)
    with Relay(b.address) as relay:
        a.connect(relay.address)
        b_to_a = PeerName("a")
        b.send(b_to_a, b"x")
        world.wait(a, Message)
        relay.black_hole()
        world.wait(a, PeerGone)
        # b has not noticed, and must not take the new link for a second one of the same
        peer = a.connect(b.address)
        a.post(peer, post_of(target.key, note=b"again"))
        world.wait(b, Arrived)
        [gone] = world.wait(b, PeerGone)
        assert "anew" in gone.reason
        b.send(b_to_a, b"y")
        world.wait(a, Message, 2)


def test_an_idle_link_stays_alive_by_heartbeats(world: World) -> None:
    """Also where the two sides' patience differs."""
    a, b = world.open("a", silence_s=0.8), world.open("b", silence_s=100.0)
    peer = a.connect(b.address)
    end = time.monotonic() + 1.6
    while (left := end - time.monotonic()) > 0:
        select.select([a, b], [], [], left)
        world.collect()
    assert world.seen == {"a": [], "b": []}
    a.send(peer, b"still here")
    world.wait(b, Message)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"", b"\0" * 100, random.Random(1).randbytes(70_000)],
    ids=["http", "nothing", "zeros", "random"],
)
def test_garbage_at_the_port_harms_nobody(world: World, garbage: bytes) -> None:
    a, b = world.open("a"), world.open("b")
    host, _, port = b.address.rpartition(":")
    peer = a.connect(b.address)
    with socket.create_connection((host, int(port))) as stranger:
        stranger.settimeout(WAIT_S)
        with contextlib.suppress(OSError):  # reset: turned away as well
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    a.send(peer, b"fine")
    world.wait(b, Message)
    assert world.seen["b"] == [Message(PeerName("a"), b"fine")]


def test_garbage_after_the_handshake_ends_that_link_only(world: World) -> None:
    a, b, c = world.open("a"), world.open("b"), world.open("c")
    to_b = a.connect(b.address)
    to_c = a.connect(c.address)
    a._links[to_b].outbox.control.append(b"\xff" * 100)
    a.send(to_b, b"pushes the rubbish out")
    [gone] = world.wait(b, PeerGone)
    assert "not a frame" in gone.reason
    world.wait(a, PeerGone)
    a.send(to_c, b"fine")
    world.wait(c, Message)


@pytest.mark.parametrize(
    "frame",
    [
        pack_head(Kind.DATA, rows=b"\0" * 16, payload=(b"four",)) + b"four",  # rows and payload differ
        pack_head(Kind.END, rows=bytes(16) + (9).to_bytes(8, "little")),
        pack_head(99, payload=(b"x",)) + b"x",  # type: ignore[arg-type]
        pack_head(Kind.MESSAGE, value=7, payload=(b"x",)) + b"x",
        pack_head(Kind.REGION, value=7),
        pack_head(Kind.DATA, rows=b"odd"),
        pack_head(Kind.PUT, rows=b"odd"),
        pack_head(Kind.DATA, rows=(-5).to_bytes(8, "little", signed=True) * 2),
        pack_head(Kind.ACK, post=77, payload=(b"\xff\xfe",)) + b"\xff\xfe",
    ],
)
def test_frames_that_make_no_sense_do_not_crash(world: World, frame: bytes) -> None:
    a, b = world.open("a"), world.open("b")
    peer = a.connect(b.address)
    a._links[peer].outbox.control.append(frame)
    a.send(peer, b"after")
    world.wait(b, (PeerGone, Message))
    again = world.open("a2")
    again.send(again.connect(b.address), b"fine")
    world.wait(b, Message)


def test_a_message_too_long_to_be_true_ends_the_link(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    peer = a.connect(b.address)
    a._links[peer].outbox.control.append(pack_head(Kind.MESSAGE, payload=(bytes(2 << 20),)))
    a.send(peer, b"x")
    [gone] = world.wait(b, PeerGone)
    assert "2097152 bytes" in gone.reason


def test_revoking_in_the_middle_of_a_block_keeps_the_rest_out(world: World) -> None:
    """The sender's block is half here when the target revokes: not one byte more may be written."""
    a, b = world.open("a"), world.open("b")
    size, passed = 4 << 20, 1_000_000
    source, target = a.allocate(size), b.allocate(size)
    array(source)[:] = 1
    with Relay(b.address) as relay:
        peer = a.connect(relay.address)
        a.send(peer, b"hello")
        world.wait(b, Message)
        relay.black_hole(after_bytes=passed)
        a.post(peer, post_of(target.key, whole(source)))
        # all that has passed is written, but for frame heads; a block of 64 KiB is cut in the middle
        deadline = time.monotonic() + WAIT_S
        while np.count_nonzero(array(target)) < passed - 4000 and time.monotonic() < deadline:
            select.select([], [], [], 0.001)
        assert b._links[PeerName("a")].reader.frame is not None
        b.revoke(TAG.request, TAG.generation)
        frozen = array(target).copy()
        relay.resume()
        [dropped] = world.wait(a, Dropped)
        assert "revoked" in dropped.error
        a.send(peer, b"and on", Priority.SPECULATIVE)  # behind all that is left of the post
        world.wait(b, Message, 2)
        assert (array(target) == frozen).all()
        assert not world.found(b, Arrived)


@pytest.mark.parametrize("world", ["loopback", "tcp", "shm"], indirect=True)
def test_faults_delay_and_reorder_but_lose_nothing(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    faults = Faults(delay=0.5, reorder=0.5)
    unlucky, target_side = FaultyTransport(a, faults, seed=1), FaultyTransport(b, faults, seed=2)
    source, target = a.allocate(5000), b.allocate(5000)
    fill(source, 3)
    peer = unlucky.connect(b.address)
    ids = [unlucky.post(peer, post_of(target.key, whole(source), note=bytes([n]))) for n in range(40)]
    for number in range(40):
        unlucky.send(peer, bytes([number]))
    ours: list = []
    theirs: list = []
    deadline = time.monotonic() + WAIT_S
    while len(ours) < 40 or len(theirs) < 80:
        assert time.monotonic() < deadline
        select.select([unlucky, target_side], [], [], 1.0)
        ours.extend(unlucky.poll())
        theirs.extend(target_side.poll())
    done = [event.post for event in ours]
    assert sorted(done) == ids
    assert done != ids
    assert [event.payload for event in theirs if isinstance(event, Message)] == [bytes([n]) for n in range(40)]
    assert [event.note for event in theirs if isinstance(event, Arrived)] == [bytes([n]) for n in range(40)]
    unlucky.close()
    target_side.close()
    world.transports.clear()


@pytest.mark.parametrize("world", ["loopback"], indirect=True)
def test_faults_drop_corrupt_and_lose_the_same_way_for_a_seed(world: World) -> None:
    def story(seed: int) -> list[object]:
        a, b = world.open(f"a{seed}"), world.open(f"b{seed}")
        faults = Faults(drop=0.3, corrupt=0.5, lose_after_posts=20)
        unlucky = FaultyTransport(a, faults, seed)
        listener = FaultyTransport(b, faults, seed)
        source, target = a.allocate(10), b.allocate(10)
        peer = unlucky.connect(b.address)
        for number in range(20):
            copy = Copy(source, offsets([0]), offsets([0]), offsets([10]))
            unlucky.post(peer, post_of(target.key, copy, note=bytes([number] * 4)))
        with pytest.raises(PeerLost, match="lost by a fault"):
            unlucky.send(peer, b"x")
        seen = [type(event).__name__ for event in unlucky.poll()]
        notes = [event.note for event in listener.poll() if isinstance(event, Arrived)]
        unlucky.close()
        listener.close()
        world.transports.clear()
        return [seen, notes]

    first = story(1)
    seen, notes = first
    assert seen.count("PeerGone") == 1
    assert seen.count("Dropped") >= 3
    damaged = [note for note in notes if len(set(note)) > 1]
    assert 0 < len(damaged) < len(notes)
    again = story(1)
    assert again == first
    assert story(2) != first


def test_the_engine_reports_its_own_death(world: World) -> None:
    """A bug in the I/O thread: peers see it gone, its owner gets an error instead of silence."""
    a, b = world.open("a"), world.open("b")
    peer = a.connect(b.address)
    source, target = a.allocate(10), b.allocate(10)

    def broken() -> None:
        raise RuntimeError("a bug")

    world.transports.remove(a)
    a._command(broken)
    world.wait(b, PeerGone)
    a._thread.join(WAIT_S)
    assert [type(event) for event in a.poll()] == [PeerGone]
    with pytest.raises(TransportError, match="a bug"):
        a.poll()
    with pytest.raises(TransportError, match="a bug"):
        a.post(peer, post_of(target.key, whole(source)))
    assert select.select([a], [], [], 0)[0] == [a]
    a.close()
    assert np.all(array(target) == 0)
