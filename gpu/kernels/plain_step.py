"""Plain reference of the step's bookkeeping: what the tables and the rows of a pass hold afterwards.

Owns the meaning of each operation, faults included: it returns the fault codes of all that was wrong, in the order of
the rows, and goes on as a device does that cannot raise. What is wrong is then never applied, and a row that is wrong
takes part as padding. Works on numpy arrays; never called while serving.
"""

from typing import Any

import numpy as np

from gpu.kernels.step_kernels import (
    BAD_ENTRY,
    BAD_PAGE,
    BAD_POSITION,
    FAULT_BITS,
    NO_DRAFT,
    NOT_FILLED,
    NOT_PUBLISHED,
    Gained,
    PassShape,
    Rows,
    Tables,
)
from shm.records import (
    CHUNK_COUNT,
    CHUNK_ENTRY,
    CHUNK_LAST,
    CHUNK_START,
    SAMPLING_ENTRY,
    SAMPLING_MIN_P,
    SAMPLING_TEMPERATURE,
    SAMPLING_TOP_K,
    StepView,
)

Array = Any  # numpy.ndarray
PADDING = 0  # entry, page, position and token of what belongs to no request
ENTRY_BITS = 31 - FAULT_BITS  # what a fault code has room for; no entry that exists needs more


def fault(code: int, entry: int) -> int:
    """The fault code for `entry`, positive whatever the entry is."""
    return code | (int(entry) & ((1 << ENTRY_BITS) - 1)) << FAULT_BITS


def write_slots(step: StepView, table: Array, pages: int) -> list[int]:
    """Apply the step's slot writes to table i32[entries, pages_per_row]. pages: of the KV cache."""
    faults = []
    for entry, index, page in step.slot_writes[:, : step.n_slot_writes].T.tolist():
        if not 0 < entry < len(table):
            faults.append(fault(BAD_ENTRY, entry))
        elif not (0 <= index < table.shape[1] and 0 < page < pages):
            faults.append(fault(BAD_PAGE, entry))
        else:
            table[entry, index] = page
    return faults


def write_sampling(step: StepView, real: Array, top_k: Array, seed: Array) -> list[int]:
    """Apply the step's sampling writes to real f32[3, entries], top_k i32[entries] and seed u64[entries]."""
    faults = []
    for i, value in enumerate(step.seeds()):
        entry = int(step.sampling[SAMPLING_ENTRY, i])
        if not 0 < entry < len(top_k):
            faults.append(fault(BAD_ENTRY, entry))
            continue
        real[:, entry] = step.sampling_f32[SAMPLING_TEMPERATURE : SAMPLING_MIN_P + 1, i]
        top_k[entry] = step.sampling[SAMPLING_TOP_K, i]
        seed[entry] = value
    return faults


def gather(
    step: StepView, tables: Tables, ids: Array, rows: Rows, shape: PassShape, page_size: int, *, poison: bool
) -> list[int]:
    """Lay out the step's pass in `rows`, see `StepKernels.gather`. Returns the fault codes."""
    faults: list[int] = []
    for row in range(shape.decode):
        entry = int(step.decode_entries[row]) if row < step.n_decode else PADDING
        code = _decode_fault(tables, entry, shape.window, page_size)
        if code:
            faults.append(fault(code, entry))
            entry, position, token = PADDING, 0, PADDING
        else:
            position, token = int(tables.length[entry]), int(tables.token[entry])
        window, begin = shape.window, row * shape.window
        _lay_out(rows, row, begin, [token] + [NO_DRAFT] * (window - 1), position)
        _take_pages(faults, tables, entry, position + window - 1, rows.pages[row], page_size)
        _take_gainer(entry, position + 1, rows, row)
        for w in range(window):
            _take_sample(tables, entry, position + 1 + w, rows, begin + w)
            rows.logit_rows[begin + w] = begin + w
        if poison and entry != PADDING:
            tables.token[entry] = -1
    before = first = sample = shape.decode * shape.window
    gainer = shape.decode
    for c in range(shape.chunks):
        entry, row = int(step.chunks[CHUNK_ENTRY, c]), shape.decode + c
        start, count = int(step.chunks[CHUNK_START, c]), int(step.chunks[CHUNK_COUNT, c])
        code = _chunk_fault(tables, entry, start + count - 1, page_size)
        if code:
            faults.append(fault(code, entry))
            entry, end = PADDING, 1
            _lay_out(rows, row, first, [PADDING] * count, None)
        else:
            end = start + count
            begin = first - before
            _lay_out(rows, row, first, ids[begin : begin + count].tolist(), start)
        _take_pages(faults, tables, entry, end - 1, rows.pages[row], page_size)
        first += count
        if step.chunks[CHUNK_LAST, c]:
            rows.logit_rows[sample] = first - 1
            _take_sample(tables, entry, end, rows, sample)
            _take_gainer(entry, end, rows, gainer)
            sample, gainer = sample + 1, gainer + 1
        if poison and entry != PADDING:
            tables.length[entry] = tables.token[entry] = -1
    return faults


def accept(rows: Rows, targets: Array, gained: Gained, table: Array, shape: PassShape) -> None:
    """What each row gains, see `StepKernels.accept`."""
    gained.tokens[:, : shape.gainers] = -1
    for i in range(shape.gainers):
        window = shape.window if i < shape.decode else 1
        first = i * window if i < shape.decode else shape.decode * shape.window + i - shape.decode
        run = [int(targets[first])]
        for w in range(1, window):
            if run[-1] < 0 or rows.tokens[first + w] != run[-1]:
                break
            run.append(int(targets[first + w]))
        gained.tokens[: len(run), i] = run
        gained.counts[i], gained.newest[i] = len(run), run[-1]
        rows.lengths[i] += len(run) - 1 if rows.lengths[i] else 0
        table[rows.entries[i]] = rows.lengths[i]


def scatter(table: Array, entries: Array, values: Array) -> None:
    """Stash: table[entries] = values."""
    for entry, value in zip(entries.tolist(), values.tolist(), strict=True):
        table[entry] = value


def _decode_fault(tables: Tables, entry: int, window: int, page_size: int) -> int:
    if not 0 <= entry < len(tables.length):
        return BAD_ENTRY
    if tables.length[entry] < 0 or tables.token[entry] < 0:
        return NOT_PUBLISHED
    return BAD_POSITION if int(tables.length[entry]) + window > tables.pages.shape[1] * page_size else 0


def _chunk_fault(tables: Tables, entry: int, last: int, page_size: int) -> int:
    if not 0 <= entry < len(tables.length):
        return BAD_ENTRY
    return 0 if 0 <= last < tables.pages.shape[1] * page_size else BAD_POSITION


def _lay_out(rows: Rows, row: int, first: int, tokens: list[int], start: int | None) -> None:
    """The tokens of one row; without a start all of them stand at position 0."""
    span = slice(first, first + len(tokens))
    rows.tokens[span] = tokens
    rows.positions[span] = 0 if start is None else start + np.arange(len(tokens))
    rows.seqs[span] = row
    rows.starts[row], rows.starts[row + 1] = span.start, span.stop
    rows.ends[row] = 1 if start is None else start + len(tokens)


def _take_pages(faults: list[int], tables: Tables, entry: int, last: int, row: Array, page_size: int) -> None:
    """The pages of positions 0..last."""
    used = last // page_size + 1
    row[:used] = tables.pages[entry, :used]
    if entry != PADDING and (row[:used] == PADDING).any():
        faults.append(fault(NOT_FILLED, entry))


def _take_gainer(entry: int, length: int, rows: Rows, gainer: int) -> None:
    """What the relay needs for an entry that has `length` tokens once it has gained one."""
    rows.entries[gainer] = entry
    rows.lengths[gainer] = length if entry != PADDING else 0  # padding stays at length 0 for ever


def _take_sample(tables: Tables, entry: int, place: int, rows: Rows, sample: int) -> None:
    """What the sampler needs for the token at position `place` of the entry."""
    rows.places[sample] = place
    rows.real[:, sample] = tables.real[:, entry]
    rows.top_k[sample] = tables.top_k[entry]
    rows.seed[sample] = tables.seed[entry]
