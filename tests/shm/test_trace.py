"""The trace: the oldest overwritten, torn spans dropped, the writer never stopped."""

import os
import signal
import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shm.control import STAGES
from shm.launch import die_with
from shm.limits import CACHE_LINE_BYTES, TRACE_LANES, TRACE_SPANS
from shm.segment import Segment
from shm.trace import SPAN_NAMES, Trace, What, _lane_offset

N = TRACE_SPANS


def make() -> Trace:
    return Trace(Segment.create("trace", Trace.size()))


def wrong_spans(spans: npt.NDArray[np.uint64]) -> int:
    """Count the spans that are not (1, i, i + 1, i + 2), or not the successor of the one before."""
    spans = spans.astype(np.int64)
    steps = spans[:, 1]
    torn = (spans[:, 2] != steps + 1) | (spans[:, 3] != steps + 2) | (spans[:, 0] != 1)
    return int(torn.sum() + (np.diff(steps) != 1).sum())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, N + 50), min_size=1, max_size=4), st.booleans())
def test_a_reader_gets_every_span_that_is_still_there(bursts: list[int], restart: bool) -> None:
    trace = make()
    writer = trace.writer("gpu", 1)
    written = since = 0
    for burst in bursts:
        for _ in range(burst):
            writer.span(1, written, written + 1, written + 2)
            written += 1
        if restart:
            writer = trace.writer("gpu", 1)
        spans, since_next = trace.read_lane("gpu", 1, since)
        assert since_next == written
        # One less than fit: the reader cannot know that the writer is not at work on the next one.
        assert len(spans) == min(written - since, N - 1)
        assert not wrong_spans(spans)
        assert int(spans[-1, 1]) == written - 1
        since = since_next
    assert len(trace.read_lane("gpu", 1, since)[0]) == 0
    trace.segment.close()


def test_a_span_that_its_writer_died_in_is_never_read() -> None:
    trace = make()
    writer = trace.writer("gpu", 0)
    for i in range(N + 10):
        writer.span(1, i, i + 1, i + 2)
    spans = trace.segment.array(np.uint64, N * 4, _lane_offset("gpu", 0) + CACHE_LINE_BYTES).reshape(N, 4)
    spans[(N + 10) % N] = 99  # stored in part, the head not yet
    seen, _ = trace.read_lane("gpu", 0)
    assert len(seen) == N - 1
    assert not wrong_spans(seen)


def test_reading_beside_a_busy_writer_gives_no_torn_span_where_a_plain_copy_does() -> None:
    trace = make()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with(parent)
        writer = trace.writer("gpu", 2)
        i = 0
        while True:
            writer.span(1, i, i + 1, i + 2)
            i += 1
    base = _lane_offset("gpu", 2)
    raw = trace.segment.array(np.uint64, N * 4, base + CACHE_LINE_BYTES).reshape(N, 4)
    wrong = naive_wrong = reads = 0
    end, least = time.monotonic() + 10, time.monotonic() + 0.5
    try:
        while time.monotonic() < end and not (naive_wrong and reads > 200 and time.monotonic() > least):
            spans, head = trace.read_lane("gpu", 2)
            if head < 2 * N:
                continue
            reads += 1
            wrong += wrong_spans(spans)
            head = trace.segment.words[base // 8]
            naive_wrong += wrong_spans(raw.copy()[np.arange(head - N, head) % N])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert reads > 20
    assert not wrong
    if len(os.sched_getaffinity(0)) > 1:
        assert naive_wrong, "the writer was not fast enough for this to mean anything"
    trace.segment.close()


def test_lanes_are_apart_and_read_together_in_order_of_begin() -> None:
    trace = make()
    for i, stage in enumerate(STAGES):
        for lane in range(TRACE_LANES):
            trace.writer(stage, lane).span(What.STEP, i, 1000 - i, 2000 + lane)
    other = Trace(Segment.attach(trace.segment.fd, trace.segment.size, "trace"))
    spans = other.read()
    assert len(spans) == len(STAGES) * TRACE_LANES
    assert [span.begin_ns for span in spans] == sorted(span.begin_ns for span in spans)
    assert {(span.stage, span.lane, span.step, span.end_ns) for span in spans} == {
        (stage, lane, i, 2000 + lane) for i, stage in enumerate(STAGES) for lane in range(TRACE_LANES)
    }
    assert {span.name for span in spans} == {"step"}
    with pytest.raises(AssertionError):
        trace.writer("gpu", TRACE_LANES)


def test_names() -> None:
    assert len(SPAN_NAMES) == len(What)
    trace = make()
    trace.writer("gpu").span(255, 1, 2, 3)
    assert trace.read()[0].name == "span 255"
