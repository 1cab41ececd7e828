"""The prefix cache against a plain reference: a dict from whole prefixes to pages, and clocks."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from procs.pages import PagePool
from procs.prefix_cache import PrefixCache

PAGE = 2
PAGES = 24
Prefix = tuple[int, ...]


def ints(values: list[int] | Prefix) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def keep(cache: PrefixCache, tokens: list[int], pages: list[int]) -> list[int]:
    """Insert a row's pages as a row would that held nothing before."""
    return cache.extend(ints([]), ints(tokens), ints(pages), own_only=False).tolist()


def test_match_leaves_the_last_token_out() -> None:
    cache = PrefixCache(9, 4)
    keep(cache, list(range(8)), [3, 5])
    assert cache.match(ints(range(8))).tolist() == [3]
    assert cache.match(ints(range(9))).tolist() == [3, 5]
    assert cache.match(ints([0, 1, 2, 4, 4])).tolist() == []
    assert cache.match(ints([0])).tolist() == []


def test_the_token_behind_a_page_may_belong_to_its_key() -> None:
    cache = PrefixCache(9, 4, behind=1)
    cache.extend(ints([]), ints(range(9)), ints([3, 5]), own_only=False)
    assert cache.match(ints(range(9))).tolist() == [3, 5]
    assert cache.match(ints([*range(8), 7])).tolist() == [3], "the second page was kept for another token behind it"
    assert cache.match(ints([*range(4), 7])).tolist() == []


def test_same_page_tokens_under_other_prefixes_stay_apart() -> None:
    cache = PrefixCache(9, 1)
    keep(cache, [1, 7], [1, 2])
    keep(cache, [2, 7], [3, 4])
    assert cache.match(ints([1, 7, 0])).tolist() == [1, 2]
    assert cache.match(ints([2, 7, 0])).tolist() == [3, 4]
    assert cache.match(ints([7, 7, 0])).tolist() == []


def test_a_second_copy_stays_private() -> None:
    cache = PrefixCache(9, 1)
    first = keep(cache, [1, 2], [1, 2])
    running = cache.extend(ints([]), ints([1, 2, 3]), ints([4, 5, 6]), own_only=True)
    assert running.tolist() == [] and cache.cached == 2
    ending = cache.extend(running, ints([1, 2, 3]), ints([4, 5, 6]), own_only=False)
    assert ending.tolist() == [1, 2, 6] and cache.cached == 3
    cache.unlock(ints(first))
    assert cache.evictable == 0  # the second row still holds 1 and 2
    cache.unlock(ending)
    assert cache.evict(9).tolist() == [6, 2, 1]


def test_evicts_least_recently_used_first_and_nothing_in_use() -> None:
    cache = PrefixCache(9, 1)
    for token in (1, 2, 3):
        cache.unlock(ints(keep(cache, [token], [token])))
    cache.lock(ints([2]))
    cache.lock(ints([1]))
    cache.unlock(ints([1]))
    assert cache.evict(9).tolist() == [3, 1]
    assert cache.match(ints([2, 0])).tolist() == [2]


def test_releasing_twice_is_refused() -> None:
    cache = PrefixCache(9, 1)
    path = ints(keep(cache, [1], [1]))
    cache.unlock(path)
    with pytest.raises(AssertionError):
        cache.unlock(path)


class Against(RuleBasedStateMachine):
    """Rows come, match, take pages, keep what they counted and go, while the pool is short of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.cache = PrefixCache(PAGES, PAGE)
        self.rows: list[tuple[list[int], list[int], list[int]]] = []  # tokens, pages, path
        self.model: dict[Prefix, int] = {}
        self.last_use: dict[Prefix, int] = {}
        self.clock = 0

    def users(self, prefix: Prefix) -> int:
        page = self.model[prefix]
        return sum(page in path for _, _, path in self.rows)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, tokens: list[int]) -> None:
        path = self.cache.match(ints(tokens)).tolist()
        expected = []
        for end in range(PAGE, len(tokens), PAGE):
            if tuple(tokens[:end]) not in self.model:
                break
            expected.append(self.model[tuple(tokens[:end])])
        assert path == expected
        wanted = -(-len(tokens) // PAGE) - len(path)
        idle = sum(self.users(prefix) == 0 for prefix, page in self.model.items() if page in path)
        assert self.cache.idle_on(ints(path)) == idle
        if wanted > self.pool.free + self.cache.evictable - idle:
            return
        self.cache.lock(ints(path))
        self.rows.append((tokens, path, path))
        if wanted > self.pool.free:
            self.evict(wanted - self.pool.free)
        self.rows[-1] = (tokens, path + self.pool.take(wanted).tolist(), path)

    def evict(self, count: int) -> None:
        for page in self.cache.evict(count).tolist():
            (prefix,) = (prefix for prefix, known in self.model.items() if known == page)
            assert self.users(prefix) == 0
            assert not any(other[: len(prefix)] == prefix for other in self.model if other != prefix), "not a leaf"
            oldest = min(self.last_use[other] for other in self.model if self.users(other) == 0)
            assert self.last_use[prefix] == oldest, "not the least recently used"
            del self.model[prefix], self.last_use[prefix]
            self.pool.give(ints([page]))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), ends=st.booleans())
    def keep_and_perhaps_end(self, data: st.DataObject, ends: bool) -> None:
        index = data.draw(st.integers(0, len(self.rows) - 1))
        tokens, pages, path = self.rows[index]
        full = data.draw(st.integers(len(path), max(len(path), len(tokens) // PAGE)))
        longer = self.cache.extend(
            ints(path), ints(tokens[: full * PAGE]), ints(pages[:full]), own_only=not ends
        ).tolist()
        expected = []
        for at in range(full):
            page = self.model.get(tuple(tokens[: (at + 1) * PAGE]), pages[at])
            if page != pages[at] and not ends:
                break
            expected.append(page)
            self.model[tuple(tokens[: (at + 1) * PAGE])] = page
            self.last_use.setdefault(tuple(tokens[: (at + 1) * PAGE]), 0)
        assert longer == expected
        self.rows[index] = (tokens, pages, longer)
        if not ends:
            return
        self.pool.give(ints([page for page in pages if page not in longer]))
        self.cache.unlock(ints(longer))
        del self.rows[index]
        self.clock += 1
        for prefix, page in self.model.items():
            if page in longer:
                self.last_use[prefix] = self.clock

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        assert self.cache.cached == len(self.model)
        assert self.cache.evictable == sum(self.users(prefix) == 0 for prefix in self.model)
        assert sorted(self.cache.pages().tolist()) == sorted(self.model.values())
        private = [page for _, pages, path in self.rows for page in pages if page not in path]
        everything = self.pool.free_pages().tolist() + list(self.model.values()) + private
        assert sorted(everything) == list(range(1, PAGES))


TestAgainstReference = Against.TestCase
TestAgainstReference.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
