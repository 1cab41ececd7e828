"""Host kernels of the step's own bookkeeping: filling the shared tables, and gathering what a step needs from them.

Owns loops over rows and nothing else: no memory, no policy. They run without the interpreter lock, and check what they
index, because a wrong entry or page would be a wrong answer for another request, or memory that is not ours. They never
raise: they return a fault code (see `explain`), since the device needs the message and not a traceback from here.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device.protocol import DeviceError
from gpu.kernels.native import host_kernel, kernel
from gpu.kernels.step_kernels import (
    BAD_ENTRY,
    BAD_PAGE,
    BAD_POSITION,
    BAD_SOURCE,
    FAULT_BITS,
    NO_DRAFT,
    NOT_FILLED,
    NOT_PUBLISHED,
    OK,
    Configured,
    Gained,
    PassShape,
    Rows,
    Tables,
    explain,
)
from shm import records
from shm.records import StepView

# Planes of a step descriptor. Spelt out here, because compiled kernels outlive a change in another file.
CHUNK_ENTRY, CHUNK_ROW, CHUNK_START, CHUNK_COUNT, CHUNK_LAST = range(5)
SLOT_ENTRY, SLOT_INDEX, SLOT_PAGE = range(3)
SAMPLING_ENTRY, SAMPLING_REAL, SAMPLING_TOP_K, SAMPLING_SEED_LO, SAMPLING_SEED_HI = 0, 1, 4, 5, 6

assert (records.CHUNK_ENTRY, records.CHUNK_ROW, records.CHUNK_START) == (CHUNK_ENTRY, CHUNK_ROW, CHUNK_START)
assert (records.CHUNK_COUNT, records.CHUNK_LAST) == (CHUNK_COUNT, CHUNK_LAST)
assert (records.SLOT_ENTRY, records.SLOT_INDEX, records.SLOT_PAGE) == (SLOT_ENTRY, SLOT_INDEX, SLOT_PAGE)
assert (records.SAMPLING_ENTRY, records.SAMPLING_TOP_K) == (SAMPLING_ENTRY, SAMPLING_TOP_K)
assert (records.SAMPLING_TEMPERATURE, records.SAMPLING_TOP_P, records.SAMPLING_MIN_P) == (
    SAMPLING_REAL,
    SAMPLING_REAL + 1,
    SAMPLING_REAL + 2,
)
assert (records.SAMPLING_SEED_LO, records.SAMPLING_SEED_HI) == (SAMPLING_SEED_LO, SAMPLING_SEED_HI)

PADDING_ENTRY = 0
PADDING_PAGE = 0


@kernel
def _fault(code: Any, entry: Any) -> int:
    return int(code | (entry << FAULT_BITS))


@host_kernel
def write_slots(table: Any, writes: Any, count: Any, pages: Any) -> int:
    """table i32[entries, pages_per_row][entry, index] = page for the first `count` of writes i32[3, cap]."""
    for i in range(count):
        entry, index, page = writes[SLOT_ENTRY, i], writes[SLOT_INDEX, i], writes[SLOT_PAGE, i]
        if entry <= PADDING_ENTRY or entry >= table.shape[0]:
            return _fault(BAD_ENTRY, entry)
        if index < 0 or index >= table.shape[1] or page <= PADDING_PAGE or page >= pages:
            return _fault(BAD_PAGE, entry)
        table[entry, index] = page
    return OK


@host_kernel
def write_sampling(real: Any, top_k: Any, seed: Any, writes: Any, write_bits: Any, count: Any) -> int:
    """Set the sampling parameters of `count` entries from writes i32[7, cap]; write_bits is the same as f32."""
    for i in range(count):
        entry = writes[SAMPLING_ENTRY, i]
        if entry <= PADDING_ENTRY or entry >= top_k.shape[0]:
            return _fault(BAD_ENTRY, entry)
        for k in range(3):
            real[k, entry] = write_bits[SAMPLING_REAL + k, i]
        top_k[entry] = writes[SAMPLING_TOP_K, i]
        lo = np.uint64(np.uint32(writes[SAMPLING_SEED_LO, i]))
        hi = np.uint64(np.uint32(writes[SAMPLING_SEED_HI, i]))
        seed[entry] = lo | (hi << np.uint64(32))
    return OK


@host_kernel
def copy_ids(chunks: Any, count: Any, plane: Any, ids: Any) -> int:
    """Copy the tokens of `count` chunks i32[6, cap] from the ledger's plane i32[rows, max_len] to ids, end to end."""
    at = 0
    for c in range(count):
        row, start, n = chunks[CHUNK_ROW, c], chunks[CHUNK_START, c], chunks[CHUNK_COUNT, c]
        if row < 0 or row >= plane.shape[0] or start < 0 or n < 1 or start + n > plane.shape[1]:
            return _fault(BAD_SOURCE, chunks[CHUNK_ENTRY, c])
        if at + n > ids.shape[0]:
            return _fault(BAD_SOURCE, chunks[CHUNK_ENTRY, c])
        for j in range(n):
            ids[at + j] = plane[row, start + j]
        at += n
    return OK


@kernel
def _take_pages(tables: Any, entry: Any, last: Any, row: Any, rows: Any, page_size: Any) -> int:
    """Copy the pages that positions 0..last of `entry` live in to row `row`."""
    if last < 0 or last >= tables.pages.shape[1] * page_size:
        return _fault(BAD_POSITION, entry)
    for j in range(last // page_size + 1):
        page = tables.pages[entry, j]
        if page == PADDING_PAGE and entry != PADDING_ENTRY:
            return _fault(NOT_FILLED, entry)
        rows.pages[row, j] = page
    return OK


@kernel
def _take_gainer(entry: Any, length: Any, gainer: Any, rows: Any) -> None:
    """`entry` will have `length` tokens in the cache once it has gained one."""
    rows.entries[gainer] = entry
    rows.lengths[gainer] = length if entry != PADDING_ENTRY else 0  # padding stays at position 0 for ever


@kernel
def _take_sample(tables: Any, entry: Any, place: Any, sample: Any, rows: Any) -> None:
    """Sample `sample` is the token of `entry` at position `place`."""
    rows.places[sample] = place
    for k in range(3):
        rows.real[k, sample] = tables.real[k, entry]
    rows.top_k[sample] = tables.top_k[entry]
    rows.seed[sample] = tables.seed[entry]


@host_kernel
def gather_decode(
    tables: Any, entries: Any, live: Any, padded: Any, window: Any, rows: Any, page_size: Any, poison: Any
) -> int:
    """Rows 0..padded, a window of each entry: its newest token, and room for drafts; beyond `live` they are padding."""
    for i in range(padded):
        entry = entries[i] if i < live else PADDING_ENTRY
        if entry < 0 or entry >= tables.length.shape[0]:
            return _fault(BAD_ENTRY, entry)
        at, token = tables.length[entry], tables.token[entry]
        if at < 0 or token < 0:
            return _fault(NOT_PUBLISHED, entry)
        fault = _take_pages(tables, entry, at + window - 1, i, rows, page_size)
        if fault != OK:
            return fault
        rows.starts[i] = i * window
        rows.ends[i] = at + window
        for w in range(window):
            t = i * window + w
            rows.tokens[t] = token if w == 0 else NO_DRAFT
            rows.positions[t] = at + w
            rows.seqs[t] = i
            rows.logit_rows[t] = t
            _take_sample(tables, entry, at + w + 1, t, rows)
        _take_gainer(entry, at + 1, i, rows)
        if poison and entry != PADDING_ENTRY:
            tables.token[entry] = -1  # consumed: nobody may read it again before a step stashes the next one
    rows.starts[padded] = padded * window
    return OK


@host_kernel
def gather_chunks(
    tables: Any, chunks: Any, count: Any, ids: Any, decode: Any, window: Any, rows: Any, page_size: Any, poison: Any
) -> int:
    """Append `count` chunks i32[6, cap] behind `decode` decode rows; only a last chunk samples a token."""
    before = decode * window
    token, last = before, 0
    for c in range(count):
        entry, start, n = chunks[CHUNK_ENTRY, c], chunks[CHUNK_START, c], chunks[CHUNK_COUNT, c]
        if entry < 0 or entry >= tables.length.shape[0]:
            return _fault(BAD_ENTRY, entry)
        fault = _take_pages(tables, entry, start + n - 1, decode + c, rows, page_size)
        if fault != OK:
            return fault
        rows.ends[decode + c] = start + n
        for j in range(n):
            rows.tokens[token + j] = ids[token - before + j]
            rows.positions[token + j] = start + j
            rows.seqs[token + j] = decode + c
        token += n
        rows.starts[decode + c + 1] = token
        if chunks[CHUNK_LAST, c] != 0:
            rows.logit_rows[before + last] = token - 1
            _take_sample(tables, entry, start + n, before + last, rows)
            _take_gainer(entry, start + n, decode + last, rows)
            last += 1
        if poison and entry != PADDING_ENTRY:
            tables.length[entry] = -1  # what an earlier request left here is not to be read
            tables.token[entry] = -1
    return OK


@host_kernel
def accept(
    tokens: Any, entries: Any, lengths: Any, targets: Any, counts: Any, gained: Any, newest: Any, table: Any,
    decode: Any, lasts: Any, window: Any,
) -> None:  # fmt: skip
    """See `StepKernels.accept`."""
    for i in range(decode + lasts):
        first = i * window if i < decode else decode * window + i - decode
        count = 1
        if i < decode:
            while (
                count < window
                and targets[first + count - 1] >= 0
                and (tokens[first + count] == targets[first + count - 1])
            ):
                count += 1
        for w in range(gained.shape[0]):
            gained[w, i] = targets[first + w] if w < count else -1
        counts[i] = count
        newest[i] = targets[first + count - 1]
        if lengths[i] > 0:
            lengths[i] += count - 1
        table[entries[i]] = lengths[i]


class HostStepKernels(Configured):
    """The kernels above behind the contract of `step_kernels.StepKernels`. Arrays are numpy; a fault raises."""

    def view(self, descriptor: NDArray[np.int32]) -> StepView:
        """The sections of a descriptor."""
        return self._layout.view(descriptor)

    def upload(
        self,
        slot: StepView,
        payload: NDArray[np.int32],
        descriptor: NDArray[np.int32],
        plane: NDArray[np.int32],
        ids: NDArray[np.int32],
        fault: NDArray[np.int32],
    ) -> None:
        """Copy the used part of a descriptor, and the chunks' tokens from the ledger's plane."""
        ints = slot.used_nbytes // payload.itemsize
        np.copyto(descriptor[:ints], payload[:ints])
        if slot.n_chunks:
            _raise(copy_ids(slot.chunks, slot.n_chunks, plane, ids))

    def write_slots(self, step: StepView, count: int, table: Any, fault: Any) -> None:
        """Apply the slot writes of a step."""
        _raise(write_slots(table, step.slot_writes, count, self._pages))

    def write_sampling(self, step: StepView, count: int, real: Any, top_k: Any, seed: Any, fault: Any) -> None:
        """Apply the sampling writes of a step."""
        _raise(write_sampling(real, top_k, seed, step.sampling, step.sampling_f32, count))

    def gather(self, step: StepView, tables: Tables, ids: Any, rows: Rows, shape: PassShape, fault: Any) -> None:
        """Lay out the pass of a step."""
        size, poison, window = self._page_size, self._poison, shape.window
        _raise(gather_decode(tables, step.decode_entries, step.n_decode, shape.decode, window, rows, size, poison))
        if shape.chunks:
            _raise(gather_chunks(tables, step.chunks, shape.chunks, ids, shape.decode, window, rows, size, poison))

    def accept(self, rows: Rows, targets: Any, gained: Gained, table: Any, shape: PassShape) -> None:
        """Say what each row gains, and publish its length."""
        own, shared = (rows.tokens, rows.entries, rows.lengths), (gained.counts, gained.tokens, gained.newest)
        accept(*own, targets, *shared, table, shape.decode, shape.lasts, shape.window)

    def stash(self, table: Any, entries: Any, tokens: Any) -> None:
        """Leave the newest token of each entry for the next step."""
        table[entries] = tokens

    def deliver(self, outcome: Any, payload: Any, ints: int) -> None:
        """Copy the outcome of a step to pinned memory."""
        np.copyto(payload[:ints], outcome[:ints])


def _raise(fault: int) -> None:
    if fault != OK:
        raise DeviceError(explain(fault))
