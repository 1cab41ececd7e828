"""Who runs next: every choice that the scheduler makes, as pure functions over the state of the batch.

Owns the rules and nothing else. Nothing here does I/O, changes the state, looks at a token, or waits. What is chosen
must not depend on anything that the device has not finished: a step is planned while the one before it runs.
"""

import numpy as np
from numpy.typing import NDArray

from procs.batch_state import BatchState, Ints

HEADROOM_CALM = 1  # pages that admission leaves to every running row
HEADROOM_TIGHT = 4  # the same after a retraction, so that the row taken out is not let in to be taken out again


def decode_rows(state: BatchState) -> Ints:
    """Entries of the next step's decode rows, ascending: prefill queued, and the limit not certain to be reached.

    A step in flight gives each of its rows at least one token. A row that reaches its limit even so is left out; one
    that may or may not reach it takes part, and what it gains beyond the limit is dropped.
    """
    ready = state.cursor == state.fill
    ready &= state.outputs + state.in_flight < state.limit
    entries: Ints = ready.nonzero()[0]
    return entries


def pages_wanted(state: BatchState, rows: Ints) -> Ints:
    """How many pages each of `rows` lacks for the next step, i64[n].

    Two windows beyond the count: with one step in flight the device may be a whole window ahead of the count, and the
    next step writes another. While the last chunk is in flight the count is behind, but the device's length is known.
    """
    known = np.maximum(state.counted[rows], state.fill[rows])
    wanted = (known + (2 * state.window + state.page_size - 1)) // state.page_size
    short: Ints = np.maximum(wanted - state.page_count[rows], 0)
    return short


def pages_for_prompt(state: BatchState, fill: int) -> int:
    """Pages of a whole row at admission: its prompt (with the output so far) and two windows."""
    return -(-(fill + 2 * state.window) // state.page_size)


def prefill_rows(state: BatchState) -> Ints:
    """Entries with positions left to put into a chunk, first come first."""
    rows = (state.cursor < state.fill).nonzero()[0]
    return rows if len(rows) < 2 else rows[np.argsort(state.order[rows])]


def split_budget(remaining: Ints, budget: int) -> Ints:
    """Share the step's prefill tokens: everybody in turn gets what is left of its prompt, until the budget is gone."""
    before = np.cumsum(remaining) - remaining
    shares: Ints = np.clip(budget - before, 0, remaining)
    return shares


def may_admit(pages_wanted: int, pages_available: int, running: int, headroom: int) -> bool:
    """Whether a queued request may start: all its pages, and `headroom` pages for every row that runs already.

    With nothing running the configuration guarantees that any request fits.
    """
    return pages_wanted + running * headroom <= pages_available


def retraction_victim(state: BatchState) -> int:
    """The entry to take out when the cache is full: fewest output tokens, then the longest prompt, then the newest."""
    used = np.flatnonzero(state.used)
    assert len(used) > 1, "the last row is never retracted"
    return int(used[np.lexsort((-state.order[used], -state.prompt[used], state.outputs[used]))[0]])


def accept(
    tokens: NDArray[np.int32], counts: NDArray[np.int32], stop_ids: NDArray[np.int32], room: Ints
) -> tuple[Ints, NDArray[np.bool_]]:
    """How many of a step's tokens each row keeps, and whether a stop id ended it.

    tokens i32[window, n] with counts i32[n] valid ones per row, stop_ids i32[n, s], room i64[n] tokens up to the limit.
    The run is cut behind the first stop id; a stop id that lies beyond the limit does not count.
    """
    window = len(tokens)
    hits = tokens[:, :, None] == stop_ids
    first: Ints | int = window
    if np.count_nonzero(hits):  # rare, and looking costs less than reducing
        stops = hits.any(axis=2) & (np.arange(window)[:, None] < counts)
        first = np.where(stops.any(axis=0), stops.argmax(axis=0), window)
    taken = np.minimum(np.minimum(counts, first + 1), room)
    return taken, first < taken
