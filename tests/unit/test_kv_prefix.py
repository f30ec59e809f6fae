"""The prefix index against a plain dict of prefixes; the cache's four calls against what callers rely on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from narrows.core.ids import PageId
from narrows.kv.cache import KVCache
from narrows.kv.prefix import PrefixIndex
from narrows.kv.table import BlockTable

PAGE = 2
Tokens = st.lists(st.integers(0, 1), max_size=9).map(tuple)


@given(st.lists(st.tuples(st.booleans(), Tokens), max_size=20), st.data())
@settings(deadline=None)
def test_like_a_dict_of_prefixes(steps: list[tuple[bool, tuple[int, ...]]], data: st.DataObject) -> None:
    index, known = PrefixIndex(PAGE), dict[tuple[int, ...], PageId]()
    fresh = map(PageId, range(10_000))
    for forget, tokens in steps:
        if forget and known:
            prefix = data.draw(st.sampled_from(sorted(known)))
            index.forget(known.pop(prefix))
            continue
        pages = [next(fresh) for _ in range(-(-len(tokens) // PAGE))]
        full = {tokens[: PAGE * (i + 1)]: page for i, page in enumerate(pages) if PAGE * (i + 1) <= len(tokens)}
        expected_new = [page for prefix, page in full.items() if prefix not in known]
        assert index.insert(tokens, pages) == expected_new
        known = full | known
        asked = data.draw(Tokens)
        most = data.draw(st.none() | st.integers(-1, 10))
        limit = len(asked) if most is None else min(len(asked), most)
        expected = []
        for stop in range(PAGE, limit + 1, PAGE):
            if asked[:stop] not in known:
                break
            expected.append(known[asked[:stop]])
        assert index.match(asked, most) == expected
        assert len(index) == len(known)


def test_the_same_tokens_behind_another_beginning_are_another_page() -> None:
    index = PrefixIndex(PAGE)
    index.insert((1, 1, 5, 5), [PageId(0), PageId(1)])
    assert index.match((2, 2, 5, 5)) == []
    assert index.match((5, 5)) == []
    assert index.match((1, 1, 5, 5, 9)) == [0, 1]


def test_token_boundaries_are_part_of_the_digest() -> None:
    index = PrefixIndex(PAGE)
    index.insert((1, 256), [PageId(0)])
    assert index.match((257, 0)) == []
    assert index.match((1, 2**40)) == []


def test_a_salt_changes_every_digest() -> None:
    plain, salted = PrefixIndex(PAGE), PrefixIndex(PAGE, b"model-b")
    assert next(plain._digests((1, 2))) != next(salted._digests((1, 2)))


class CacheMachine(RuleBasedStateMachine):
    """A pool whose slots remember which token, behind which prefix, was written to them last."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(6, PAGE)
        self.slots: dict[int, tuple[int, ...]] = {}
        self.live: list[tuple[BlockTable, tuple[int, ...]]] = []

    def write(self, table: BlockTable, tokens: tuple[int, ...], start: int) -> None:
        for position, slot in zip(range(start, len(tokens)), table.slots(start, len(tokens)).tolist(), strict=True):
            self.slots[slot] = tokens[: position + 1]

    @rule(tokens=Tokens.filter(bool))
    def admit(self, tokens: tuple[int, ...]) -> None:
        free = self.cache.pages.num_free
        admission = self.cache.admit(tokens)
        if admission is None:
            assert self.cache.pages.num_free == free
            return
        assert admission.cached_tokens < len(tokens)
        assert admission.cached_tokens % PAGE == 0
        for position, slot in enumerate(admission.table.slots(0, admission.cached_tokens).tolist()):
            assert self.slots[slot] == tokens[: position + 1], "a shared slot holds another prefix"
        self.write(admission.table, tokens, admission.cached_tokens)
        self.live.append((admission.table, tokens))

    @rule(num_tokens=st.integers(1, 8))
    def reserve(self, num_tokens: int) -> None:
        table = self.cache.reserve(num_tokens)
        if table is not None:
            tokens = (7,) * num_tokens
            self.write(table, tokens, 0)
            self.live.append((table, tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple))
    def grow(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        i = data.draw(st.integers(0, len(self.live) - 1))
        table, tokens = self.live[i]
        if self.cache.grow(table, len(tokens) + len(more)):
            self.live[i] = (table, tokens + more)
            self.write(table, tokens + more, len(tokens))
        else:
            assert table.num_tokens == len(tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.cache.commit(*data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.cache.release(table)
        assert table.num_tokens == 0

    @invariant()
    def live_requests_keep_their_tokens(self) -> None:
        for table, tokens in self.live:
            assert table.num_tokens == len(tokens)
            for position, slot in enumerate(table.slots(0, len(tokens)).tolist()):
                assert self.slots[slot] == tokens[: position + 1]
        assert self.cache.pages.num_used == len({page for table, _ in self.live for page in table.pages})
        assert len(self.cache.prefix) >= self.cache.pages.num_cached


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_repeated_prompt_computes_its_last_page_only() -> None:
    cache = KVCache(8, 4)
    first = cache.admit(range(8))
    assert first is not None
    assert first.cached_tokens == 0
    early = cache.admit(range(8))
    assert early is not None
    assert early.cached_tokens == 0, "not computed yet, so not shared"
    cache.commit(first.table, range(8))
    again = cache.admit(range(8))
    assert again is not None
    assert again.cached_tokens == 4, "one token must be left to compute, and pages are shared whole"
    longer = cache.admit(range(9))
    assert longer is not None
    assert longer.cached_tokens == 8
    assert longer.table.pages[:2] == first.table.pages


def test_a_full_pool_refuses_without_taking_or_evicting_anything() -> None:
    cache = KVCache(4, 4)
    first = cache.admit(range(8))
    assert first is not None
    cache.commit(first.table, range(8))
    cache.release(first.table)
    assert cache.admit(range(100)) is None
    assert (cache.pages.num_used, cache.pages.num_cached) == (0, 2)
    again = cache.admit(range(9))
    assert again is not None
    assert again.cached_tokens == 8


def test_without_reuse_nothing_is_shared_or_cached() -> None:
    cache = KVCache(4, 4, reuse_prefixes=False)
    first = cache.admit(range(8))
    assert first is not None
    cache.commit(first.table, range(8))
    cache.release(first.table)
    assert cache.pages.num_cached == 0


def test_committing_more_than_is_there_is_an_assertion() -> None:
    cache = KVCache(4, 4)
    table = cache.reserve(4)
    assert table is not None
    with pytest.raises(AssertionError):
        cache.commit(table, range(5))
