"""Where one request's tokens are: pages in order."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from narrows.core.ids import PageId


class BlockTable:
    """Position p of the request lies in slot `pages[p // page_size] * page_size + p % page_size`.

    `num_tokens` counts the positions in use, `capacity` those the pages have room for. The pages' references belong to
    whoever allocated them.
    """

    def __init__(self, page_size: int, pages: Iterable[PageId] = (), num_tokens: int = 0) -> None:
        self.page_size = page_size
        self.pages: list[PageId] = []
        self.num_tokens = 0
        self.grow(num_tokens, pages)

    @property
    def capacity(self) -> int:
        return len(self.pages) * self.page_size

    def grow(self, num_tokens: int, pages: Iterable[PageId] = ()) -> None:
        """Append pages and use `num_tokens` positions in all, which must not be fewer than before."""
        self.pages.extend(pages)
        assert self.num_tokens <= num_tokens <= self.capacity, (self.num_tokens, num_tokens, self.capacity)
        self.num_tokens = num_tokens

    def slot(self, position: int) -> int:
        """The slot of one position."""
        index, within = divmod(position, self.page_size)
        return self.pages[index] * self.page_size + within

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Slots of positions start..stop-1, in order."""
        assert 0 <= start <= stop <= self.capacity, (start, stop, self.capacity)
        positions = np.arange(start, stop, dtype=np.int32)
        first = start // self.page_size
        pages = np.array(self.pages[first : -(-stop // self.page_size)], dtype=np.int32)
        return (pages[positions // self.page_size - first] * self.page_size + positions % self.page_size).astype(
            np.int32, copy=False
        )

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The same slots as (first slot, number of slots), adjacent runs merged."""
        assert 0 <= start <= stop <= self.capacity, (start, stop, self.capacity)
        runs: list[tuple[int, int]] = []
        at = start
        while at < stop:
            index, within = divmod(at, self.page_size)
            slot = self.pages[index] * self.page_size + within
            count = min(self.page_size - within, stop - at)
            if runs and sum(runs[-1]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + count)
            else:
                runs.append((slot, count))
            at += count
        return runs
