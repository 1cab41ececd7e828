"""The page pool against a set, and the mistakes that it must refuse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from procs.pages import PADDING_PAGE, PagePool


def test_padding_page_is_never_handed_out() -> None:
    pool = PagePool(9)
    assert sorted(pool.take(8).tolist()) == list(range(1, 9))
    assert pool.free == 0
    with pytest.raises(AssertionError):
        pool.take(1)


@pytest.mark.parametrize("pages", [[3, 3], [3], [PADDING_PAGE], [1, 2, 1]])
def test_wrong_pages_are_refused(pages: list[int]) -> None:
    pool = PagePool(9)
    pool.take(4)
    pool.give(np.array([3], dtype=np.int32))
    with pytest.raises(AssertionError):
        pool.give(np.array(pages, dtype=np.int32))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60), st.integers(2, 30))
def test_pool_is_a_set(actions: list[tuple[bool, int]], pages: int) -> None:
    pool = PagePool(pages)
    held: list[int] = []
    for taking, count in actions:
        if taking:
            taken = pool.take(min(count, pool.free)).tolist()
            assert not set(taken) & set(held)
            held += taken
        else:
            given_back, held = held[:count], held[count:]
            pool.give(np.array(given_back, dtype=np.int32))
        assert pool.free == pool.usable - len(held)
        assert sorted(pool.free_pages().tolist() + held) == list(range(1, pages))


def test_the_very_pages_that_are_claimed_are_gone() -> None:
    pool = PagePool(9)
    pool.claim(np.array([3, 8, 1], dtype=np.int32))
    assert pool.free == 5 and sorted(pool.free_pages().tolist()) == [2, 4, 5, 6, 7]
    assert pool.take(5).tolist() == [7, 6, 5, 4, 2]
    pool.give(np.array([8], dtype=np.int32))
    pool.claim(np.empty(0, dtype=np.int32))
    assert pool.take(1).tolist() == [8]


@pytest.mark.parametrize("pages", [[3, 3], [2], [0]])
def test_a_page_that_is_taken_cannot_be_claimed(pages: list[int]) -> None:
    pool = PagePool(9)
    pool.claim(np.array([2], dtype=np.int32))
    with pytest.raises(AssertionError, match="claimed"):
        pool.claim(np.array(pages, dtype=np.int32))
