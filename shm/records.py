"""The records that the rings carry, declared once: what lies where, and how large each ring must be.

Owns the layouts of the step descriptor, the step result, the intake and the progress record, and the table of rings. A
step descriptor carries entry numbers, chunks, slot writes and sampling changes; it may never carry a token or the
length of a running request. Payloads are int32 planes; whatever is not int32 lies in them bit for bit.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shm.config import ServerConfig
from shm.limits import (
    INTAKE_RING_SLOTS,
    INTAKE_ROWS_MAX,
    PROGRESS_RING_SLOTS,
    RESULT_RING_SLOTS,
    STEP_RING_SLOTS,
)
from shm.segment import schema_hash

Int32Array = npt.NDArray[np.int32]

# Kinds of step
STEP_DECODE, STEP_MIXED = 0, 1
# Kinds of result: of a step that ran, or of one that was meant for the memory of an earlier gpu process and did not
RESULT_RAN, RESULT_DROPPED = 0, 1
# Planes of StepView.chunks
CHUNK_ENTRY, CHUNK_ROW, CHUNK_START, CHUNK_COUNT, CHUNK_LAST, CHUNK_SPARE = range(6)
CHUNK_PLANES = 6
# Planes of StepView.slot_writes
SLOT_ENTRY, SLOT_INDEX, SLOT_PAGE = range(3)
SLOT_PLANES = 3
# Planes of StepView.sampling
(
    SAMPLING_ENTRY,
    SAMPLING_TEMPERATURE,
    SAMPLING_TOP_P,
    SAMPLING_MIN_P,
    SAMPLING_TOP_K,
    SAMPLING_SEED_LO,
    SAMPLING_SEED_HI,
) = range(7)
SAMPLING_PLANES = 7

HEADER_INTS = 16
_KIND, _N_DECODE, _N_CHUNKS, _N_SLOT_WRITES, _N_SAMPLING, _STEP_LO, _STEP_HI, _DRAFTS, _GPU_EPOCH = range(9)
_N_ROWS, _WINDOW, _BEGIN_LO, _BEGIN_HI, _END_LO, _END_HI, _RESULT_STEP_LO, _RESULT_STEP_HI, RESULT_FAULT = range(9)

INTAKE_PLANES = 2  # row, generation
PROGRESS_PLANES = 4  # row, generation, count, finish

assert max(_GPU_EPOCH, RESULT_FAULT) < HEADER_INTS
assert np.dtype(np.int32).itemsize == np.dtype(np.float32).itemsize == 4


class _Header:
    """Named ints and pairs of ints in the first HEADER_INTS of a payload."""

    def __init__(self, header: Int32Array) -> None:
        self.header = header


def _int(index: int, doc: str) -> Any:
    def get(self: _Header) -> int:
        return int(self.header[index])

    def put(self: _Header, value: int) -> None:
        self.header[index] = value

    return property(get, put, doc=doc)


def _u64(lo: int, doc: str) -> Any:
    """Two ints, the low half first, as one unsigned number."""

    def get(self: _Header) -> int:
        low, high = int(self.header[lo]), int(self.header[lo + 1])
        return (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32

    def put(self: _Header, value: int) -> None:
        self.header[lo], self.header[lo + 1] = _halves(value)

    return property(get, put, doc=doc)


def _halves(value: int) -> tuple[int, int]:
    """Return the low and the high half of a u64 as int32 values."""
    low, high = value & 0xFFFFFFFF, value >> 32
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


class StepView(_Header):
    """A step descriptor in an int32 payload, for writing and for reading.

    decode_entries int32[max_running], the first n_decode used
    chunks         int32[6, max_running], planes CHUNK_*, the first n_chunks columns used
    slot_writes    int32[3, slot_write_cap], planes SLOT_* (strided), the first n_slot_writes columns used
    sampling       int32[7, max_running], planes SAMPLING_*, the first n_sampling columns used
    sampling_f32   float32[7, max_running], the same memory, for temperature, top_p and min_p
    """

    kind: int = _int(_KIND, "STEP_DECODE or STEP_MIXED")
    n_decode: int = _int(_N_DECODE, "decode rows")
    n_chunks: int = _int(_N_CHUNKS, "prefill chunks")
    n_slot_writes: int = _int(_N_SLOT_WRITES, "slot-table writes")
    n_sampling: int = _int(_N_SAMPLING, "sampling-table writes")
    step: int = _u64(_STEP_LO, "number of the step")
    drafts: int = _int(_DRAFTS, "tokens that are drafted behind the newest one of each decode row")
    gpu_epoch: int = _int(_GPU_EPOCH, "epoch of the gpu process whose memory the step builds upon")

    def __init__(self, layout: StepLayout, payload: Int32Array) -> None:
        super().__init__(payload[:HEADER_INTS])
        rows, cap = layout.max_running, layout.slot_write_cap
        self.layout = layout
        self.decode_entries = payload[layout.decode_at : layout.decode_at + rows]
        sampling = payload[layout.sampling_at : layout.sampling_at + SAMPLING_PLANES * rows]
        self.sampling = sampling.reshape(SAMPLING_PLANES, rows)
        self.sampling_f32: npt.NDArray[np.float32] = self.sampling.view(np.float32)
        self.chunks = payload[layout.chunks_at : layout.chunks_at + CHUNK_PLANES * rows].reshape(CHUNK_PLANES, rows)
        writes = payload[layout.slot_writes_at : layout.slot_writes_at + SLOT_PLANES * cap]
        self.slot_writes = writes.reshape(cap, SLOT_PLANES).T

    @property
    def used_nbytes(self) -> int:
        """Bytes from the start that hold everything in use: what to publish."""
        return (self.layout.slot_writes_at + SLOT_PLANES * self.n_slot_writes) * 4

    def clear(self) -> None:
        """Zero the header, so that every section is empty, and nothing is drafted."""
        self.header[:] = 0

    def set_sampling(  # one argument per plane
        self, i: int, entry: int, temperature: float, top_p: float, min_p: float, top_k: int, seed: int
    ) -> None:
        """Write column i of the sampling changes; seed is a u64."""
        column = self.sampling[:, i]
        column[SAMPLING_ENTRY] = entry
        column[SAMPLING_TOP_K] = top_k
        column[SAMPLING_SEED_LO], column[SAMPLING_SEED_HI] = _halves(seed)
        floats = self.sampling_f32
        floats[SAMPLING_TEMPERATURE, i] = temperature
        floats[SAMPLING_TOP_P, i] = top_p
        floats[SAMPLING_MIN_P, i] = min_p

    def seeds(self) -> npt.NDArray[np.uint64]:
        """Return the seeds of the sampling changes in use, u64[n_sampling]."""
        n = self.n_sampling
        low = self.sampling[SAMPLING_SEED_LO, :n].view(np.uint32).astype(np.uint64)
        high = self.sampling[SAMPLING_SEED_HI, :n].view(np.uint32).astype(np.uint64)
        return low | high << np.uint64(32)


class StepLayout:
    """Where the sections of a step descriptor lie for a configuration. `nbytes` is the payload of the step ring.

    The slot writes come last and column by column, so that a step with few of them is a short record.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.max_running = config.max_running
        self.slot_write_cap = 2 * config.pages_per_row + 4 * config.max_running + config.prefill_chunk
        self.decode_at = HEADER_INTS
        self.sampling_at = self.decode_at + self.max_running
        self.chunks_at = self.sampling_at + SAMPLING_PLANES * self.max_running
        self.slot_writes_at = self.chunks_at + CHUNK_PLANES * self.max_running
        self.nbytes = (self.slot_writes_at + SLOT_PLANES * self.slot_write_cap) * 4
        assert self.slot_writes_at == HEADER_INTS + 14 * self.max_running, "sections lie side by side"

    def view(self, payload: Int32Array) -> StepView:
        """Return the sections of `payload`, int32[>= nbytes // 4]."""
        assert payload.dtype == np.int32 and payload.size * 4 >= self.nbytes, (payload.dtype, payload.size)
        return StepView(self, payload)


class ResultView(_Header):
    """The result of a step in an int32 payload, for writing and for reading.

    counts int32[max_rows]: tokens of each row; tokens int32[window, max_rows]: row i got tokens[: counts[i], i].
    Rows are the decode rows in the order of the descriptor, then the chunks with last = 1 in order.
    """

    n_rows: int = _int(_N_ROWS, "rows in use")
    window: int = _int(_WINDOW, "planes of tokens in use")
    begin_ns: int = _u64(_BEGIN_LO, "when the device began the step, CLOCK_MONOTONIC")
    end_ns: int = _u64(_END_LO, "when the device ended the step, CLOCK_MONOTONIC")
    step: int = _u64(_RESULT_STEP_LO, "number of the step")
    fault: int = _int(RESULT_FAULT, "what a device that cannot raise has to say, 0: nothing")

    def __init__(self, layout: ResultLayout, payload: Int32Array) -> None:
        super().__init__(payload[:HEADER_INTS])
        rows = layout.max_rows
        self.counts = payload[layout.counts_at : layout.counts_at + rows]
        self.tokens = payload[layout.tokens_at : layout.tokens_at + layout.window * rows].reshape(layout.window, rows)


class ResultLayout:
    """Where the sections of a step result lie for a configuration. `nbytes` is the payload of the result ring."""

    def __init__(self, config: ServerConfig) -> None:
        self.window = config.window
        self.max_rows = config.max_running  # a row is in a step once: with its next token or with a chunk
        self.counts_at = HEADER_INTS
        self.tokens_at = self.counts_at + self.max_rows
        self.nbytes = (self.tokens_at + self.window * self.max_rows) * 4
        assert self.nbytes == 4 * (HEADER_INTS + (1 + self.window) * self.max_rows), "sections lie side by side"

    def view(self, payload: Int32Array) -> ResultView:
        """Return the sections of `payload`, int32[>= nbytes // 4]."""
        assert payload.dtype == np.int32 and payload.size * 4 >= self.nbytes, (payload.dtype, payload.size)
        return ResultView(self, payload)


def intake_record(rows: npt.ArrayLike, generations: npt.ArrayLike) -> Int32Array:
    """Return the record int32[2, n], 1 <= n <= INTAKE_ROWS_MAX: these rows are ready."""
    return _planes(rows, generations)


def read_intake(payload: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Return (rows, generations), int32[n] each, as views of the payload."""
    rows, generations = payload.reshape(INTAKE_PLANES, -1)
    return rows, generations


def progress_record(
    rows: npt.ArrayLike, generations: npt.ArrayLike, counts: npt.ArrayLike, finishes: npt.ArrayLike
) -> Int32Array:
    """Return the record int32[4, n], 1 <= n <= progress_rows_max: counts are the output tokens now in the ledger."""
    return _planes(rows, generations, counts, finishes)


def read_progress(payload: Int32Array) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
    """Return (rows, generations, counts, finishes), int32[n] each, as views of the payload."""
    rows, generations, counts, finishes = payload.reshape(PROGRESS_PLANES, -1)
    return rows, generations, counts, finishes


def progress_rows_max(config: ServerConfig) -> int:
    """Rows that one progress record can carry; more of them go into several records."""
    return 2 * config.max_running


def _planes(*columns: npt.ArrayLike) -> Int32Array:
    return np.stack([np.atleast_1d(np.asarray(column)).astype(np.int32) for column in columns])


RingName = Literal["intake", "step", "result", "progress"]


class RingSpec(NamedTuple):
    """A ring as data: who writes it, who reads it, how large it is, and the hash of what its records mean."""

    producer: str
    consumer: str
    slots: int
    payload_bytes: int
    schema: int


def ring_specs(config: ServerConfig) -> dict[str, RingSpec]:
    """Return every ring of a server by name."""
    step, result = StepLayout(config), ResultLayout(config)
    sizes = {
        "intake": ("tokenizer", "scheduler", INTAKE_RING_SLOTS, INTAKE_PLANES * INTAKE_ROWS_MAX * 4),
        "step": ("scheduler", "gpu", STEP_RING_SLOTS, step.nbytes),
        "result": ("gpu", "scheduler", RESULT_RING_SLOTS, result.nbytes),
        "progress": ("scheduler", "detokenizer", PROGRESS_RING_SLOTS, PROGRESS_PLANES * progress_rows_max(config) * 4),
    }
    layout = f"{vars(step)} {vars(result)} {INTAKE_PLANES} {PROGRESS_PLANES}"
    return {name: RingSpec(*size, schema_hash(f"{name} {size} {layout}")) for name, size in sizes.items()}
