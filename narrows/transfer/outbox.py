"""What waits to be sent to one peer: most urgent class first, one frame at a time.

post:    DATA ... DATA  PUT ... PUT  END      (or ABORT from wherever it was stopped)
message: MESSAGE ... MESSAGE
"""

import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from narrows.transfer.base import Post, PostId, Priority, Put, Tag
from narrows.transfer.frames import HEAD_BYTES, MAX_ROWS, MORE, PUT_ROW, Buffer, Kind, pack_head
from narrows.transfer.memory import token_of
from narrows.transfer.runs import Pieces, check_copy, cut, merge


class OutPost:
    """A post on its way. `cursor` counts its steps (blocks, then trailing frames) that have been given to the link.

    A block is the part of a post that may always go in one frame; a frame may take several.

    Building one raises ValueError or TransportError for what can not be sent (see Transport.post).
    """

    def __init__(self, id: PostId, post: Post, kind: str, block_bytes: int) -> None:
        for copy in post.copies:
            check_copy(copy)
        self.id = id
        self.tag = post.tag
        self.priority = post.priority
        self.note = post.note
        self.num_bytes = post.num_bytes
        self.region = token_of(post.target, kind)
        self.buffers = tuple(copy.source.buffer for copy in post.copies)
        self.pieces: Pieces = cut(merge(post.copies), block_bytes, MAX_ROWS)
        self.cursor = 0
        self.wire_bytes = 0
        self.waits = False  # may not move now: its target is not reachable yet (shared memory)
        self.aborted = False  # see abort()
        self._rows = np.stack((self.pieces.targets, self.pieces.lengths), axis=1)
        self._piece_ends: list[int] = self.pieces.frames[1:].tolist()  # of each block
        byte_ends = np.cumsum(self.pieces.lengths)
        self._byte_ends: list[int] = byte_ends[self.pieces.frames[1:] - 1].tolist()
        self._num_blocks = len(self._byte_ends)
        self._span = 1  # steps that the frame encoded last takes
        self._puts = _group(post.trailing, post.note, kind, block_bytes)
        self._num_steps = self._num_blocks + len(self._puts)
        self._head_bytes = HEAD_BYTES + len(post.tag.request.encode())

    @property
    def started(self) -> bool:
        return self.cursor > 0

    @property
    def sent(self) -> bool:
        return self.cursor >= self._num_steps

    @property
    def at_data(self) -> bool:
        """The next frame is DATA."""
        return self.cursor < self._num_blocks and not self.aborted

    def take_pieces(self, limit: int) -> tuple[int, int, int]:
        """Pieces of the next frame, which must be DATA, as (first, end, bytes): as many whole blocks as fit `limit`
        bytes and one frame's table, at least one."""
        cursor = self.cursor
        low, begin = (self._piece_ends[cursor - 1], self._byte_ends[cursor - 1]) if cursor else (0, 0)
        end = min(
            bisect.bisect_right(self._byte_ends, begin + limit, cursor),
            bisect.bisect_right(self._piece_ends, low + MAX_ROWS, cursor),
        )
        self._span = max(1, end - cursor)
        last = cursor + self._span - 1
        return low, self._piece_ends[last], self._byte_ends[last] - begin

    def next_bytes(self) -> int:
        """Bytes of the next step, about (row tables aside)."""
        if self.at_data:
            cursor = self.cursor
            return self._head_bytes + self._byte_ends[cursor] - (self._byte_ends[cursor - 1] if cursor else 0)
        return self._head_bytes if self.aborted else self._head_bytes + self._puts[self._put_index][2]

    def abort(self) -> None:
        """Send nothing more but, if anything was sent, the word that nothing more comes."""
        self.aborted = True

    def encode(self, checksum: bool, limit: int = 0) -> list[Buffer]:
        """The next frame, to be sent as it is; data is not copied. DATA takes as many blocks as fit `limit` bytes."""
        self._span = 1
        if self.aborted:
            return [pack_head(Kind.ABORT, tag=self.tag, post=self.id)]
        if self.at_data:
            low, high, _ = self.take_pieces(limit)
            payload = self.payload(low, high)
            rows = self._rows[low:high].tobytes()
            head = pack_head(
                Kind.DATA,
                tag=self.tag,
                post=self.id,
                value=self.region,
                rows=rows,
                payload=payload,
                checksum=checksum,
            )
            return [head, *payload]
        rows, data, _ = self._puts[self._put_index]
        last = self.cursor + 1 == self._num_steps
        head = pack_head(
            Kind.END if last else Kind.PUT,
            tag=self.tag,
            post=self.id,
            value=self.num_bytes,
            rows=rows,
            payload=(data,),
            checksum=checksum,
        )
        return [head, data]

    def payload(self, low: int, high: int) -> list[Buffer]:
        """Source bytes of these pieces."""
        pieces, buffers = self.pieces, self.buffers
        begins = pieces.sources[low:high]
        ends = (begins + pieces.lengths[low:high]).tolist()
        if len(buffers) == 1:
            buffer = buffers[0]
            return [buffer[begin:end] for begin, end in zip(begins.tolist(), ends, strict=True)]
        which = pieces.buffers[low:high].tolist()
        return [buffers[index][begin:end] for index, begin, end in zip(which, begins.tolist(), ends, strict=True)]

    def writes(self) -> Iterator[tuple[int, int, Buffer]]:
        """What the next frame writes, as (region token, offset, bytes)."""
        if self.at_data:
            low, high, _ = self.take_pieces(0)
            targets = self.pieces.targets[low:high].tolist()
            for target, data in zip(targets, self.payload(low, high), strict=True):
                yield self.region, target, data
        else:
            rows, puts, _ = self._puts[self._put_index]
            at = 0
            for token, offset, length in PUT_ROW.iter_unpack(rows):
                yield token, offset, puts[at : at + length]
                at += length

    def advance(self, num_bytes: int) -> None:
        """The frame encoded (or taken) last has been given to the link, at this cost."""
        self.wire_bytes += num_bytes
        self.cursor = self._num_steps if self.aborted else self.cursor + self._span

    @property
    def _put_index(self) -> int:
        return self.cursor - self._num_blocks


def _group(puts: Sequence[Put], note: bytes, kind: str, block_bytes: int) -> list[tuple[bytes, bytes, int]]:
    """(rows, payload, size) of the PUT frames and the END, each within block_bytes unless the note alone is longer."""
    groups: list[list[Put]] = [[]]
    size = 0
    for put in puts:
        if len(put.data) > block_bytes:
            raise ValueError(f"put: {len(put.data)} bytes are more than one frame of {block_bytes} (block_bytes)")
        if groups[-1] and (size + len(put.data) > block_bytes or len(groups[-1]) == MAX_ROWS):
            groups.append([])
            size = 0
        groups[-1].append(put)
        size += len(put.data)
    if len(note) > block_bytes:
        raise ValueError(f"note: {len(note)} bytes are more than one frame of {block_bytes} (block_bytes)")
    if size + len(note) > block_bytes:
        groups.append([])
    frames = []
    for index, group in enumerate(groups):
        rows = np.array([(token_of(put.target, kind), put.offset, len(put.data)) for put in group], dtype=np.int64)
        data = b"".join(put.data for put in group)
        if index == len(groups) - 1:
            data += note
        frames.append((rows.tobytes(), data, len(data) + len(group) * PUT_ROW.size))
    return frames


class OutMessage:
    """A message on its way, in parts of at most block_bytes."""

    waits = False
    at_data = False

    def __init__(self, payload: bytes, priority: Priority, block_bytes: int) -> None:
        self.priority = priority
        self.payload = payload
        self._view = memoryview(payload)
        self._block_bytes = block_bytes
        self._at = 0
        self._ended = False

    @property
    def sent(self) -> bool:
        return self._ended

    def next_bytes(self) -> int:
        return HEAD_BYTES + min(self._block_bytes, len(self.payload) - self._at)

    def encode(self, checksum: bool, limit: int = 0) -> list[Buffer]:
        part = self._view[self._at : self._at + self._block_bytes]
        more = self._at + len(part) < len(self.payload)
        head = pack_head(
            Kind.MESSAGE, value=self.priority, payload=(part,), flags=MORE if more else 0, checksum=checksum
        )
        return [head, part]

    def advance(self, num_bytes: int) -> None:
        self._at += self._block_bytes
        self._ended = self._at >= len(self.payload)


Item = OutPost | OutMessage


class Outbox:
    """Queues of one peer. Control frames go before everything and are few."""

    def __init__(self) -> None:
        self.control: deque[bytes] = deque()
        self.passing: deque[tuple[bytes, int]] = deque()  # control frames with a descriptor
        self.open: dict[PostId, OutPost] = {}  # posts that have not ended
        self._classes: tuple[deque[Item], ...] = tuple(deque() for _ in Priority)

    def put(self, item: Item) -> None:
        if isinstance(item, OutPost):
            self.open[item.id] = item
        self._classes[item.priority].append(item)

    def head(self) -> Item | None:
        """What is to be sent next."""
        for items in self._classes:
            if items and not items[0].waits:
                return items[0]
        return None

    def advance(self, item: Item, num_bytes: int) -> None:
        """The next frame of `item`, which is a head, has been given to the link."""
        item.advance(num_bytes)
        if item.sent:
            items = self._classes[item.priority]
            assert items[0] is item
            items.popleft()

    def cancel(self, request: str, generation: int) -> list[OutPost]:
        """Stop this attempt's posts; those returned are over. The others end with the target's answer."""
        over = [post for post in self._of(request, generation) if not post.started]
        for post in self._of(request, generation):
            if post.started and not post.sent:
                post.abort()
        for post in over:
            self._remove(post)
        return over

    def end(self, id: PostId) -> OutPost | None:
        """The target has answered (or the post can not go on): it is over. None if it was over before."""
        post = self.open.pop(id, None)
        if post is not None and not post.sent:
            if post.started:
                post.abort()  # the target waits for the end of what it refused
            else:
                self._remove(post)
        return post

    def waiting_for(self, region: int) -> Iterable[OutPost]:
        """Open posts that wait for their target region."""
        return [post for post in self.open.values() if post.waits and post.region == region]

    def _of(self, request: str, generation: int) -> list[OutPost]:
        tagged: list[OutPost] = []
        for post in self.open.values():
            if same_attempt(post.tag, request, generation):
                tagged.append(post)
        return tagged

    def _remove(self, post: OutPost) -> None:
        self.open.pop(post.id, None)
        self._classes[post.priority].remove(post)


def same_attempt(tag: Tag, request: str, generation: int) -> bool:
    return tag.request == request and tag.generation == generation
