"""The parts of the transports that need no socket: runs, shaping, frames, streams, handshakes, revocations."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrows.errors import TransportError
from narrows.testing.transports import offsets
from narrows.transfer.base import Copy, Region, RegionKey, Tag
from narrows.transfer.frames import HEAD_BYTES, Frame, Kind, pack_head, parse_head
from narrows.transfer.handshake import Handshake, Identity
from narrows.transfer.memory import RegionTable, Revocations, allocate_private, misfit
from narrows.transfer.runs import check_copy, cut, merge
from narrows.transfer.shaping import Pace, TokenBucket
from narrows.transfer.stream import FrameReader

REGION = Region(RegionKey("none", "0", 1 << 50), memoryview(b""))

# ---- runs

blocks = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 9)), max_size=60)
# chains of blocks that follow each other now and then, so that there is something to merge
chains = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), st.lists(st.integers(0, 300), max_size=20)), max_size=8
)


def _copy(rows: list[tuple[int, int, int]]) -> Copy:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Copy(REGION, columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())


def _chain(source: int, target: int, lengths: list[int]) -> list[tuple[int, int, int]]:
    rows = []
    for length in lengths:
        rows.append((source, target, length))
        source, target = source + length, target + length
    return rows


def _naive(copies: list[list[tuple[int, int, int]]]) -> list[list[int]]:
    """One block after the other, joined to the one before where both sides follow."""
    runs: list[list[int]] = []
    for buffer, rows in enumerate(copies):
        for source, target, length in rows:
            last = runs[-1] if runs else None
            if not length:
                continue
            if last and last[0] == buffer and last[1] + last[3] == source and last[2] + last[3] == target:
                last[3] += length
            else:
                runs.append([buffer, source, target, length])
    return runs


@given(st.lists(blocks, max_size=3), st.lists(chains, max_size=2), st.integers(1, 400), st.integers(1, 5))
@settings(deadline=None)
def test_merge_and_cut_keep_every_byte_in_place(scattered, linked, frame_bytes, max_pieces) -> None:
    copies = [*scattered, *([row for chain in group for row in _chain(*chain)] for group in linked)]
    runs = merge([_copy(rows) for rows in copies])
    columns = (runs.buffers, runs.sources, runs.targets, runs.lengths)
    assert [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)] == _naive(copies)

    pieces = cut(runs, frame_bytes, max_pieces)
    assert pieces.frames[0] == 0
    assert pieces.frames[-1] == len(pieces.lengths)
    for low, high in zip(pieces.frames[:-1], pieces.frames[1:], strict=True):
        assert 1 <= high - low <= max_pieces
        assert 1 <= pieces.lengths[low:high].sum() <= frame_bytes
    # pieces merged again are the runs, so nothing is lost, doubled or moved
    again = [
        (int(source), int(target), int(length))
        for source, target, length in zip(pieces.sources, pieces.targets, pieces.lengths, strict=True)
    ]
    by_buffer = [[row for row, of in zip(again, pieces.buffers, strict=True) if of == b] for b in range(len(copies))]
    assert _naive(by_buffer) == _naive([_naive_rows(copies, b) for b in range(len(copies))])


def _naive_rows(copies: list[list[tuple[int, int, int]]], buffer: int) -> list[tuple[int, int, int]]:
    return [(source, target, length) for of, source, target, length in _naive(copies) if of == buffer]


def test_frames_are_full_unless_they_have_too_many_pieces() -> None:
    """Hand calculation: runs of 100, 30 and 70 bytes, frames of 64 bytes and two pieces."""
    runs = merge([_copy([(0, 0, 60), (60, 60, 40), (500, 200, 30), (700, 300, 70)])])
    assert runs.lengths.tolist() == [100, 30, 70]
    pieces = cut(runs, 64, 2)
    assert pieces.lengths.tolist() == [64, 36, 28, 2, 62, 8]
    assert pieces.sources.tolist() == [0, 64, 500, 528, 700, 762]
    assert pieces.targets.tolist() == [0, 64, 200, 228, 300, 362]
    assert pieces.frames.tolist() == [0, 1, 3, 5, 6]


def test_offsets_beyond_four_gigabytes() -> None:
    """Arithmetic only: 6 GB in two runs around the 2 and 4 GiB marks."""
    base, half = (1 << 31) - 10, 3_000_000_000
    runs = merge([_copy([(base, base + 7, half), (base + half, base + half + 7, half), (1 << 44, 0, 5)])])
    assert runs.lengths.tolist() == [2 * half, 5]
    pieces = cut(runs, 1 << 30, 512)
    assert pieces.lengths.sum() == 2 * half + 5
    assert pieces.num_frames == 6
    last = pieces.lengths[-2]
    assert pieces.targets[-2] + last == base + 7 + 2 * half
    assert pieces.sources[-1] == 1 << 44
    rows = np.stack((pieces.targets, pieces.lengths), axis=1).tobytes()
    frame = parse_head(memoryview(pack_head(Kind.DATA, rows=rows, value=5)))
    assert frame is not None
    assert np.frombuffer(frame.rows, np.int64).reshape(-1, 2)[-2].tolist() == [pieces.targets[-2], last]


def test_copies_are_checked_without_overflow() -> None:
    region = Region(RegionKey("none", "0", 100), memoryview(bytes(100)))
    check_copy(Copy(region, offsets([0, 100]), offsets([0, 0]), offsets([100, 0])))
    for source, length in ((1, 100), ((1 << 63) - 1, (1 << 63) - 1), (5, (1 << 63) - 1)):
        with pytest.raises(ValueError, match="reads bytes"):
            check_copy(Copy(region, offsets([source]), offsets([0]), offsets([length])))


# ---- shaping


def test_a_saturated_link_passes_its_rate_however_late_we_wake() -> None:
    bucket, now, sent = TokenBucket(1e6, 0.0), 0.0, 0
    rng = random.Random(1)
    while now < 10.0:
        wait = bucket.wait_s(8192, now)
        if wait > 0:
            now += wait + rng.random() * 0.01  # woken up to 10 ms late
            continue
        bucket.charge(8192, now)
        sent += 8192
    assert abs(sent / now / 1e6 - 1) < 0.005


def test_an_idle_link_earns_no_burst() -> None:
    bucket = TokenBucket(1e6, 0.0, idle_bytes=1000)
    bucket.rest(100.0)
    assert bucket.wait_s(1000, 100.0) == 0.0
    assert bucket.wait_s(51_000, 100.0) == pytest.approx(0.05)
    bucket.charge(51_000, 100.0)  # control traffic does not ask
    assert bucket.wait_s(1000, 100.0) == pytest.approx(0.051)
    assert bucket.wait_s(1000, 100.051) == pytest.approx(0.0, abs=1e-9)


def test_a_frame_larger_than_any_allowance_still_passes() -> None:
    bucket = TokenBucket(1000, 0.0, idle_bytes=10, catch_up_s=0.02)
    assert bucket.wait_s(5000, 0.0) == pytest.approx(4.99)
    assert bucket.wait_s(5000, 4.99) == pytest.approx(0.0, abs=1e-9)


def test_a_backlog_that_waited_catches_up_only_so_far() -> None:
    bucket = TokenBucket(1e6, 0.0, idle_bytes=0, catch_up_s=0.02)
    assert bucket.wait_s(10_000, 60.0) == 0.0  # asleep for a minute with work waiting
    bucket.charge(20_000, 60.0)
    assert bucket.wait_s(1000, 60.0) == pytest.approx(0.001)


def test_bursts_follow_the_link() -> None:
    pace, now = Pace(1000, fixed=False, window_s=0.001, most_bytes=64_000), 0.0

    def drain(rate: float, seconds: float) -> int:
        nonlocal now
        end = now + seconds
        while now < end:
            pace.judge(now)
            now += 0.0005
            pace.count(int(rate * 0.0005))
        return pace.burst_bytes

    assert drain(500e3, 0.1) == 1000  # half a block a window: one block
    assert drain(3e6, 0.1) == 1000  # three: still one
    assert drain(20e6, 0.1) == pytest.approx(20_000, rel=0.35)
    assert drain(1e9, 0.1) == 64_000
    assert drain(500e3, 0.1) == 1000
    fixed = Pace(1000, fixed=True)
    for step in range(100):
        fixed.count(10_000_000)
        assert not fixed.judge(step * 0.001)
    assert fixed.burst_bytes == 1000


# ---- frames and streams


class Collector:
    """A sink that keeps every payload."""

    def __init__(self) -> None:
        self.frames: list[tuple[Frame, bytes]] = []
        self._payload = bytearray()

    def begin(self, frame: Frame) -> list[memoryview]:
        self._payload = bytearray(frame.head.payload_bytes)
        view, half = memoryview(self._payload), frame.head.payload_bytes // 2
        return [view[:half], view[half:half], view[half:]]

    def finish(self, frame: Frame) -> None:
        self.frames.append((frame, bytes(self._payload)))


@given(
    st.lists(
        st.tuples(
            st.text(max_size=20),
            st.integers(0, (1 << 63) - 1),
            st.integers(-1, 1000),
            st.integers(0, 40),
            st.binary(max_size=40) | st.integers(1, 30_000).map(lambda size: random.Random(size).randbytes(size)),
        ),
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
@settings(deadline=None)
def test_frames_survive_any_splitting(frames, rng) -> None:
    stream, expected = b"", []
    for request, generation, layer, num_rows, payload in frames:
        tag, rows = Tag(request, generation, layer), rng.randbytes(16 * num_rows)
        stream += pack_head(Kind.DATA, tag=tag, post=generation, value=7, rows=rows, payload=(payload,)) + payload
        expected.append((tag, rows, payload))
    sink = Collector()
    reader = FrameReader(sink)
    at = 0
    while at < len(stream):
        left = limit = min(len(stream) - at, rng.choice([1, 3, 70, 5000, 1 << 20]))
        for buffer in reader.buffers():
            size = min(len(buffer), left)
            buffer[:size] = stream[at : at + size]
            at, left = at + size, left - size
        reader.advance(limit - left)
    assert [(frame.tag, frame.rows, payload) for frame, payload in sink.frames] == expected


@pytest.mark.parametrize(
    ("position", "words"), [(0, "not a frame"), (5, "checksum"), (9, "checksum|limits"), (HEAD_BYTES, "checksum")]
)
def test_a_damaged_head_is_noticed(position: int, words: str) -> None:
    data = bytearray(pack_head(Kind.DATA, tag=Tag("request", 1, 2), rows=bytes(16)))
    data[position] ^= 64
    with pytest.raises(TransportError, match=words):
        parse_head(memoryview(data + bytes(20_000)))


def test_random_bytes_are_no_frames() -> None:
    rng = random.Random(5)
    for _ in range(200):
        reader = FrameReader(Collector())
        data = rng.randbytes(HEAD_BYTES)
        reader.buffers()[0][: len(data)] = data
        with pytest.raises(TransportError):
            reader.advance(len(data))


# ---- handshakes


def _meet(dialer: Handshake, listener: Handshake) -> str:
    """Pass bytes between two sides until both are finished; the error of the one that gives up, as its text."""
    wires = {dialer: b"", listener: b""}  # towards each
    for _ in range(20):
        for one, other in ((dialer, listener), (listener, dialer)):
            wires[other] += one.take()
            while len(wires[one]) >= one.wanted and one.peer is None:
                data, wires[one] = wires[one][: one.wanted], wires[one][one.wanted :]
                try:
                    one.feed(data)
                except TransportError as error:
                    wires[other] += one.take()
                    if len(wires[other]) >= other.wanted:
                        _let_hear(other, wires[other])
                    return str(error)
                wires[other] += one.take()
    assert dialer.peer is not None
    assert listener.peer is not None
    return ""


def _let_hear(side: Handshake, data: bytes) -> None:
    """The refusal reaches the one refused, as an error of the same meaning."""
    with pytest.raises(TransportError):
        _feed(side, data)


def _feed(side: Handshake, data: bytes) -> None:
    while data and len(data) >= side.wanted:
        part, data = data[: side.wanted], data[side.wanted :]
        side.feed(part)


A, B = Identity("tcp", "a", "here:1", 10.0), Identity("tcp", "b", "there:2", 0.5)


def test_two_of_one_secret_learn_each_others_names() -> None:
    dialer, listener = Handshake(A, "s", dialer=True), Handshake(B, "s", dialer=False)
    assert _meet(dialer, listener) == ""
    assert (dialer.peer, listener.peer) == (B, A)


@pytest.mark.parametrize(
    ("identity", "secret", "words"),
    [
        (B, "other", "secrets differ"),
        (B, "", "secrets differ"),
        (Identity("shm", "b", "@x", 1.0), "s", "transport, this side"),
        (Identity("tcp", "a", "x", 1.0), "s", "itself"),
    ],
)
def test_strangers_are_turned_away(identity: Identity, secret: str, words: str) -> None:
    assert words in _meet(Handshake(A, "s", dialer=True), Handshake(identity, secret, dialer=False))
    assert words in _meet(Handshake(identity, secret, dialer=True), Handshake(A, "s", dialer=False))


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hello = Handshake(A, "s", dialer=True).take()
    newer = hello[:8] + (9).to_bytes(2, "little") + hello[10:]
    listener = Handshake(B, "s", dialer=False)
    with pytest.raises(TransportError, match="speaks transport version 9, this side version 1"):
        listener.feed(newer[: listener.wanted])
    assert b"version 9" in listener.take()  # the caller is told


def test_the_secret_does_not_travel_and_proofs_do_not_work_twice() -> None:
    secret = "correct horse battery staple"
    dialer, listener = Handshake(A, secret, dialer=True), Handshake(B, secret, dialer=False)
    said = [dialer.take()]
    for side, other in ((listener, dialer), (dialer, listener)):
        _feed(side, said[-1])
        said.append(side.take())
        assert other is not side
    assert secret.encode() not in b"".join(said)
    # played back word for word to a listener with a fresh nonce
    again = Handshake(B, secret, dialer=False)
    with pytest.raises(TransportError, match="secrets differ"):
        _feed(again, said[0] + said[2])


@given(st.binary(min_size=16, max_size=16), st.binary(max_size=200))
@settings(deadline=None)
def test_garbage_is_refused(prelude: bytes, body: bytes) -> None:
    listener = Handshake(B, "s", dialer=False)
    with pytest.raises(TransportError):
        listener.feed(prelude[: listener.wanted])
    listener = Handshake(B, "s", dialer=False)
    with pytest.raises(TransportError):  # a proper prelude around a body that is none
        _feed(listener, b"NARROWS\0" + bytes([1, 0, 1, 0]) + len(body).to_bytes(4, "little") + body)


# ---- memory


def test_revocations_cover_earlier_generations_and_forget_the_oldest() -> None:
    revoked = Revocations()
    assert not revoked.covers("r", 0)
    revoked.add("r", 3)
    revoked.add("r", 2)
    assert [revoked.covers("r", generation) for generation in (2, 3, 4)] == [True, True, False]
    for number in range(70_000):
        revoked.add(f"other-{number}", 0)
    assert not revoked.covers("r", 3)
    assert revoked.covers("other-69999", 0)


def test_where_writes_fit() -> None:
    buffer = memoryview(bytearray(10))
    assert misfit(buffer, 0, 10) is None
    assert misfit(buffer, 10, 0) is None
    for offset, length in ((0, 11), (-1, 1), (10, 1), (5, -1), (1 << 62, 1 << 62)):
        assert "outside" in (misfit(buffer, offset, length) or "")
    assert "unknown" in (misfit(None, 0, 0) or "")
    table = RegionTable("tcp")
    region = table.add(allocate_private(10))
    assert table.find(int(region.key.token, 16)) is region.buffer
    assert table.find(0) is None
