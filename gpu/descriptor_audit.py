"""The descriptor audit: whether step descriptors, one after the other, ask for what can be right in any order.

Owns what follows from the descriptors alone: the life of each entry, which pages it was given, and how far they must
have been written. No order of the device can make a descriptor right that breaks these rules, and none of them can be
seen in a tensor. It knows nothing of results: where a step gains between one token and a window of them, it takes the
bound that makes no false alarm. Never changes a descriptor. For tests and `--check-order`, in the launching thread,
from the first step of a process on.

A life of an entry begins with its sampling parameters, its pages from the first on and a chunk; it decodes once its
last chunk was in an earlier step; its end is in no descriptor. So pages go from one row to another silently, and each
counts how often it was given away to be written: a row that takes part in a step finds the number that it was given.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu.device.protocol import DeviceError
from shm.config import ServerConfig
from shm.records import (
    CHUNK_COUNT,
    CHUNK_ENTRY,
    CHUNK_LAST,
    CHUNK_ROW,
    CHUNK_START,
    SAMPLING_ENTRY,
    SLOT_ENTRY,
    SLOT_INDEX,
    SLOT_PAGE,
    STEP_MIXED,
    StepView,
)

Ints = NDArray[np.int64]

NO_LIFE, PREFILL, DECODING = range(3)
_CHUNK_PLANES = [CHUNK_ENTRY, CHUNK_ROW, CHUNK_START, CHUNK_COUNT, CHUNK_LAST]
_SLOT_PLANES = [SLOT_ENTRY, SLOT_INDEX, SLOT_PAGE]


class DescriptorError(DeviceError):
    """A descriptor that no scheduler may send. Names the step, and the entry and page if there is one."""


class _Chunk(NamedTuple):
    entry: int
    row: int
    start: int
    tokens: int
    last: int

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.start + self.tokens


class DescriptorAudit:
    """Arrays are indexed by entry, or by page."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._page_size, self._window = config.page_size, config.window
        entries, width = config.entries, config.pages_per_row
        self._step = 0  # number of the step at hand, as it says itself
        self._steps = 0  # seen so far
        # The life of each entry.
        self._phase = np.zeros(entries, np.int64)
        self._row = np.zeros(entries, np.int64)
        self._cursor = np.zeros(
            entries, np.int64
        )  # positions in chunks so far; once it decodes, the length of its prompt
        self._decodes = np.zeros(entries, np.int64)  # steps that it decoded in so far
        self._latest = np.zeros(entries, np.int64)  # the last of them, counted from 1
        # Its pages.
        self._pages = np.zeros((entries, width), np.int64)
        self._page_count = np.zeros(entries, np.int64)
        self._shared = np.zeros(entries, np.int64)  # the first so many were given to be read only
        self._given = np.zeros((entries, width), np.int64)  # what `_gifts` said of the page when the row got it
        # By page.
        self._gifts = np.zeros(config.pages, np.int64)  # how often it was given to a row that writes it
        self._written = np.zeros(config.pages, np.int64)  # at most so many positions since then, by earlier steps

    def inherit(self) -> None:
        """The pages hold what another process has written, who knows how much: call it before the first step."""
        self._written[:] = self._page_size

    def check(self, view: StepView) -> None:
        """Audit the next step. Raises DescriptorError; of no use any more after that."""
        self._step = view.step
        self._steps += 1
        decode = view.decode_entries[: view.n_decode].astype(np.int64)
        chunks = [_Chunk(*column) for column in view.chunks[_CHUNK_PLANES, : view.n_chunks].T.tolist()]
        begun = view.sampling[SAMPLING_ENTRY, : view.n_sampling].tolist()
        self._check_names(view, decode, chunks, begun)
        by_entry = {chunk.entry: chunk for chunk in chunks}
        for entry in begun:
            self._begin(entry, by_entry)
        writes = view.slot_writes[_SLOT_PLANES, : view.n_slot_writes].T.tolist()
        self._give_pages(writes, set(decode.tolist()), set(begun))
        for chunk in chunks:
            self._check_chunk(chunk)
        self._check_decode(decode)
        written = self._writes(decode, chunks)
        self._check_pages(*written)
        self._advance(decode, chunks, *written)

    # ------------------------------------------------------------------ lives

    def _check_names(self, view: StepView, decode: Ints, chunks: list[_Chunk], begun: list[int]) -> None:
        config = self._config
        named = [*decode.tolist(), *(chunk.entry for chunk in chunks)]
        for entry in (*named, *begun):
            if not 0 < entry < config.entries:
                self._demand(False, "there is no such entry for a request", entry)
        for what, entries in (("takes part", named), ("begins", begun)):
            if len(set(entries)) < len(entries):
                ((entry, times),) = Counter(entries).most_common(1)
                self._demand(False, f"{what} {times} times", entry)
        self._demand(bool(named), "nobody takes part")
        self._demand(len(named) <= config.max_running, f"{len(named)} rows take part, {config.max_running} may run")
        self._demand(view.kind == STEP_MIXED or not chunks, "a decode step has chunks")
        tokens = sum(chunk.tokens for chunk in chunks)
        self._demand(tokens <= config.prefill_chunk, f"{tokens} prompt tokens in one step")

    def _begin(self, entry: int, chunks: dict[int, _Chunk]) -> None:
        """The sampling parameters of `entry` came: whatever it was before, it is somebody else now."""
        self._demand(entry in chunks, "a life begins without a chunk", entry)
        start = chunks[entry].start
        self._demand(start % self._page_size == 0, f"a prefix of {start} positions ends inside a page", entry)
        self._phase[entry] = PREFILL
        self._row[entry], self._cursor[entry] = chunks[entry].row, start
        self._decodes[entry] = self._latest[entry] = self._page_count[entry] = 0
        self._shared[entry] = start // self._page_size

    def _check_chunk(self, chunk: _Chunk) -> None:
        entry, config = chunk.entry, self._config
        self._demand(self._phase[entry] == PREFILL, "a chunk without a life that began, or behind its last one", entry)
        self._demand(chunk.row == self._row[entry], f"a chunk of another ledger row, {chunk.row}", entry)
        self._demand(0 <= chunk.row < config.rows, f"there is no ledger row {chunk.row}", entry)
        cursor = int(self._cursor[entry])
        self._demand(chunk.start == cursor, f"a chunk begins at {chunk.start} instead of {cursor}", entry)
        self._demand(chunk.tokens >= 1, "a chunk without tokens", entry)
        self._demand(chunk.end < config.max_len, f"a chunk ends at {chunk.end}, past the longest row", entry)
        room = int(self._page_count[entry]) * self._page_size
        self._demand(chunk.end <= room, f"a chunk ends at {chunk.end}, there are pages for {room} positions", entry)

    def _check_decode(self, decode: Ints) -> None:
        """Each one's last chunk came earlier, and there are pages for this step and the one in flight.

        Of what was decoded before the step in front of this one the scheduler knows the result.
        """
        idle = decode[self._phase[decode] != DECODING]
        if len(idle):
            self._demand(False, "decodes before its last chunk has been in an earlier step", int(idle[0]))
        known = self._decodes[decode] - (self._latest[decode] == self._steps - 1)  # each gained one token at least
        reach = self._cursor[decode] + known + 2 * self._window
        room = self._page_count[decode] * self._page_size
        for at in np.flatnonzero(room < reach)[:1].tolist():
            self._demand(False, f"may reach {reach[at]} positions, has pages for {room[at]}", int(decode[at]))

    # ------------------------------------------------------------------ pages

    def _give_pages(self, writes: list[list[int]], decode: set[int], begun: set[int]) -> None:
        """Apply the slot writes. What lies below the first chunk of a life is a prefix, to be read only."""
        for entry, index, page in writes:
            self._demand(0 < entry < self._config.entries, "a slot write for no request", entry, page)
            self._demand(0 < page < self._config.pages, "there is no such page for a request", entry, page)
            self._demand(entry in decode or entry in begun, "pages for a row that takes no part", entry, page)
            count = int(self._page_count[entry])
            self._demand(index == count, f"slot {index} is written, the row has {count} pages", entry, page)
            self._demand(index < self._config.pages_per_row, "more pages than a row can have", entry, page)
            if index >= self._shared[entry]:
                self._gifts[page] += 1
                self._written[page] = 0
            else:
                full = self._written[page] >= self._page_size
                self._demand(bool(full), f"{self._written[page]} positions of a prefix's page are written", entry, page)
            self._pages[entry, index], self._given[entry, index] = page, self._gifts[page]
            self._page_count[entry] = count + 1

    def _check_pages(self, rows: Ints, begins: Ints, ends: Ints) -> None:
        """Every page of a row that takes part is still the row's, and what one row writes no other one has."""
        first, last = begins // self._page_size, (ends - 1) // self._page_size
        index = np.arange(int(self._page_count[rows].max()))
        has = index < self._page_count[rows, None]
        pages = self._pages[rows, : len(index)]
        lost = has & (self._gifts[pages] != self._given[rows, : len(index)])
        if lost.any():
            at, slot = np.argwhere(lost)[0].tolist()
            self._demand(False, "a page of a row that takes part was given to another", int(rows[at]), pages[at, slot])
        owners = np.broadcast_to(rows[:, None], pages.shape)
        written = has & (index >= first[:, None]) & (index <= last[:, None])
        writer = np.zeros(self._config.pages, np.int64)
        writer[pages[written]] = owners[written]
        foreign = has & (writer[pages] != 0) & (writer[pages] != owners)
        if foreign.any():
            at, slot = np.argwhere(foreign)[0].tolist()
            page = pages[at, slot]
            self._demand(False, f"a page of the row is written by entry {writer[page]}", int(rows[at]), page)

    def _writes(self, decode: Ints, chunks: list[_Chunk]) -> tuple[Ints, Ints, Ints]:
        """Entries that take part, the first position that each may write and the one behind the last, i64[n] each."""
        low = self._cursor[decode] + self._decodes[decode]
        high = self._cursor[decode] + (self._decodes[decode] + 1) * self._window
        rows = [*decode.tolist(), *(chunk.entry for chunk in chunks)]
        begins = [*low.tolist(), *(chunk.start for chunk in chunks)]
        ends = [*high.tolist(), *(chunk.end for chunk in chunks)]
        return np.array(rows), np.array(begins), np.array(ends)

    def _advance(self, decode: Ints, chunks: list[_Chunk], rows: Ints, begins: Ints, ends: Ints) -> None:
        """From here on the step is an earlier one."""
        index = np.arange(int(begins.min()) // self._page_size, int(self._page_count[rows].max()))
        own = (index >= self._shared[rows, None]) & (index < self._page_count[rows, None])
        filled = np.minimum(ends[:, None] - index * self._page_size, self._page_size)
        pages = self._pages[rows[:, None], index][own]
        self._written[pages] = np.maximum(self._written[pages], filled[own])
        self._decodes[decode] += 1
        self._latest[decode] = self._steps
        for chunk in chunks:
            self._cursor[chunk.entry] = chunk.end
            if chunk.last:
                self._phase[chunk.entry] = DECODING

    def _demand(self, holds: bool, what: str, entry: int | None = None, page: int | None = None) -> None:
        if not holds:
            named = [f"step {self._step}"]
            named += [] if entry is None else [f"entry {entry}"]
            named += [] if page is None else [f"page {page}"]
            raise DescriptorError(f"{', '.join(named)}: {what}")
