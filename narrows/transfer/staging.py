"""A ring of registered memory where scattered entries are gathered, so that they cross as one piece."""

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Piece:
    begin: int  # counted from the ring's first use, without wrapping
    end: int
    in_use: bool = True


class StagingRing:
    """Hands out pieces of `size` bytes in a row. A piece kept long holds back those given out behind it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pieces: deque[_Piece] = deque()  # oldest first
        self._head = 0

    def take(self, num_bytes: int) -> int | None:
        """The offset of a free piece, or None while there is none."""
        assert 0 < num_bytes <= self.size, (num_bytes, self.size)
        at = self._head % self.size
        begin = self._head if at + num_bytes <= self.size else self._head + self.size - at
        tail = self._pieces[0].begin if self._pieces else begin
        if begin + num_bytes - tail > self.size:
            return None
        self._head = begin + num_bytes
        self._pieces.append(_Piece(begin, self._head))
        return begin % self.size

    def give_back(self, offset: int) -> None:
        """The piece at this offset, which `take` returned, is free again."""
        next(piece for piece in self._pieces if piece.in_use and piece.begin % self.size == offset).in_use = False
        while self._pieces and not self._pieces[0].in_use:
            self._pieces.popleft()
