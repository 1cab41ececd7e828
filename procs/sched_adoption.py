"""What a fresh scheduler finds in the batch tables: pages that still hold what an earlier one had computed.

Owns the way from those tables into the prefix cache. Recovery stays what it is, a retraction of every row: the rows are
queued again from the ledger, and when they are admitted they find their pages by their tokens, as any row does.

What is believed of the tables, at whatever store their writer ended:

    An entry that is in use, of a row that lives, names the pages that hold the keys and values of the row's tokens at
    all positions below `counted`.

`BatchState.begin` makes an entry used while its `counted` is 0; `counted` grows only once the pages are named
(`Rows.admit`) and the step that wrote them has been seen (`Steps.apply`). Nobody is given a page of a row before the
row's entry is out of use: its own ones pass through `Rows._release`, which ends the entry before it returns, so before
any other row is filled from the pool; those that it shares are locked in the prefix cache for as long, and what is
locked is not evicted. `BatchState.end` takes `used` away before it touches anything else. A store into many entries at
once is one store for each of them, and each alone leaves the sentence true. `counted` may be a step ahead of the
ledger, whose count is stored behind it; so a row is believed as far as both say.

Steps that the earlier scheduler had queued, and that still run, write at or beyond `counted`, see `sched_rows`.

From the first admission on pages that were found here can be evicted and written by somebody else, while the row that
they are from still waits. So the tables are cleared before; a death from then until the row is admitted again costs
what a lost prefix costs.
"""

import numpy as np

from procs.pages import PADDING_PAGE
from procs.prefix_cache import EMPTY
from procs.sched_rows import Rows


def adopt(rows: Rows, memory: int, is_sound: bool = True) -> int:
    """Take the pages of live rows from the pool into the prefix cache; leave the tables empty, and about `memory`.

    memory: whose memory the device has now, see `Control.memory`; tables about another one say nothing. is_sound: the
    writer did not end by an error of its own, which may have been in these very numbers. Returns how many pages.

    `rows` is new: its pool is full, its cache empty. Numbers that cannot be right end what is believed of a row, and
    nothing else: that costs a prefill.
    """
    tables, ledger = rows.state.tables, rows.ledger
    found = 0
    if is_sound and tables.memory == memory:
        entries = [entry for entry in tables.used.nonzero()[0].tolist() if _lives(rows, entry)]
        # Those that will be admitted first come last: of unused pages, those used longest ago are evicted first.
        for entry in sorted(entries, key=lambda entry: -int(ledger.arrival_ns[tables.row[entry]])):
            _keep(rows, entry)
        found = rows.cache.cached
        rows.pool.claim(rows.cache.pages())
        rows.stats.add("adopted_pages_total", found)
    tables.clear()
    tables.memory = memory
    return found


def _lives(rows: Rows, entry: int) -> bool:
    tables, ledger = rows.state.tables, rows.ledger
    row, generation = int(tables.row[entry]), int(tables.generation[entry])
    if not 0 <= row < rows.config.rows:
        return False
    current = all(plane[row] == generation for plane in (ledger.generation, ledger.ready, ledger.begun))
    return current and ledger.done[row] != generation


def _keep(rows: Rows, entry: int) -> None:
    """Put the entry's full counted pages into the prefix cache, up to the first that is no page or somebody else's."""
    tables, ledger, cache = rows.state.tables, rows.ledger, rows.cache
    row = int(tables.row[entry])
    known = int(ledger.prompt_len[row]) + int(ledger.count[row]) - 1
    page_size = cache.page_size
    full = min(min(int(tables.counted[entry]), known) // page_size, rows.config.pages_per_row)
    if full <= 0:
        return
    # One token more, the newest at the latest: `match` leaves the last one out, and with mtp it belongs to the key.
    tokens = ledger.tokens[row, : full * page_size + 1]
    shared = len(cache.match(tokens))
    own = tables.pages[entry, shared:full]
    is_free = (own > PADDING_PAGE) & (own < rows.config.pages) & ~np.isin(own, cache.pages())
    is_free &= np.bincount(np.unique(own, return_index=True)[1], minlength=len(own)) > 0  # not twice in this row
    kept = shared + (len(own) if is_free.all() else int(is_free.argmin()))
    pages = tables.pages[entry, :kept].copy()
    tokens = tokens[: kept * page_size + cache.behind]
    cache.unlock(cache.extend(EMPTY, tokens, pages, own_only=False))
