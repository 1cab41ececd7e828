"""The running batch: what the scheduler knows of every row, as arrays indexed by relay entry.

Owns those arrays and the list of free entries. It never does I/O, never decides anything (that is `policy`), and never
holds a token: what a running row does next depends on numbers that the scheduler has, the token stays on the device.

One array per fact and not one object per request, so that preparing a step and processing a result are a fixed number
of numpy calls over all rows, at 1 request and at 256.

The life of an entry in three numbers (positions in the sequence):

    0 ....... counted ....... cursor ....... fill
    |  in the KV cache,       |  queued in a chunk,     |  still to be put into a chunk
    |  seen by the scheduler  |  result not seen yet    |

`fill` is what the prefill has to compute: the prompt, and for a row that was retracted also its output so far. Once
the cursor reaches `fill` the row takes part in decode steps, though the result of its last chunk may not have come
yet: the relay has its token. From then on, `counted` is `prompt + outputs - 1`, since the newest token enters the
cache only in the step that takes it as input.

An entry is free again the moment its row ends, while a step in flight may still name it. `incarnation` tells the two
lives apart: it grows when an entry is freed, and a result for an older incarnation is dropped.

Which pages hold what of which row is in shared memory, and outlives this process: see `sched_adoption` for what the
order of the stores here means there.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from procs.pages import Pages
from shm.batch_tables import BatchTables

Ints = NDArray[np.int64]

PADDING_ENTRY = 0
NO_STOP_ID = -1


class BatchState:
    """Arrays [entries], int64 unless said. An unused entry has limit 0 and fill 0: no rule can choose it."""

    def __init__(
        self,
        max_running: int,
        pages_per_row: int,
        page_size: int,
        window: int,
        stop_ids: int,
        tables: BatchTables | None = None,
    ) -> None:
        """tables: what outlives this process; to be cleared before the first entry is taken."""
        entries = max_running + 1
        self.tables = tables or BatchTables.private(entries, pages_per_row)
        self.page_size = page_size
        self.window = window
        self.pages_per_row = pages_per_row
        self.running = 0  # entries in use

        # Who.
        self.used = self.tables.used
        self.row = self.tables.row  # ledger row
        self.generation = self.tables.generation
        self.incarnation = np.zeros(entries, dtype=np.int64)
        self.order = np.zeros(entries, dtype=np.int64)  # admission number: first come, first served

        # How far.
        self.prompt = np.zeros(entries, dtype=np.int64)  # tokens of the client's prompt
        self.fill = np.zeros(entries, dtype=np.int64)
        self.cursor = np.zeros(entries, dtype=np.int64)
        self.counted = self.tables.counted
        self.outputs = np.zeros(entries, dtype=np.int64)  # output tokens in the ledger
        self.limit = np.zeros(entries, dtype=np.int64)  # output tokens at which the row ends
        self.in_flight = np.zeros(entries, dtype=np.int64)  # steps in flight that will give it a token, or several
        self.stop_ids = np.full((entries, stop_ids), NO_STOP_ID, dtype=np.int32)

        # Which pages. `pages[e, :page_count[e]]` is the row of the slot table as of the newest step queued. The first
        # `shared[e]` of them are in the prefix cache, with a reference held by the row; the others are the row's alone.
        self.pages = self.tables.pages
        self.page_count = np.zeros(entries, dtype=np.int64)
        self.shared = np.zeros(entries, dtype=np.int64)

        # The one that was freed first is taken first: what a drafter keeps of ended rows lives as long as can be.
        self._free_entries = deque(range(PADDING_ENTRY + 1, entries))

    @property
    def has_free_entry(self) -> bool:
        return bool(self._free_entries)

    def begin(self, row: int, generation: int, order: int) -> int:
        """Take a free entry for a ledger row; the caller fills in the numbers."""
        entry = self._free_entries.popleft()
        assert not self.used[entry] and self.page_count[entry] == 0
        assert self.counted[entry] == 0, "in use from the next store on, and its pages are those of an earlier life"
        self.used[entry] = True
        self.row[entry] = row
        self.generation[entry] = generation
        self.order[entry] = order
        self.running += 1
        return entry

    def end(self, entry: int) -> None:
        """Free an entry whose pages are gone. Steps in flight may still name it: their results are stale from here
        on."""
        assert self.used[entry] and self.page_count[entry] == 0 and self.shared[entry] == 0
        self.used[entry] = False  # first: whoever finds the tables believes no entry that is not in use
        self.incarnation[entry] += 1
        self.limit[entry] = self.fill[entry] = self.cursor[entry] = self.in_flight[entry] = 0
        self.counted[entry] = self.outputs[entry] = self.prompt[entry] = 0
        self.running -= 1
        self._free_entries.append(entry)

    def append_pages(self, entries: Ints, counts: Ints, pages: Pages) -> Ints:
        """Lengthen the rows `entries` by `counts` pages each, taken in turn from `pages` (i32[sum of counts]).

        Returns i64[2, n]: entry and index in the row of every page, as slot writes name them.
        """
        owners = np.repeat(entries, counts)
        ends = np.cumsum(counts)
        index = np.arange(len(owners)) - np.repeat(ends - counts, counts) + self.page_count[owners]
        self.pages[owners, index] = pages
        self.page_count[entries] += counts
        return np.stack((owners, index))

    def shared_pages(self, entry: int) -> Pages:
        """i32[n], a view: the row's pages that are in the prefix cache, from the first on."""
        return self.pages[entry, : int(self.shared[entry])]

    def private_pages(self, entry: int) -> Pages:
        """i32[n], a view: the row's pages that nobody else can find, up to the last."""
        return self.pages[entry, int(self.shared[entry]) : int(self.page_count[entry])]
