"""The conservation check: every page is in exactly one place, and every reference to a cached page has a row behind it.

Owns the check alone; it reads the scheduler's books and changes nothing. It is run whenever the scheduler has nothing
to do, in service and not only in tests: a page lost or held twice is a bug, and the stage dies of it before it can
spoil an answer.
"""

import numpy as np

from procs.pages import PADDING_PAGE
from procs.sched_rows import Rows


def check_conservation(rows: Rows) -> None:
    """Assert free + in the prefix cache + in rows = all pages, page by page. Costs O(pages) numpy work."""
    state, pages = rows.state, rows.pool.usable + 1
    entries = np.flatnonzero(state.used).tolist()
    private = [state.private_pages(entry) for entry in entries]
    holders = np.bincount(np.concatenate((rows.pool.free_pages(), rows.cache.pages(), *private)), minlength=pages)
    assert holders[PADDING_PAGE] == 0, "the padding page was handed out"
    wrong = np.flatnonzero(holders[1:] != 1) + 1
    assert not len(wrong), f"pages lost or held twice: {wrong.tolist()[:20]}"
    assert rows.pages_in_rows == sum(map(len, private)), "pages in rows miscounted"
    paths = [state.shared_pages(entry) for entry in entries]
    held = np.bincount(np.concatenate(paths), minlength=pages) if paths else np.zeros(pages)
    assert (rows.cache.references() == held).all(), "references to cached pages leaked"
    rows.stats.add("conservation_checks_total")
