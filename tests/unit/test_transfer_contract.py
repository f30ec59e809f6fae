"""The transport contract (narrows.transfer.base), against every transport, between two objects in one process."""

import gc
import hashlib
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from narrows.core.plan import RegionKey
from narrows.errors import ConfigError, PeerLost, TransportError
from narrows.testing.transports import TAG, WAIT_S, World, array, fill, offsets, post_of, whole
from narrows.transfer.base import (
    Arrived,
    Copy,
    Done,
    Dropped,
    Message,
    PeerGone,
    PeerName,
    Priority,
    Put,
    Tag,
    TransportConfig,
)
from narrows.transfer.registry import KINDS, open_transport

MOVING = [kind for kind in KINDS if kind != "null"]
BLOCK = 64 * 1024


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world of the asked kind that leaves no thread, descriptor or file behind."""
    gc.collect()
    threads, descriptors, files = threading.active_count(), _descriptors(), sorted(Path("/dev/shm").iterdir())
    world = World(request.param)
    try:
        yield world
    finally:
        world.close()
    assert threading.active_count() == threads
    assert _descriptors() == descriptors
    assert sorted(Path("/dev/shm").iterdir()) == files


all_kinds = pytest.mark.parametrize("world", KINDS, indirect=True)
moving = pytest.mark.parametrize("world", MOVING, indirect=True)
sockets = pytest.mark.parametrize("world", [kind for kind in MOVING if kind != "loopback"], indirect=True)


@moving
def test_data_lands_and_both_sides_hear_of_it(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    source, target, mask = a.allocate(300_000), b.allocate(300_000), b.allocate(64)
    data = fill(source, 1)
    post = post_of(target.key, whole(source), trailing=(Put(mask.key, 7, b"\1\2\3"),), note=b"layer 5")
    id = a.post(a.connect(b.address), post)
    [done] = world.wait(a, Done)
    [arrived] = world.wait(b, Arrived)
    assert (done.post, done.peer, done.tag) == (id, "b", TAG)
    assert done.num_bytes >= 300_003
    assert arrived == Arrived(PeerName("a"), TAG, b"layer 5", 300_003)
    assert (array(target) == data).all()
    assert bytes(mask.buffer[:11]) == b"\0" * 7 + b"\1\2\3\0"
    assert (array(source) == data).all()
    assert a.stats.posts == 1
    assert a.stats.sent_bytes[Priority.PROACTIVE] >= 300_003
    assert b.stats.refused_frames == 0


@pytest.mark.parametrize("world", ["null"], indirect=True)
def test_null_reports_all_and_writes_nothing(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    source, target = a.allocate(1000), b.allocate(1000)
    fill(source, 1)
    a.post(a.connect(b.address), post_of(target.key, whole(source), trailing=(Put(target.key, 0, b"x"),), note=b"n"))
    world.wait(a, Done)
    assert world.wait(b, Arrived) == [Arrived(PeerName("a"), TAG, b"n", 1001)]
    assert not array(target).any()


@moving
def test_fresh_memory_is_zero_and_page_aligned(world: World) -> None:
    region = world.open("a").allocate(10_000)
    assert len(region.buffer) == region.key.num_bytes == 10_000
    assert not array(region).any()
    assert array(region).ctypes.data % 4096 == 0
    assert not region.buffer.readonly


@moving
def test_one_call_takes_8192_scattered_blocks(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    size, count = 512, 8192
    source, target = a.allocate(size * count), b.allocate(size * count)
    data = fill(source, 2).reshape(count, size)
    rng = np.random.default_rng(3)
    source_at, target_at = rng.permutation(count), rng.permutation(count)
    copy = Copy(source, offsets(source_at * size), offsets(target_at * size), offsets(np.full(count, size)))
    a.post(a.connect(b.address), post_of(target.key, copy))
    world.wait(a, Done)
    expected = np.empty_like(data)
    expected[target_at] = data[source_at]
    assert (array(target).reshape(count, size) == expected).all()


@moving
def test_odd_lengths_from_several_regions(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    first, second, target = a.allocate(70_001), a.allocate(70_001), b.allocate(300_000)
    one, two = fill(first, 4), fill(second, 5)
    copies = (
        Copy(first, offsets([1, 500, 501]), offsets([9, 70_000, 70_001]), offsets([70_000, 1, 3])),
        Copy(second, offsets([0, 3, 7]), offsets([140_001, 4, 299_999]), offsets([70_001, 0, 1])),
    )
    a.post(a.connect(b.address), post_of(target.key, *copies))
    world.wait(a, Done)
    expected = np.zeros(300_000, np.uint8)
    expected[9:70_009] = one[1:]
    expected[70_000], expected[70_001:70_004] = one[500], one[501:504]
    expected[140_001:210_002] = two
    expected[299_999] = two[7]
    assert (array(target) == expected).all()


@all_kinds
@pytest.mark.parametrize("with_copy", [True, False])
def test_a_post_of_no_bytes_arrives(world: World, with_copy: bool) -> None:
    a, b = world.open("a"), world.open("b")
    source, target = a.allocate(16), b.allocate(16)
    copies = [Copy(source, offsets([16]), offsets([3]), offsets([0]))] if with_copy else []
    a.post(a.connect(b.address), post_of(target.key, *copies, note=b"empty"))
    world.wait(a, Done)
    assert world.wait(b, Arrived) == [Arrived(PeerName("a"), TAG, b"empty", 0)]


@moving
def test_trailing_writes_are_seen_after_all_data(world: World) -> None:
    """A reader spins on the mask; whenever it has changed, the data of that round must be complete."""
    a, b = world.open("a"), world.open("b")
    size, rounds = 400_000, 20
    source, target, mask = a.allocate(size), b.allocate(size), b.allocate(1)
    peer = a.connect(b.address)
    torn: list[int] = []
    looked = threading.Semaphore(0)

    def read() -> None:
        values, deadline = array(target), time.monotonic() + WAIT_S
        for number in range(1, rounds + 1):
            while mask.buffer[0] != number and time.monotonic() < deadline:
                time.sleep(0)
            if not (values == number).all():
                torn.append(number)
            looked.release()

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, rounds + 1):
        array(source)[:] = number
        a.post(peer, post_of(target.key, whole(source), trailing=(Put(mask.key, 0, bytes([number])),)))
        world.wait(a, Done, number)
        assert looked.acquire(timeout=WAIT_S)  # before the next round overwrites the target
    reader.join(WAIT_S)
    assert torn == []


@moving
def test_many_trailing_writes(world: World) -> None:
    a, b = world.open("a", block_bytes=4096), world.open("b", block_bytes=4096)
    source, target, mask = a.allocate(10_000), b.allocate(10_000), b.allocate(2_000_000)
    fill(source, 1)
    puts = tuple(Put(mask.key, index * 1000, bytes([index % 255 + 1]) * (index % 700)) for index in range(2000))
    a.post(a.connect(b.address), post_of(target.key, whole(source), trailing=puts, note=b"n" * 4096))
    [arrived] = world.wait(b, Arrived)
    assert arrived.note == b"n" * 4096
    expected = np.zeros(2_000_000, np.uint8)
    for put in puts:
        expected[put.offset : put.offset + len(put.data)] = np.frombuffer(put.data, np.uint8)
    assert (array(mask) == expected).all()


@moving
def test_arrival_finds_the_bytes_that_were_posted(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    peer = a.connect(b.address)
    targets = []
    for number in range(12):
        source, target = a.allocate(150_000), b.allocate(150_000)
        fill(source, number)
        digest = hashlib.sha256(source.buffer).digest()
        targets.append(target)
        a.post(peer, post_of(target.key, whole(source), tag=Tag("r", 1, number), note=digest))
    arrivals = world.wait(b, Arrived, 12)
    assert [arrived.tag.layer for arrived in arrivals] == list(range(12))
    for arrived in arrivals:
        assert hashlib.sha256(targets[arrived.tag.layer].buffer).digest() == arrived.note


@moving
def test_urgent_classes_overtake(world: World) -> None:
    a, b = world.open("a", slow=True), world.open("b")
    source, target = a.allocate(4 * BLOCK), b.allocate(4 * BLOCK)
    peer = a.connect(b.address)
    for layer, priority in enumerate((Priority.SPECULATIVE, Priority.PROACTIVE, Priority.PROACTIVE)):
        a.post(peer, post_of(target.key, whole(source), tag=Tag("r", 0, layer), priority=priority))
    a.send(peer, b"lazy", Priority.SPECULATIVE)
    a.send(peer, b"now")
    a.post(peer, post_of(target.key, whole(source), tag=Tag("r", 0, 9), priority=Priority.ON_DEMAND))
    order = [event.payload if isinstance(event, Message) else event.tag.layer for event in _landed(world, b, 6)]
    assert order == [b"now", 9, 1, 2, 0, b"lazy"]


@sockets
def test_urgent_classes_overtake_across_peers(world: World) -> None:
    """The shaped link is one for all peers of a side, so what is urgent to one goes before what is not to another."""
    a, b, c = world.open("a", slow=True), world.open("b"), world.open("c")
    short, long = a.allocate(3 * BLOCK), a.allocate(8 * BLOCK)
    to_b, to_c = a.connect(b.address), a.connect(c.address)
    target, other = b.allocate(3 * BLOCK), c.allocate(8 * BLOCK)
    ids = [
        a.post(to_b, post_of(target.key, whole(short), priority=Priority.SPECULATIVE)),
        a.post(to_b, post_of(target.key, whole(short), priority=Priority.SPECULATIVE)),
        a.post(to_c, post_of(other.key, whole(long), priority=Priority.ON_DEMAND)),
    ]
    assert [done.post for done in world.wait(a, Done, 3)] == [ids[2], ids[0], ids[1]]


def _landed(world: World, transport: object, number: int) -> list:
    name = transport.name
    landed: list = []
    while len(landed) < number:
        before = len(world.found(transport, Message)), len(world.found(transport, Arrived))
        if before[0] + before[1] < number:
            world.wait(transport, (Message, Arrived), before[0] + before[1] + 1)
        landed = [event for event in world.seen[name] if isinstance(event, (Message, Arrived))]
    return landed


@all_kinds
def test_messages_keep_their_order_and_bytes(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    peer = a.connect(b.address)
    payloads = [bytes([index % 256]) * size for index, size in enumerate([0, 1, 5000, 1 << 20, 64 * 1024, 3] * 5)]
    for payload in payloads:
        a.send(peer, payload)
    assert [message.payload for message in world.wait(b, Message, len(payloads))] == payloads
    # the peer that was dialed answers on the same terms
    b.send(PeerName("a"), b"back")
    assert world.wait(a, Message) == [Message(PeerName("b"), b"back")]
    with pytest.raises(ValueError, match="1048577 bytes"):
        a.send(peer, b"x" * ((1 << 20) + 1))


@moving
def test_cancel_drops_what_waits_and_nothing_else(world: World) -> None:
    a, b = world.open("a", slow=True), world.open("b")
    source, target = a.allocate(3 * BLOCK), b.allocate(6 * 3 * BLOCK)
    data = fill(source, 1)
    peer = a.connect(b.address)

    def post(number: int, generation: int) -> int:
        copy = Copy(source, offsets([0]), offsets([number * len(data)]), offsets([len(data)]))
        return a.post(peer, post_of(target.key, copy, tag=Tag("r", generation, number)))

    ids = [post(number, generation) for number, generation in enumerate((1, 2, 1, 2, 1))]
    a.cancel("r", 1)
    ends = {}
    while len(ends) < 5:
        world.wait(a, (Done, Dropped), len(ends) + 1)
        ends = {event.post: event for event in world.found(a, (Done, Dropped))}
    assert isinstance(ends[ids[1]], Done)
    assert isinstance(ends[ids[3]], Done)
    assert isinstance(ends[ids[2]], Dropped)
    assert isinstance(ends[ids[4]], Dropped)
    assert "cancelled" in ends[ids[4]].error
    # a later post of the same attempt goes its way
    again = post(5, 1)
    world.wait(a, (Done, Dropped), 6)
    assert isinstance(world.found(a, (Done, Dropped))[-1], Done)
    assert world.found(a, (Done, Dropped))[-1].post == again
    places = array(target).reshape(6, -1)
    assert [bool((places[number] == data).all()) for number in (1, 3, 5)] == [True] * 3
    assert not places[2].any()
    assert not places[4].any()


@moving
def test_cancel_in_the_middle_of_a_post(world: World) -> None:
    a, b = world.open("a", slow=True), world.open("b")
    blocks = 40
    source, target = a.allocate(blocks * BLOCK), b.allocate(blocks * BLOCK)
    fill(source, 1)
    peer = a.connect(b.address)
    a.post(peer, post_of(target.key, whole(source), trailing=(Put(target.key, 0, b"\0"),)))
    # a message of the same class behind it would wait, an urgent one does not: its arrival tells that frames flow
    deadline = time.monotonic() + WAIT_S
    while not array(target)[BLOCK - 1] and time.monotonic() < deadline:
        if world.hub is not None:
            world.hub.step()
        select.select([], [], [], 0.001)
    a.cancel(TAG.request, TAG.generation)
    [dropped] = world.wait(a, Dropped)
    assert "cancelled" in dropped.error
    frozen = array(target).copy()
    assert frozen[0] != 0
    assert not frozen[-1]
    a.send(peer, b"after")
    world.wait(b, Message)
    assert (array(target) == frozen).all()
    assert not world.found(b, Arrived)
    assert not world.found(a, Done)


@moving
def test_what_the_target_revoked_is_refused(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    source, target = a.allocate(3 * BLOCK), b.allocate(3 * BLOCK)
    fill(source, 1)
    peer = a.connect(b.address)
    b.revoke("old", 4)
    for generation in (3, 4):
        a.post(peer, post_of(target.key, whole(source), tag=Tag("old", generation, 0), note=b"late"))
    dropped = world.wait(a, Dropped, 2)
    assert all("revoked" in event.error for event in dropped)
    if world.kind != "shm":  # which writes before the target can know
        assert not array(target).any()
        assert b.stats.refused_frames > 0
    a.post(peer, post_of(target.key, whole(source), tag=Tag("old", 5, 0), note=b"new"))
    world.wait(a, Done)
    assert [arrived.note for arrived in world.found(b, Arrived)] == [b"new"]
    assert (array(target) == array(source)).all()


@moving
@pytest.mark.parametrize(
    ("target_at", "length", "words"),
    [(5000, 5001, "outside"), (-1, 10, "outside"), (1 << 62, 100, "outside"), (3 << 30, 100, "outside")],
)
def test_writes_outside_a_region_are_refused(world: World, target_at: int, length: int, words: str) -> None:
    a, b = world.open("a"), world.open("b")
    source, target, guard = a.allocate(20_000), b.allocate(10_000), b.allocate(4096)
    fill(source, 1)
    peer = a.connect(b.address)
    good = Copy(source, offsets([0]), offsets([0]), offsets([100]))
    bad = Copy(source, offsets([0]), offsets([target_at]), offsets([length]))
    a.post(peer, post_of(target.key, bad, note=b"bad"))
    a.post(peer, post_of(target.key, good, trailing=(Put(target.key, 9_999, b"xy"),), note=b"bad put"))
    a.post(peer, post_of(target.key, good, note=b"good"))
    a.send(peer, b"alive")
    assert all(words in event.error for event in world.wait(a, Dropped, 2))
    world.wait(a, Done)
    world.wait(b, Message)
    assert [arrived.note for arrived in world.found(b, Arrived)] == [b"good"]
    assert not array(target)[100:].any()
    assert not array(guard).any()
    assert not world.found(a, PeerGone)
    assert not world.found(b, PeerGone)


@moving
def test_unknown_regions_are_refused(world: World) -> None:
    a, b, c = world.open("a"), world.open("b"), world.open("c")
    source, target, elsewhere = a.allocate(5000), b.allocate(5000), c.allocate(5000)
    fill(source, 1)
    peer = a.connect(b.address)
    a.post(peer, post_of(elsewhere.key, whole(source)))  # a region of another transport
    a.post(peer, post_of(target.key, trailing=(Put(elsewhere.key, 0, b"x"),)))
    a.post(peer, post_of(target.key, whole(source)))
    assert all("unknown" in event.error for event in world.wait(a, Dropped, 2))
    world.wait(a, Done)
    assert not array(elsewhere).any()
    with pytest.raises(TransportError, match="of a carrier-pigeon transport"):
        a.post(peer, post_of(RegionKey("carrier-pigeon", "1", 10)))
    with pytest.raises(TransportError, match="malformed token"):
        a.post(peer, post_of(RegionKey(world.kind, "not hex", 10)))


@all_kinds
def test_what_can_not_be_sent_is_said_at_once(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    source, target = a.allocate(1000), b.allocate(1000)
    peer = a.connect(b.address)
    for at, length in ((0, 1001), (1000, 1), (-1, 1), (5, -1), ((1 << 63) - 1, 5)):
        with pytest.raises(ValueError, match="copy"):
            a.post(peer, post_of(target.key, Copy(source, offsets([at]), offsets([0]), offsets([length]))))
    with pytest.raises(ValueError, match="differ"):
        a.post(peer, post_of(target.key, Copy(source, offsets([0, 1]), offsets([0]), offsets([1]))))
    with pytest.raises(ValueError, match="int64"):
        a.post(peer, post_of(target.key, Copy(source, offsets([0]), offsets([0]), np.array([1.0]))))
    with pytest.raises(ValueError, match="block_bytes"):
        a.post(peer, post_of(target.key, trailing=(Put(target.key, 0, b"x" * (BLOCK + 1)),)))
    with pytest.raises(ValueError, match="block_bytes"):
        a.post(peer, post_of(target.key, note=b"x" * (BLOCK + 1)))
    with pytest.raises(ValueError, match="num_bytes"):
        a.allocate(0)
    assert not a.poll()


@all_kinds
def test_a_closed_peer_is_reported_once_and_its_posts_end(world: World) -> None:
    a, b = world.open("a", slow=True), world.open("b")
    source, target = a.allocate(20 * BLOCK), b.allocate(20 * BLOCK)
    peer = a.connect(b.address)
    ids = [a.post(peer, post_of(target.key, whole(source))) for _ in range(3)]
    world.collect()
    b.close()
    assert len(world.wait(a, PeerGone)) == 1
    assert [event.post for event in world.wait(a, Dropped, 3)] == ids
    with pytest.raises(PeerLost, match="b lost"):
        a.post(peer, post_of(target.key))
    with pytest.raises(PeerLost):
        a.send(peer, b"anyone?")
    with pytest.raises(PeerLost):
        a.connect(b.address, timeout_s=5.0)
    # a new incarnation is a new peer, and may even have the old name
    for name in ("b2", "b"):
        b = world.open(name)
        again = a.connect(b.address)
        assert again == name
        a.post(again, post_of(b.allocate(20 * BLOCK).key, whole(source)))
        if world.hub is not None:
            world.hub.resume()
        world.wait(b, Arrived)
    assert len(world.found(a, PeerGone)) == 1


@all_kinds
def test_connecting_again_costs_nothing(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    assert a.connect(b.address) == a.connect(b.address) == "b"
    a.send(PeerName("b"), b"hello")
    world.wait(b, Message)
    assert b.connect(a.address) == "a"
    b.send(PeerName("a"), b"hello")
    world.wait(a, Message)
    with pytest.raises(TransportError, match="itself"):
        a.connect(a.address)
    with pytest.raises(PeerLost, match="not connected"):
        a.send(PeerName("nobody"), b"x")


@all_kinds
def test_both_may_dial_at_once(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    other = threading.Thread(target=b.connect, args=(a.address,))
    other.start()
    a.connect(b.address)
    other.join(WAIT_S)
    a.send(PeerName("b"), b"from a")
    b.send(PeerName("a"), b"from b")
    assert world.wait(b, Message) == [Message(PeerName("a"), b"from a")]
    assert world.wait(a, Message) == [Message(PeerName("b"), b"from b")]
    b.close()
    world.wait(a, PeerGone)
    a.close()
    world.collect()
    assert len(world.found(a, PeerGone)) == 1


@all_kinds
def test_another_secret_is_turned_away(world: World) -> None:
    a, b, c = world.open("a", secret="open sesame"), world.open("b", secret="guess"), world.open("c", secret="guess")
    for caller in (b, c):
        with pytest.raises(TransportError, match="secrets differ"):
            caller.connect(a.address)
    with pytest.raises(TransportError, match="secrets differ"):
        a.connect(c.address)
    assert b.connect(c.address) == "c"
    world.collect()
    assert world.seen["a"] == []


@all_kinds
def test_fileno_is_readable_exactly_while_events_wait(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    peer = a.connect(b.address)
    assert select.select([b], [], [], 0)[0] == []
    for _ in range(3):
        a.send(peer, b"x")
        assert select.select([b], [], [], WAIT_S)[0] == [b]
        assert b.poll() == [Message(PeerName("a"), b"x")]
        # the signal may come once more for what was just taken; then it rests
        while select.select([b], [], [], 0.01)[0]:
            assert not b.poll()


@all_kinds
def test_close_while_busy(world: World) -> None:
    a, b, c = world.open("a", slow=True), world.open("b"), world.open("c")
    source, target, other = a.allocate(50 * BLOCK), b.allocate(50 * BLOCK), c.allocate(50 * BLOCK)
    to_b, to_c = a.connect(b.address), a.connect(c.address)
    ids = [a.post(to_b, post_of(target.key, whole(source))), a.post(to_c, post_of(other.key, whole(source)))]
    a.close()
    a.close()
    assert [event.post for event in a.poll()] == ids
    assert a.poll() == []
    for transport in (b, c):
        world.wait(transport, PeerGone)
    for call in (lambda: a.post(to_b, post_of(target.key)), lambda: a.allocate(10), lambda: a.connect(b.address)):
        with pytest.raises(TransportError, match="closed"):
            call()
    # what was allocated stays readable
    assert array(source).sum() == 0


@all_kinds
def test_nobody_there(world: World) -> None:
    a, b = world.open("a"), world.open("b")
    address = b.address
    b.close()
    with pytest.raises(PeerLost, match="can not be reached"):
        a.connect(address, timeout_s=5.0)


@sockets
def test_one_slow_peer_does_not_stop_another(world: World) -> None:
    a, b, c = world.open("a"), world.open("b"), world.open("c")
    source, target, other = a.allocate(200 * BLOCK), b.allocate(200 * BLOCK), c.allocate(BLOCK)
    to_b, to_c = a.connect(b.address), a.connect(c.address)
    with b._receiving:  # b's thread can not read while this is held
        a.post(to_b, post_of(target.key, whole(source)))
        for number in range(1, 6):
            a.post(to_c, post_of(other.key, Copy(source, offsets([0]), offsets([0]), offsets([BLOCK]))))
            world.wait(c, Arrived, number)
        assert not world.found(b, Arrived)
    world.wait(b, Arrived)


@moving
def test_three_transports_exchange_everything_at_once(world: World) -> None:
    names = ["a", "b", "c"]
    transports = {name: world.open(name) for name in names}
    size, rounds = 5 * BLOCK + 17, 6
    regions = {(one, two): transports[two].allocate(size) for one in names for two in names if one != two}
    sources = {name: transports[name].allocate(size) for name in names}
    for seed, name in enumerate(names):
        fill(sources[name], seed)
    for one, two in regions:
        peer = transports[one].connect(transports[two].address)
        for number in range(rounds):
            tag = Tag(f"{one}->{two}", 0, number)
            transports[one].post(peer, post_of(regions[one, two].key, whole(sources[one]), tag=tag))
    for name in names:
        world.wait(transports[name], Done, 2 * rounds)
        world.wait(transports[name], Arrived, 2 * rounds)
    for (one, _), region in regions.items():
        assert (array(region) == array(sources[one])).all()


def test_unknown_kinds_and_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"carrier-pigeon.*tcp"):
        open_transport("carrier-pigeon", TransportConfig("a"))
    with pytest.raises(ConfigError, match="LoopbackHub"):
        open_transport("loopback", TransportConfig("a"))
    with pytest.raises(ConfigError, match="no address that peers can dial"):
        open_transport("tcp", TransportConfig("a", listen="0.0.0.0"))
    with pytest.raises(ConfigError, match="can not listen"):
        open_transport("tcp", TransportConfig("a", listen="203.0.113.7"))
    for field, value in (("link_gbps", 0.0), ("block_bytes", 10), ("silence_s", -1.0), ("name", "")):
        with pytest.raises(ConfigError, match=f"transport.{field}"):
            TransportConfig(**{"name": "a", field: value})


@pytest.mark.parametrize("world", ["loopback"], indirect=True)
def test_settings_without_effect_are_said(world: World) -> None:
    with pytest.warns(UserWarning, match="no effect"):
        world.open("a", checksums=True)
