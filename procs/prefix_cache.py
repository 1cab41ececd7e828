"""The prefix cache: KV pages of finished work, found again by the tokens that they hold.

Owns the tree of cached pages, their reference counts and the order of eviction. It never holds a page with an uncounted
token in it, never changes what is in a page, and never frees one by itself: `evict` hands the numbers to the caller.

A radix tree whose edges are whole pages: a node is one page, found from its parent by the exact tokens in it (their
bytes are the key, so two different prefixes can never be taken for each other). A textbook radix tree has edges of
any length and must split them when prompts diverge inside one; but a page is the unit that is shared, counted and
evicted here, so an edge of another length could not be used anyway. One page per node leaves nothing to split or
merge, and a node *is* its page: the tree is a few arrays indexed by page number and one dict.

A row that uses a cached path holds a reference to every page on it. Hence a page's references are never fewer than
the sum of its children's, an unreferenced page has only unreferenced descendants, and when paths are released deepest
page first, the list of unreferenced pages is at any time in an order of last use in which no page comes before a
descendant of its own: eviction takes from its front and never has to look whether something hangs below.

What a drafter keeps of a page may depend on the token behind it as well, as with mtp: then that token belongs to the
key.
"""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from procs.pages import PADDING_PAGE, Pages

ROOT = PADDING_PAGE  # never cached, so its number can stand for "no parent"
TOKEN_BYTES = 4
EMPTY: Pages = np.empty(0, dtype=np.int32)


class PrefixCache:
    def __init__(self, pages: int, page_size: int, behind: int = 0) -> None:
        """behind: how many tokens behind a page belong to its key, 0 or 1."""
        self.page_size = page_size
        self.behind = behind
        self.cached = 0  # pages in the tree
        self.inserted = 0  # pages ever put into it: while this stands still, no match gets longer
        self._page_bytes = page_size * TOKEN_BYTES
        self._key_bytes = (page_size + behind) * TOKEN_BYTES
        self._page_of: dict[tuple[int, bytes], int] = {}  # (parent page, tokens of the page) -> page
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._refs = np.zeros(pages, dtype=np.int32)
        self._children = np.zeros(pages, dtype=np.int32)
        self._idle: OrderedDict[int, None] = OrderedDict()  # unreferenced pages, least recently used first

    @property
    def evictable(self) -> int:
        """Pages that `evict` could hand over now."""
        return len(self._idle)

    def match(self, tokens: NDArray[np.int32]) -> Pages:
        """The longest cached path that begins `tokens` (i32[n]): i32[k] pages, k <= (n - 1) // page_size.

        The last token is left out even if its page is cached: a prompt must compute at least one position to have
        something to sample from. Takes no reference: `lock` the path before anything may be evicted.
        """
        page_bytes, key_bytes, page_of = self._page_bytes, self._key_bytes, self._page_of
        raw = tokens.tobytes()
        path: list[int] = []
        page = ROOT
        for begin in range(0, (len(tokens) - 1) // self.page_size * page_bytes, page_bytes):
            child = page_of.get((page, raw[begin : begin + key_bytes]))
            if child is None:
                break
            path.append(child)
            page = child
        return np.array(path, dtype=np.int32)

    def idle_on(self, path: Pages) -> int:
        """How many pages of `path` nobody uses yet: locking it makes the evictable ones fewer by as many."""
        return int(np.count_nonzero(self._refs[path] == 0))

    def lock(self, path: Pages) -> None:
        """Take one reference to every page of `path` (i32[k], from the root down)."""
        self._refs[path] += 1
        for page in path[self._refs[path] == 1].tolist():
            del self._idle[page]

    def unlock(self, path: Pages) -> None:
        """Give back one reference to every page of `path`; those without another become the most recently used."""
        self._refs[path] -= 1
        left = self._refs[path]
        assert not (left < 0).any(), "prefix released twice"
        for page in reversed(path[left == 0].tolist()):  # deepest first: see the module's last paragraph
            self._idle[page] = None

    def extend(self, path: Pages, tokens: NDArray[np.int32], pages: Pages, own_only: bool) -> Pages:
        """Keep a row's full pages: `pages` (i32[m]) hold the counted `tokens` (i32[m * page_size + behind], the last of
        which need not be counted).

        `path` (i32[k], k <= m) is the part that the row holds already. Returns the path after it, with references taken
        for what is new in it.

        The tree may know the tokens of a page under another number: two requests with one prompt ran side by side,
        and each computed it. The contents are the same bits, but the row reads its own copy already. With `own_only`,
        as for a row that goes on, the path ends before such a page: a row never keeps more pages from eviction than
        it has, or a lone row might not fit. Without, as for a row that ends, the path goes on through the tree's page
        to its full length, and the row's copy, not being on it, is the caller's to free.
        """
        page_bytes, key_bytes, page_of = self._page_bytes, self._key_bytes, self._page_of
        known = len(path)
        raw = tokens[known * self.page_size :].tobytes()
        parent = int(path[-1]) if known else ROOT
        longer = path.tolist()
        for index, own in enumerate(pages[known:].tolist()):
            key = (parent, raw[index * page_bytes : index * page_bytes + key_bytes])
            page = page_of.get(key)
            if page is None:
                page = own
                self._insert(page, key)
            elif own_only:
                break
            elif self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1
            longer.append(page)
            parent = page
        return np.array(longer, dtype=np.int32)

    def evict(self, count: int) -> Pages:
        """Forget up to `count` unreferenced pages, least recently used first, and hand their numbers over (i32)."""
        count = min(count, len(self._idle))
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for page in evicted:
            assert self._children[page] == 0, "a page is evicted after everything below it"
            key = self._key_of.pop(page)
            del self._page_of[key]
            self._children[key[0]] -= 1
        self.cached -= count
        return np.array(evicted, dtype=np.int32)

    def pages(self) -> Pages:
        """i32[cached], in no order, for the conservation check."""
        return np.fromiter(self._key_of, dtype=np.int32, count=len(self._key_of))

    def references(self) -> NDArray[np.int32]:
        """i32[pages]: references by page number, a copy, for the conservation check."""
        return self._refs.copy()

    def _insert(self, page: int, key: tuple[int, bytes]) -> None:
        assert page not in self._key_of, "a page is in the tree once"
        self._page_of[key] = page
        self._key_of[page] = key
        self._children[key[0]] += 1
        self.cached += 1
        self.inserted += 1
