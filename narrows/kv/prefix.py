"""Which pages already hold the KV of a sequence's beginning.

A full page is known by the digest of its own tokens chained onto its predecessor's digest, so that one digest stands
for the whole prefix: equal digests mean equal prefixes (128 bits, and `salt` keeps others from guessing them).
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from narrows.core.ids import PageId

_DIGEST_BYTES = 16


class PrefixIndex:
    """Digest chain to page. Knows nothing of reference counts: the caller retains what it matches."""

    def __init__(self, page_size: int, salt: bytes = b"") -> None:
        """`salt` of at most 64 bytes separates indexes whose pages must not be mistaken for each other's."""
        self.page_size = page_size
        self._salt = salt
        self._page_of: dict[bytes, PageId] = {}
        self._digest_of: dict[PageId, bytes] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: object) -> bool:
        return page in self._digest_of

    def match(self, tokens: Sequence[int], max_tokens: int | None = None) -> list[PageId]:
        """Pages of the longest known prefix of `tokens`, in order.

        At most `max_tokens` tokens are matched: a caller that wants logits leaves at least one token to compute.
        """
        stop = len(tokens) if max_tokens is None else min(len(tokens), max_tokens)
        pages: list[PageId] = []
        for digest in self._digests(tokens[: max(stop, 0)]):
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[PageId]) -> list[PageId]:
        """Register the full pages of a computed sequence; `pages` holds `tokens` in order.

        A prefix that is known already keeps the page it has. Returns the pages that are known by this call.
        """
        added: list[PageId] = []
        for digest, page in zip(self._digests(tokens), pages, strict=False):
            if digest not in self._page_of:
                assert page not in self._digest_of, f"page {page} holds another prefix"
                self._page_of[digest] = page
                self._digest_of[page] = digest
                added.append(page)
        return added

    def forget(self, page: PageId) -> None:
        """The page is about to hold something else."""
        del self._page_of[self._digest_of.pop(page)]

    def _digests(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The chain's digest at each full page."""
        raw = memoryview(array("q", tokens)).cast("B")
        step = 8 * self.page_size
        digest = b""
        for at in range(0, len(raw) - step + 1, step):
            chained = blake2b(digest, digest_size=_DIGEST_BYTES, key=self._salt)
            chained.update(raw[at : at + step])
            digest = chained.digest()
            yield digest
