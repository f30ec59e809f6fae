"""One instance's pages as its runtime sees them: allocator, prefix index and block tables behind four calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from narrows.kv.allocator import PageAllocator
from narrows.kv.layout import pages_for
from narrows.kv.prefix import PrefixIndex
from narrows.kv.table import BlockTable


@dataclass(frozen=True, slots=True)
class Admission:
    """Room for a request: its table, and how many leading tokens already have their KV there."""

    table: BlockTable
    cached_tokens: int


class KVCache:
    """Integers only; the tensors are KVPool's. Each table is given back with one `release`."""

    def __init__(self, num_pages: int, page_size: int, *, reuse_prefixes: bool = True, salt: bytes = b"") -> None:
        self.page_size = page_size
        self.prefix = PrefixIndex(page_size, salt)
        self.pages = PageAllocator(num_pages, on_evict=self.prefix.forget)
        self.reuses_prefixes = reuse_prefixes

    def admit(self, tokens: Sequence[int]) -> Admission | None:
        """Room for all of `tokens`, which are to be computed here, or None and no page taken.

        Known prefixes are shared, whole pages at a time; at least the last token is left to compute, so the first
        position that is written lies in a page of this request alone.
        """
        assert tokens
        known = self.prefix.match(tokens, max_tokens=len(tokens) - 1) if self.reuses_prefixes else []
        self.pages.retain(known)  # first, or the allocation could evict them
        fresh = self.pages.try_alloc(
            pages_for(len(tokens), self.page_size) - len(known), after=known[-1] if known else None
        )
        if fresh is None:
            self.pages.release(known)
            return None
        return Admission(BlockTable(self.page_size, known + fresh, len(tokens)), len(known) * self.page_size)

    def reserve(self, num_tokens: int) -> BlockTable | None:
        """Room for tokens whose KV comes from elsewhere, nothing shared; or None and no page taken."""
        pages = self.pages.try_alloc(pages_for(num_tokens, self.page_size))
        return None if pages is None else BlockTable(self.page_size, pages, num_tokens)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make the table `num_tokens` long in all; False and no change when there is no room."""
        missing = pages_for(num_tokens, self.page_size) - len(table.pages)
        if missing <= 0:
            table.grow(num_tokens)
            return True
        pages = self.pages.try_alloc(missing, after=table.pages[-1] if table.pages else None)
        if pages is None:
            return False
        table.grow(num_tokens, pages)
        return True

    def commit(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """The KV of `tokens`, the table's first, is computed and complete: later requests may share its full pages."""
        assert len(tokens) <= table.num_tokens
        if self.reuses_prefixes:
            self.pages.keep(self.prefix.insert(tokens, table.pages))

    def discard(self, table: BlockTable) -> None:
        """What was committed of this table is not to be trusted: nobody shares it from now on."""
        known = [page for page in table.pages if page in self.prefix]
        for page in known:
            self.prefix.forget(page)
        self.pages.drop(known)

    def release(self, table: BlockTable) -> None:
        """Give the table's pages back and empty it; committed pages stay cached until their room is needed."""
        pages, table.pages, table.num_tokens = table.pages, [], 0
        self.pages.release(pages)
