"""The trace: what every thread of every stage did when, always on, the oldest overwritten.

A lane holds TRACE_SPANS spans of 32 bytes (what, step, begin, end) and a head that counts all ever written. Owns the
lanes and the table of span names. A writer never waits for a reader: a reader drops what may have been overwritten
under its eyes. Nothing in here may be needed to serve a request.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shm.control import STAGE_INDEX, STAGES
from shm.doorbell import STORES_ARE_ORDERED, fence
from shm.limits import CACHE_LINE_BYTES, HEADER_BYTES, TRACE_LANES, TRACE_SPANS
from shm.segment import Segment, schema_hash


class What(IntEnum):
    """Names of spans; the number is what a lane holds."""

    # frontend, tokenizer, detokenizer
    REQUEST = 1
    TOKENIZE = 2
    DETOKENIZE = 3
    # scheduler
    INTAKE = 10
    PLAN = 11
    PUSH = 12
    WAIT = 13
    PROCESS = 14
    # gpu, CPU side
    LAUNCH = 20
    CAPTURE = 21
    # gpu, device side
    STEP = 30
    GAP = 31  # in front of the step whose number it has, where there was something to do
    RESULT = 35
    # supervisor
    START = 40


SPAN_NAMES: dict[int, str] = {what.value: what.name.lower() for what in What}

_SPAN = struct.Struct("<QQQQ")  # what, step, begin_ns, end_ns
_LANE_BYTES = CACHE_LINE_BYTES + TRACE_SPANS * _SPAN.size
_SCHEMA = schema_hash(f"{STAGES} {TRACE_LANES} {TRACE_SPANS} {_SPAN.format}")

assert _SPAN.size == 32
assert _LANE_BYTES % CACHE_LINE_BYTES == 0


class Span(NamedTuple):
    """One span. Times are CLOCK_MONOTONIC."""

    stage: str
    lane: int
    what: int
    step: int
    begin_ns: int
    end_ns: int

    @property
    def name(self) -> str:
        return SPAN_NAMES.get(self.what, f"span {self.what}")


class TraceWriter:
    """One lane, for the one thread that writes it."""

    def __init__(self, segment: Segment, stage: str, lane: int) -> None:
        base = _lane_offset(stage, lane)
        self._head_word = base // 8
        self._spans = segment.buf[base + CACHE_LINE_BYTES : base + _LANE_BYTES]
        self._words = segment.words
        self._head: int = self._words[self._head_word]  # a restarted stage goes on where its predecessor was

    def span(self, what: int, step: int, begin_ns: int, end_ns: int) -> None:
        """Record a span of CLOCK_MONOTONIC nanoseconds; step is the step's number, or 0."""
        head = self._head
        # Not a cursor: nobody reads this slot before the head says so, so that it may be stored in pieces.
        _SPAN.pack_into(self._spans, head % TRACE_SPANS * 32, what, step, begin_ns, end_ns)
        if not STORES_ARE_ORDERED:
            fence()
        self._words[self._head_word] = self._head = head + 1  # SYNC span-written


class Trace:
    """A view of the trace segment, the same in every process."""

    def __init__(self, segment: Segment) -> None:
        """Attach to the segment, or format it if it is new (the supervisor does, before any child exists)."""
        if not segment.formatted:
            segment.format("trace", _SCHEMA)
        segment.check("trace", _SCHEMA)
        self.segment = segment

    @staticmethod
    def size() -> int:
        return HEADER_BYTES + len(STAGES) * TRACE_LANES * _LANE_BYTES

    def writer(self, stage: str, lane: int = 0) -> TraceWriter:
        return TraceWriter(self.segment, stage, lane)

    def read_lane(self, stage: str, lane: int, since: int = 0) -> tuple[npt.NDArray[np.uint64], int]:
        """Return the spans of a lane, u64[n, 4] (what, step, begin_ns, end_ns), and the head: the next call's `since`.

        Of the spans numbered from `since`, those that were overwritten meanwhile are missing; none is torn.
        """
        base = _lane_offset(stage, lane)
        words = self.segment.words
        head = words[base // 8]  # SYNC span-written
        if not STORES_ARE_ORDERED:
            fence()
        ring = self.segment.array(np.uint64, TRACE_SPANS * 4, base + CACHE_LINE_BYTES).copy().reshape(TRACE_SPANS, 4)
        if not STORES_ARE_ORDERED:
            fence()
        # The writer may have been at work on span `head_after` during the copy: it and its predecessors overwrite those
        # that are TRACE_SPANS older.
        head_after = words[base // 8]
        first = max(since, head_after + 1 - TRACE_SPANS)
        return ring[np.arange(first, max(first, head)) % TRACE_SPANS], head

    def read(self) -> list[Span]:
        """Return all spans of all lanes, ordered by begin."""
        spans = [
            Span(stage, lane, *row)
            for stage in STAGES
            for lane in range(TRACE_LANES)
            for row in self.read_lane(stage, lane)[0].tolist()
        ]
        spans.sort(key=lambda span: span.begin_ns)
        return spans


def _lane_offset(stage: str, lane: int) -> int:
    assert 0 <= lane < TRACE_LANES, lane
    return HEADER_BYTES + (STAGE_INDEX[stage] * TRACE_LANES + lane) * _LANE_BYTES
