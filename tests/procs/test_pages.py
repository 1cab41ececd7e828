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
