"""Which pages are in use: reference counts, and an LRU of unreferenced pages whose content may still be wanted.

free ──try_alloc──▶ referenced ──release──▶ free            (not kept)
                      ▲   └─────release──▶ cached           (kept: its content is known to a prefix index)
                      └──────retain──────── cached ──try_alloc, when free pages run out──▶ evicted, referenced
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from narrows.core.ids import PageId


def _nothing(_page: PageId) -> None:
    return None


class PageAllocator:
    """Hands out pages 0..num_pages-1.

    `on_evict` is told of each kept page just before it is handed out for new content. Not thread-safe.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[PageId], None] = _nothing) -> None:
        assert num_pages >= 1
        self.num_pages = num_pages
        self._on_evict = on_evict
        self._references = [0] * num_pages
        self._kept = [False] * num_pages
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._num_plain = num_pages  # pages in _is_free
        self._cached: OrderedDict[PageId, None] = OrderedDict()  # least recently used first

    @property
    def num_cached(self) -> int:
        """Unreferenced pages that still hold wanted content."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Pages that try_alloc can hand out; cached ones, which can be dropped, included."""
        return self._num_plain + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages with references."""
        return self.num_pages - self.num_free

    def references(self, page: PageId) -> int:
        return self._references[page]

    def try_alloc(self, n: int, *, after: PageId | None = None) -> list[PageId] | None:
        """Take n pages, each with one reference, or None and no change when there are not enough.

        Free pages go first, in few contiguous runs, then cached ones from the least recently used. Pages come in
        ascending order, except that free pages right behind `after` come first: a growing request stays contiguous.
        """
        assert n >= 0
        if n > self.num_free:
            return None
        behind = [] if after is None else self._take_behind(min(n, self._num_plain), after)
        taken = self._take_free(min(n, self._num_plain + len(behind)) - len(behind))
        while len(behind) + len(taken) < n:
            page, _ = self._cached.popitem(last=False)
            self._on_evict(page)
            self._kept[page] = False
            taken.append(page)
        pages = behind + sorted(taken)
        for page in pages:
            assert self._references[page] == 0
            self._references[page] = 1
        return pages

    def retain(self, pages: Iterable[PageId]) -> None:
        """One more reference to each page, which is in use or cached."""
        for page in pages:
            if self._references[page] == 0:
                assert page in self._cached, f"page {page} is free"
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Iterable[PageId]) -> None:
        """One reference less to each page of a sequence, given in its order.

        A page without references becomes cached if it is kept, else free. The last pages count as the least recently
        used: a prefix is of use without what follows it, not the reverse.
        """
        for page in reversed(list(pages)):
            assert self._references[page] > 0, f"page {page} has been released already"
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._kept[page]:
                    self._cached[page] = None
                else:
                    self._put_free(page)

    def keep(self, pages: Iterable[PageId]) -> None:
        """Mark pages in use as worth caching once they are unreferenced, until they are evicted."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is not in use"
            self._kept[page] = True

    def drop(self, pages: Iterable[PageId]) -> None:
        """The reverse of keep, for pages in use: without references they become free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is not in use"
            self._kept[page] = False

    def _put_free(self, page: PageId) -> None:
        self._is_free[page] = True
        self._num_plain += 1

    def _take_behind(self, most: int, page: PageId) -> list[PageId]:
        """Free pages page+1, page+2, ... up to the first that is not free."""
        stop = page + 1
        while stop <= page + most and stop < self.num_pages and self._is_free[stop]:
            stop += 1
        return self._take_run(page + 1, stop)

    def _take_free(self, n: int) -> list[PageId]:
        """n free pages: the smallest run that holds all, else the longest runs."""
        if n == 0:
            return []
        starts, lengths = self._free_runs()
        fitting = np.flatnonzero(lengths >= n)
        order = fitting[np.argmin(lengths[fitting])][None] if fitting.size else np.argsort(-lengths, kind="stable")
        taken: list[PageId] = []
        for start, length in zip(starts[order].tolist(), lengths[order].tolist(), strict=True):
            taken += self._take_run(start, start + min(length, n - len(taken)))
            if len(taken) == n:
                break
        assert len(taken) == n
        return taken

    def _take_run(self, start: int, stop: int) -> list[PageId]:
        self._is_free[start:stop] = False
        self._num_plain -= stop - start
        return [PageId(page) for page in range(start, stop)]

    def _free_runs(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Starts and lengths of all runs of free pages, ascending."""
        bordered = np.zeros(self.num_pages + 2, dtype=np.bool_)
        bordered[1:-1] = self._is_free
        edges = np.flatnonzero(bordered[1:] != bordered[:-1])
        return edges[::2], edges[1::2] - edges[::2]
