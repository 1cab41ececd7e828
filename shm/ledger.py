"""The ledger: one row per live request, and the only truth about it.

Owns the planes (columns) and says who writes each. Whatever else is known about a request can be rebuilt from its row,
so any process may die. A plane has one writer. Values that belong together are published by the one marked LAST: a row
is ready, begun, done or stopped when that word equals the row's generation, so what an earlier request left behind
never counts. It knows nothing of policy, and it never frees a row: the frontend does, by giving it a new generation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shm.limits import (
    CACHE_LINE_BYTES,
    HEADER_BYTES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    STOP_BYTES,
)
from shm.segment import Segment, schema_hash

# Values of the plane `finish`
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR = range(5)
FINISH_NAMES = (None, "stop", "length", "abort", "error")


class Plane(NamedTuple):
    """One column of the ledger; `columns` items of `dtype` per row, 0 standing for max_len."""

    name: str
    writer: str
    dtype: str
    columns: int = 1


PLANES = (
    Plane("generation", "frontend", "i8"),  # 0 = never used; + 1 with every allocation of the row
    Plane("abort", "frontend", "i8"),  # := generation: the client is gone
    Plane("delivered", "frontend", "i4"),  # output tokens whose text was handed to the client
    Plane("arrival_ns", "frontend", "i8"),  # CLOCK_MONOTONIC
    Plane("freed", "frontend", "i8"),  # := generation: the row belongs to nobody until it has another one
    Plane("prompt_len", "tokenizer", "i4"),
    Plane("temperature", "tokenizer", "f4"),
    Plane("top_p", "tokenizer", "f4"),
    Plane("min_p", "tokenizer", "f4"),
    Plane("top_k", "tokenizer", "i4"),  # 0 = off
    Plane("seed", "tokenizer", "u8"),
    Plane("max_new", "tokenizer", "i4"),  # limit of output tokens
    Plane("ignore_eos", "tokenizer", "i4"),
    Plane("stop_ids", "tokenizer", "i4", MAX_STOP_TOKEN_IDS),  # padded with -1
    Plane("stop_lens", "tokenizer", "i4", MAX_STOP_STRINGS),  # bytes; 0 = none
    Plane("stop_text", "tokenizer", "u1", STOP_BYTES),  # utf-8, one after the other
    Plane("ready", "tokenizer", "i8"),  # := generation, LAST
    Plane("count", "scheduler", "i4"),  # output tokens; stored after the tokens
    Plane("finish", "scheduler", "i4"),  # FINISH_*
    Plane("draft_steps", "scheduler", "i4"),  # steps with drafts that gave the row tokens
    Plane("drafted", "scheduler", "i4"),  # tokens drafted in them
    Plane("accepted", "scheduler", "i4"),  # of those the ones that the row kept
    Plane("scheduler_deaths", "scheduler", "i4"),  # of the scheduler, with the row in the batch and not getting on
    Plane("gpu_deaths", "scheduler", "i4"),  # of the gpu process, with the row in the running step and not getting on
    # The same in one streak of deaths (see `Control.streak`), whether the row got on or not, and in which.
    Plane("scheduler_in_a_row", "scheduler", "i4"),
    Plane("scheduler_streak", "scheduler", "i8"),
    Plane("gpu_in_a_row", "scheduler", "i4"),
    Plane("gpu_streak", "scheduler", "i8"),
    Plane("admitted", "scheduler", "i8"),  # := generation while the row is in the batch
    Plane("begun", "scheduler", "i8"),  # := generation when the planes above were reset for it
    Plane("done", "scheduler", "i8"),  # := generation, LAST: the scheduler never touches the row again
    # Output tokens, the one that completed a stop string included: the row's end, for a frontend that has to find in
    # the ledger alone whether the one before it was told.
    Plane("text_stop_count", "detokenizer", "i4"),
    Plane("text_stop", "detokenizer", "i8"),  # := generation, LAST
    Plane("in_hand", "detokenizer", "i8"),  # := generation while the row's text is made
    Plane("text_deaths", "detokenizer", "i4"),  # of the detokenizer, with the row in hand and not getting on
    Plane("text_in_a_row", "detokenizer", "i4"),  # in one streak of deaths, whether it got on or not
    Plane("text_streak", "detokenizer", "i8"),  # in which
    Plane("text_deaths_of", "detokenizer", "i8"),  # := generation, LAST
    # The prompt, written by the tokenizer, and behind it the output, written by the scheduler.
    Plane("tokens", "tokenizer [:prompt_len], scheduler [prompt_len:]", "i4", 0),
)


class Ledger:
    """Numpy views of the planes, indexed by row: `[rows]`, or `[rows, columns]` where a row has several items."""

    generation: npt.NDArray[np.int64]
    abort: npt.NDArray[np.int64]
    delivered: npt.NDArray[np.int32]
    arrival_ns: npt.NDArray[np.int64]
    freed: npt.NDArray[np.int64]
    prompt_len: npt.NDArray[np.int32]
    temperature: npt.NDArray[np.float32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    seed: npt.NDArray[np.uint64]
    max_new: npt.NDArray[np.int32]
    ignore_eos: npt.NDArray[np.int32]
    stop_ids: npt.NDArray[np.int32]
    stop_lens: npt.NDArray[np.int32]
    stop_text: npt.NDArray[np.uint8]
    ready: npt.NDArray[np.int64]
    count: npt.NDArray[np.int32]
    finish: npt.NDArray[np.int32]
    draft_steps: npt.NDArray[np.int32]
    drafted: npt.NDArray[np.int32]
    accepted: npt.NDArray[np.int32]
    scheduler_deaths: npt.NDArray[np.int32]
    gpu_deaths: npt.NDArray[np.int32]
    scheduler_in_a_row: npt.NDArray[np.int32]
    scheduler_streak: npt.NDArray[np.int64]
    gpu_in_a_row: npt.NDArray[np.int32]
    gpu_streak: npt.NDArray[np.int64]
    admitted: npt.NDArray[np.int64]
    begun: npt.NDArray[np.int64]
    done: npt.NDArray[np.int64]
    text_stop_count: npt.NDArray[np.int32]
    text_stop: npt.NDArray[np.int64]
    in_hand: npt.NDArray[np.int64]
    text_deaths: npt.NDArray[np.int32]
    text_in_a_row: npt.NDArray[np.int32]
    text_streak: npt.NDArray[np.int64]
    text_deaths_of: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]

    def __init__(self, segment: Segment, rows: int, max_len: int) -> None:
        """Attach to the segment, or format it if it is new (the supervisor does, before any child exists)."""
        schema = schema_hash(f"{PLANES} {rows} {max_len}")
        if not segment.formatted:
            segment.format("ledger", schema)
        segment.check("ledger", schema)
        assert segment.size >= Ledger.size(rows, max_len)
        self.segment = segment
        self.rows = rows
        self.max_len = max_len
        for plane, offset in zip(PLANES, _offsets(rows, max_len), strict=False):
            columns = plane.columns or max_len
            view = segment.array(plane.dtype, rows * columns, offset)
            setattr(self, plane.name, view if plane.columns == 1 else view.reshape(rows, columns))

    @staticmethod
    def size(rows: int, max_len: int) -> int:
        """Return the bytes of a ledger of `rows` requests of up to `max_len` tokens each, prompt and output."""
        return _offsets(rows, max_len)[-1]

    def stop_strings(self, row: int) -> list[str]:
        """Return the stop strings of a row, in the order they were written."""
        lens = self.stop_lens[row].tolist()
        text = self.stop_text[row, : sum(lens)].tobytes()
        strings, start = [], 0
        for length in lens:
            if length:
                strings.append(text[start : start + length].decode())
                start += length
        return strings

    def write_stop_strings(self, row: int, strings: list[str]) -> None:
        """Store the stop strings of a row. Writer: tokenizer.

        Raises ValueError for more than MAX_STOP_STRINGS, an empty one, one above MAX_STOP_CHARS or one that is no
        valid Unicode text.
        """
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(strings)}")
        encoded = []
        for string in strings:
            if not 0 < len(string) <= MAX_STOP_CHARS:
                raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {len(string)}")
            encoded.append(string.encode())  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        lens = np.zeros(MAX_STOP_STRINGS, np.int32)
        lens[: len(encoded)] = [len(text) for text in encoded]
        text = b"".join(encoded)
        self.stop_text[row, : len(text)] = np.frombuffer(text, np.uint8)
        self.stop_lens[row] = lens


def _offsets(rows: int, max_len: int) -> list[int]:
    """Return the byte offset of each plane, and of the end. Planes of two writers never share a cache line."""
    assert rows > 0 and max_len > 0, (rows, max_len)
    offsets = [HEADER_BYTES]
    for plane in PLANES:
        nbytes = rows * (plane.columns or max_len) * np.dtype(plane.dtype).itemsize
        offsets.append(offsets[-1] + -(-nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)
    return offsets


assert len({plane.name for plane in PLANES}) == len(PLANES)
assert all(plane.name in Ledger.__annotations__ for plane in PLANES)
