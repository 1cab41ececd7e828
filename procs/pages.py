"""The pool of KV-cache pages: which page numbers nobody holds.

Owns the numbers alone. It never sees what is in a page, never decides who gets one, and never hands out page 0, which
belongs to padding. A page is in exactly one of three places: here, in the prefix cache, or in one row of the batch.

Giving back a page that is already here would hand it to two requests later, far from the mistake, so it asserts at
once.
"""

import numpy as np
from numpy.typing import NDArray

PADDING_PAGE = 0

Pages = NDArray[np.int32]  # page numbers, any order


class PagePool:
    """A stack of free page numbers. The page given back last goes out first: its lines may still be in a cache."""

    def __init__(self, pages: int) -> None:
        """`pages` counts page 0, so `pages - 1` can be handed out."""
        assert pages >= 2, "a pool needs the padding page and one more"
        self.usable = pages - 1
        self._stack = np.arange(pages - 1, PADDING_PAGE, -1, dtype=np.int32)  # lowest number on top
        self._is_free = np.ones(pages, dtype=np.bool_)
        self._is_free[PADDING_PAGE] = False
        self.free = self.usable

    def take(self, count: int) -> Pages:
        """i32[count] pages, now the caller's. Asserts that there are enough: ask `free` before."""
        assert 0 <= count <= self.free, f"{count} pages wanted, {self.free} free"
        self.free -= count
        taken = self._stack[self.free : self.free + count].copy()
        self._is_free[taken] = False
        return taken

    def claim(self, pages: Pages) -> None:
        """Take these very pages, i32[n], now the caller's. Asserts that each is free, and named once."""
        assert self._is_free[pages].all() and len(np.unique(pages)) == len(pages), "a page was claimed that is taken"
        self._is_free[pages] = False
        left = self._stack[: self.free]
        left = left[self._is_free[left]]
        self.free = len(left)
        self._stack[: self.free] = left

    def give(self, pages: Pages) -> None:
        """Take i32[n] pages back. Asserts that each is a real page, held by somebody, and named once."""
        count = len(pages)
        if count == 0:
            return
        assert pages.min() > PADDING_PAGE, "the padding page is nobody's"
        assert not self._is_free[pages].any(), "page freed twice"
        assert count == 1 or len(np.unique(pages)) == count, "page freed twice in one call"
        self._is_free[pages] = True
        self._stack[self.free : self.free + count] = pages
        self.free += count

    def free_pages(self) -> Pages:
        """i32[free], a copy, for the conservation check."""
        return self._stack[: self.free].copy()
