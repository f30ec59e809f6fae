"""The allocator against a plain model of who holds what."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from narrows.core.ids import PageId
from narrows.kv.allocator import PageAllocator

NUM_PAGES = 12


class AllocatorMachine(RuleBasedStateMachine):
    """`held` are the holders' page lists; `kept` the pages whose content is wanted; `lru` these without a holder."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[PageId] = []
        self.pages = PageAllocator(NUM_PAGES, self.evicted.append)
        self.held: list[list[PageId]] = []
        self.kept: set[PageId] = set()
        self.lru: list[PageId] = []

    def count(self) -> Counter[PageId]:
        return Counter(page for pages in self.held for page in pages)

    @rule(n=st.integers(0, NUM_PAGES + 1), after=st.none() | st.integers(0, NUM_PAGES - 1))
    def allocate(self, n: int, after: int | None) -> None:
        room = NUM_PAGES - len(self.count())
        plain = room - len(self.lru)
        self.evicted.clear()
        got = self.pages.try_alloc(n, after=None if after is None else PageId(after))
        if n > room:
            assert got is None
            assert not self.evicted
            return
        assert got is not None
        assert len(set(got)) == n
        assert not set(got) & set(self.count()), "a page with references was handed out"
        expected = self.lru[: max(0, n - plain)]
        assert self.evicted == expected, "cached pages go last, the least recently used first"
        self.lru = self.lru[len(expected) :]
        self.kept -= set(expected)
        self.held.append(got)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.held))
        self.pages.retain(pages)
        self.held.append(list(pages))

    @precondition(lambda self: self.lru)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.lru), min_size=1, unique=True))
        self.pages.retain(pages)
        self.lru = [page for page in self.lru if page not in pages]
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        pages = data.draw(st.sampled_from(self.held))
        self.pages.keep(pages)
        self.kept |= set(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pages.release(pages)
        left = self.count()
        self.lru += [page for page in reversed(pages) if page not in left and page in self.kept]

    @invariant()
    def counters_agree(self) -> None:
        count = self.count()
        assert self.pages.num_used == len(count)
        assert self.pages.num_free == NUM_PAGES - len(count)
        assert self.pages.num_cached == len(self.lru)
        assert [self.pages.references(PageId(p)) for p in range(NUM_PAGES)] == [
            count[PageId(p)] for p in range(NUM_PAGES)
        ]


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@given(st.sets(st.integers(0, 39)), st.integers(1, 40))
@settings(deadline=None)
def test_takes_the_smallest_run_that_fits_else_the_fewest_runs(busy: set[int], n: int) -> None:
    pages = PageAllocator(40)
    everything = pages.try_alloc(40)
    assert everything is not None
    pages.release([page for page in everything if page not in busy])
    text = "".join("x" if page in busy else "." for page in range(40))
    lengths = sorted((len(run) for run in text.split("x") if run), reverse=True)
    got = pages.try_alloc(n)
    if n > sum(lengths):
        assert got is None
        return
    assert got is not None
    assert got == sorted(got)
    num_runs = 1 + sum(b != a + 1 for a, b in pairwise(got))
    fewest = next(k for k in range(1, 41) if sum(lengths[:k]) >= n)
    assert num_runs == fewest
    if fewest == 1:  # the rest of a bigger run is not broken up when a smaller one is enough
        before = len(text[: got[0]]) - len(text[: got[0]].rstrip("."))
        run = before + len(text[got[0] :].split("x")[0])
        assert run == min(length for length in lengths if length >= n)


def test_a_growing_request_stays_contiguous() -> None:
    pages = PageAllocator(8)
    first = pages.try_alloc(2)
    assert first == [0, 1]
    assert pages.try_alloc(1, after=first[-1]) == [2]
    assert pages.try_alloc(2, after=PageId(7)) == [3, 4]


def test_pages_behind_come_first_even_when_others_lie_lower() -> None:
    pages = PageAllocator(6)
    held = pages.try_alloc(6)
    assert held is not None
    pages.release([held[0], held[4]])
    assert pages.try_alloc(2, after=held[3]) == [4, 0]


def test_the_end_of_a_sequence_is_evicted_first() -> None:
    evicted: list[PageId] = []
    pages = PageAllocator(3, evicted.append)
    held = pages.try_alloc(3)
    assert held is not None
    pages.keep(held)
    pages.release(held)
    pages.try_alloc(2)
    assert evicted == [2, 1]


def test_misuse_is_an_assertion() -> None:
    pages = PageAllocator(2)
    held = pages.try_alloc(1)
    assert held is not None
    pages.release(held)
    with pytest.raises(AssertionError, match="released already"):
        pages.release(held)
    with pytest.raises(AssertionError, match="is free"):
        pages.retain(held)
    with pytest.raises(AssertionError, match="not in use"):
        pages.keep(held)
