"""Progress on its way to the detokenizer: nothing is waited for, no end is lost, a row's records keep their order."""

import os
import select
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procs.sched_progress import ProgressOut
from procs.scheduler import Scheduler
from procs.server_memory import ServerMemory
from shm.child import Child
from shm.ledger import FINISH_LENGTH, FINISH_NONE, FINISH_STOP
from shm.records import ResultLayout, progress_record, read_progress, ring_specs
from shm.ring import Ring, RingConsumer
from shm.segment import Segment
from tests.procs.simulated_device import tiny_config

ROWS, RECORD_ROWS, SLOTS = 7, 3, 2


def make() -> tuple[ProgressOut, RingConsumer]:
    segment = Segment.create("progress", Ring.size(SLOTS, 4 * RECORD_ROWS * 4))
    Ring.create(segment, SLOTS, 4 * RECORD_ROWS * 4)
    return ProgressOut(Ring(segment).attach_producer(), ROWS, RECORD_ROWS), Ring(segment).attach_consumer()


def take(consumer: RingConsumer, records: int) -> list[list[int]]:
    """[row, generation, count, finish] of everything in the oldest `records`, which are given back."""
    columns: list[list[int]] = []
    for _ in range(min(records, consumer.available())):
        columns += np.stack(read_progress(consumer.peek().payload), axis=1).tolist()
        consumer.release()
    return columns


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_reader_may_come_when_it_likes(data: st.DataObject) -> None:
    """Rows grow, end and begin a new life once their end was read, like those of the ledger."""
    progress, consumer = make()
    told = {row: [1, 0, FINISH_NONE] for row in range(ROWS)}  # generation, count, finish, as the scheduler has it
    read = {row: [1, 0, FINISH_NONE] for row in range(ROWS)}

    def listen(records: int) -> None:
        for row, *news in take(consumer, records):
            assert read[row][2] == FINISH_NONE, "a row goes on after its end"
            assert news[0] == read[row][0] and news[1] >= read[row][1], "a row went back"
            read[row] = news
            if news[2]:
                assert news == told[row]
                told[row] = [news[0] + 1, 0, FINISH_NONE]
                read[row] = [news[0] + 1, 0, FINISH_NONE]

    for step in range(data.draw(st.integers(1, 25))):
        records = []
        for _ in range(data.draw(st.integers(0, 2))):
            able = [row for row in range(ROWS) if told[row][2] == FINISH_NONE]
            rows = data.draw(st.lists(st.sampled_from(able), unique=True, min_size=1)) if able else []
            for row in rows:
                told[row][1] += data.draw(st.integers(0, 3))
                told[row][2] = data.draw(st.sampled_from([FINISH_NONE, FINISH_NONE, FINISH_STOP, FINISH_LENGTH]))
            if rows:
                records.append(progress_record(rows, *zip(*(told[row] for row in rows), strict=True)))
        progress.send(records, step)
        assert progress.behind or progress.can_send is False
        listen(data.draw(st.integers(0, 3)))
    while progress.behind:
        listen(1)
        assert progress.can_send
        progress.send([], 99)
    listen(SLOTS)
    assert read == told


def test_with_room_records_go_as_they_are() -> None:
    progress, consumer = make()
    progress.send([progress_record([1, 2], [1, 1], [3, 4], [0, 0]), progress_record([1], [1], [4], [2])], 17)
    assert not progress.behind and consumer.available() == 2
    assert consumer.peek().source_seq == 17
    assert take(consumer, 1) == [[1, 1, 3, 0], [2, 1, 4, 0]]
    assert take(consumer, 1) == [[1, 1, 4, 2]]


def test_what_is_kept_is_one_column_a_row() -> None:
    progress, consumer = make()
    for count in range(1, 1000):
        progress.send([progress_record([5], [1], [count], [FINISH_NONE])], count)
    assert take(consumer, SLOTS) == [[5, 1, 1, 0], [5, 1, 2, 0]]
    progress.send([progress_record([5], [1], [1000], [FINISH_STOP])], 1000)
    assert take(consumer, SLOTS) == [[5, 1, 1000, FINISH_STOP]]
    assert not progress.behind


def test_a_row_that_goes_on_after_its_end_is_a_bug() -> None:
    progress, _ = make()
    for row in range(SLOTS):
        progress.send([progress_record([row], [1], [1], [FINISH_NONE])], 1)
    progress.send([progress_record([5], [1], [9], [FINISH_STOP])], 2)
    with pytest.raises(AssertionError, match="after its end"):
        progress.send([progress_record([5], [1], [10], [FINISH_NONE])], 3)
    progress.send([progress_record([5], [2], [0], [FINISH_NONE])], 3)  # its end had been told by an earlier scheduler


# ---------------------------------------------------------------------- in the scheduler


class Stage:
    """A scheduler inside the test: `meanwhile` happens while it waits, and must be what ends the wait."""

    def __init__(self) -> None:
        config = tiny_config()
        self.meanwhile: Callable[[], None] = lambda: None
        self.memory = ServerMemory(config)
        self.memory.control.set_epoch("scheduler", 2)
        self.pipe = os.pipe()
        self.child = Child(self.memory.boot_record("scheduler", self.pipe[1], None))
        self.child.take_over()
        self.bells = self.child.doorbells
        self.child.own_doorbell.wait = self.wait  # type: ignore[method-assign]
        self.progress = self.ring("progress").attach_consumer()
        self.results = self.ring("result").attach_producer()
        self.result_bytes = ResultLayout(config).nbytes
        self.scheduler = Scheduler(self.child)

    def ring(self, name: str) -> Ring:
        spec = ring_specs(self.memory.config)[name]
        return Ring(self.memory.segments[name], self.bells[spec.consumer], self.bells[spec.producer], spec.schema)

    def wait(self, ready: Callable[[], bool], timeout_ms: float = 0) -> bool:
        if not ready():
            self.meanwhile()
            assert ready(), "it still waits"
        return True

    def close(self) -> None:
        for fd in self.pipe:
            os.close(fd)
        self.memory.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def test_room_in_the_ring_ends_the_wait(stage: Stage) -> None:
    slots = stage.progress.ring.slots
    for count in range(slots + 1):
        stage.scheduler.rows.outbox.append(progress_record([0], [1], [count], [FINISH_NONE]))
    stage.meanwhile = stage.progress.release
    stage.scheduler.turn()
    assert stage.progress.ring.head == slots + 1


def test_a_result_that_is_dropped_rings_the_device(stage: Stage) -> None:
    """The device may wait for a free result slot, with the others promised to steps that run: the ring is not full."""
    bell = stage.bells["gpu"]
    stage.results.slot()[: stage.result_bytes // 4] = 0  # of step 0, queued by an earlier scheduler
    stage.results.publish(stage.result_bytes)
    bell.drain()
    bell.arm()
    stage.scheduler.turn()
    assert stage.results.space() == stage.results.ring.slots
    assert select.select([bell.fileno()], [], [], 0)[0]
