"""The order checker: what it lets pass, what it flags and how it says so, and that it stays small."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu.device import order
from gpu.device.adversary import AdversaryDevice
from gpu.device.cuda import CudaDevice
from gpu.device.host import HostDevice
from gpu.device.order import UNSEEN_MAX, OrderChecker, OrderViolation
from gpu.device.protocol import DeviceError
from gpu.order_cost import Loop
from tests.gpu.device.fake_cuda import FakeCuda
from tests.gpu.paged_mill import Bench, small_config


class Small:
    """A device with three streams and one buffer of 16 rows of 4 bytes. Nothing runs before somebody waits."""

    def __init__(self, collect: bool = True) -> None:
        self.checker = OrderChecker(collect=collect)
        self.device = AdversaryDevice(observer=self.checker)
        self.a, self.b, self.c = (self.device.stream(name) for name in "abc")
        self.memory = self.device.buffer((16,), np.int32, "memory")

    def read(self, stream: Any, lo: int = 0, hi: int = 16, name: str = "reader") -> None:
        self.device.launch(stream, lambda: None, reads=(self.memory.rows(lo, hi),), writes=(), name=name)

    def write(self, stream: Any, lo: int = 0, hi: int = 16, name: str = "writer") -> None:
        self.device.launch(stream, lambda: None, reads=(), writes=(self.memory.rows(lo, hi),), name=name)

    def call(self, stream: Any, kind: str = "reads", name: str = "host function") -> Any:
        regions: dict[str, Any] = {"reads": (), "writes": ()} | {kind: (self.memory.region(),)}
        return self.device.call(stream, lambda: None, name=name, **regions)

    def order(self, first: Any, second: Any) -> None:
        event = self.device.event("edge")
        event.record(first)
        event.wait(second)

    @property
    def flagged(self) -> list[str]:
        return [str(violation) for violation in self.checker.violations]


# ---------------------------------------------------------------------- what it says


def test_a_race_is_named_in_full() -> None:
    small = Small()
    small.write(small.a, 2, 6, name="first")
    small.read(small.b, 4, 9, name="second")
    assert small.flagged == [
        "nothing orders 'second' on stream b behind 'first' on stream a: read after write of bytes [16, 24) of memory; "
        "record an event on stream a behind 'first' and let stream b wait for it"
    ]


def test_a_race_with_a_host_function_is_named_in_full() -> None:
    small = Small()
    small.call(small.a, name="first")
    small.write(small.b, name="second")
    assert small.flagged == [
        "nothing orders 'second' on stream b behind 'first' on the host functions of stream a: "
        "write after read of bytes [0, 64) of memory; "
        "let the launching thread see that 'first' has run before it goes on to 'second'"
    ]


def test_a_race_with_the_launching_thread_is_named_in_full() -> None:
    small = Small()
    small.read(small.a, name="first")
    small.device.host_access(reads=(), writes=(small.memory.rows(3, 4),), name="second")
    assert small.flagged == [
        "nothing orders 'second' on the launching thread behind 'first' on stream a: "
        "write after read of bytes [12, 16) of memory; "
        "let the launching thread see a host function that is queued behind 'first' before 'second'"
    ]


def test_it_raises_when_the_second_one_is_queued_and_that_one_never_runs() -> None:
    checker, ran = OrderChecker(), []
    device = HostDevice(checker)
    a, b = device.stream("a"), device.stream("b")
    memory = (device.buffer((4,), np.int32, "memory").region(),)
    device.launch(a, lambda: ran.append("a"), reads=(), writes=memory, name="first")
    with pytest.raises(OrderViolation, match="'second' on stream b behind 'first' on stream a") as caught:
        device.launch(b, lambda: ran.append("b"), reads=(), writes=memory, name="second")
    device.close()
    assert isinstance(caught.value, DeviceError)
    assert ran == ["a"]
    assert checker.violations == [caught.value.violation]


# ---------------------------------------------------------------------- what conflicts


@pytest.mark.parametrize(("first", "second"), [("read", "write"), ("write", "read"), ("write", "write")])
def test_conflicts_of_every_kind_are_flagged_unless_an_event_orders_them(first: str, second: str) -> None:
    for ordered in (False, True):
        small = Small()
        getattr(small, first)(small.a)
        if ordered:
            small.order(small.a, small.b)
        getattr(small, second)(small.b)
        assert len(small.flagged) == (not ordered)


def test_what_is_no_conflict() -> None:
    small = Small()
    small.read(small.a)
    small.read(small.b)  # two reads
    small.write(small.c, 16, 16)  # nothing
    small.write(small.c, 3, 3)
    other = Small()
    other.write(other.a, 0, 8)
    other.write(other.b, 8, 16)  # side by side
    other.write(other.b, 8, 16)  # the same stream
    assert small.flagged == other.flagged == []


def test_parts_are_told_apart_however_they_overlap() -> None:
    small = Small()
    small.write(small.a, 0, 6)
    small.order(small.a, small.b)
    small.write(small.b, 4, 10)  # behind a's
    small.read(small.a, 0, 4)
    assert small.flagged == []
    small.read(small.a, 3, 5)  # one row of its own, one that b wrote
    assert "bytes [16, 20)" in small.flagged[0]
    small.read(small.a, 9, 16)
    assert "bytes [36, 40)" in small.flagged[1]
    assert len(small.flagged) == 2


def test_a_reader_that_is_not_the_last_one_is_not_forgotten() -> None:
    small = Small()
    small.read(small.a)
    small.read(small.b)
    small.read(small.b, 0, 3)
    small.order(small.b, small.c)
    small.write(small.c, 1, 2)  # behind b's reads, not behind a's
    assert len(small.flagged) == 1
    assert "'reader' on stream a" in small.flagged[0]


def test_a_write_forgets_only_what_whoever_comes_behind_it_comes_behind_too() -> None:
    small = Small()
    small.read(small.a)
    small.order(small.a, small.b)
    small.write(small.b, 0, 8)
    small.write(small.c, 8, 16)  # never waited for a's read, of which this half is still known
    assert [text for text in small.flagged if "'reader' on stream a" in text] == small.flagged[:1]
    small.order(small.b, small.c)
    small.write(small.c, 0, 8)  # behind b's write and so behind a's read
    assert len(small.flagged) == 1


# ---------------------------------------------------------------------- what orders


def test_a_wait_orders_what_comes_behind_it_and_nothing_else() -> None:
    small = Small()
    event = small.device.event("event")
    small.write(small.a, 0, 4)
    event.record(small.a)
    small.write(small.a, 4, 8)  # behind the record
    event.wait(small.b)
    small.read(small.b, 0, 4)
    assert small.flagged == []
    small.read(small.b, 4, 8)
    small.read(small.c, 0, 4)  # has not waited
    assert len(small.flagged) == 2


def test_order_goes_on_from_stream_to_stream() -> None:
    small = Small()
    small.write(small.a)
    small.order(small.a, small.b)
    small.order(small.b, small.c)
    small.write(small.c)
    assert small.flagged == []


def test_a_wait_means_the_latest_record_that_was_issued_before_it() -> None:
    small = Small()
    event = small.device.event("event")
    event.wait(small.b)  # never recorded: does not block, and orders nothing
    small.write(small.a)
    event.record(small.a)
    small.read(small.b)
    assert len(small.flagged) == 1
    event.wait(small.b)
    small.read(small.b)
    assert len(small.flagged) == 1


def by_event(small: Small, event: Any) -> None:
    event.synchronize()


def by_stream(small: Small, event: Any) -> None:
    small.a.synchronize()


def by_device(small: Small, event: Any) -> None:
    small.device.synchronize()


def by_asking(small: Small, event: Any) -> None:
    while not event.query():
        small.device.check()


@pytest.mark.parametrize("learn", [by_event, by_stream, by_device, by_asking])
def test_the_launching_thread_orders_by_what_it_knows(learn: Callable[[Small, Any], None]) -> None:
    small = Small()
    event = small.device.event("event")
    small.write(small.a)
    event.record(small.a)
    learn(small, event)
    small.write(small.b)
    assert small.flagged == []


def test_a_query_that_says_no_orders_nothing() -> None:
    small = Small()
    event = small.device.event("event")
    small.write(small.a)
    event.record(small.a)
    assert not event.query()
    small.write(small.b)
    assert len(small.flagged) == 1


def test_a_host_function_comes_behind_its_stream_and_holds_nothing_back() -> None:
    small = Small()
    small.write(small.a)
    small.call(small.a)
    assert small.flagged == []
    small.write(small.a)  # the same stream, and still a race: it may not have run yet
    assert len(small.flagged) == 1


def test_an_event_behind_a_host_function_orders_nothing_behind_it() -> None:
    small = Small()
    small.call(small.a)
    small.order(small.a, small.b)
    small.write(small.b)
    assert len(small.flagged) == 1


def test_host_functions_run_one_after_the_other() -> None:
    small = Small()
    small.call(small.a, "writes")
    small.call(small.b, "writes")
    assert small.flagged == []


def test_what_the_thread_queues_once_it_saw_a_host_function_comes_behind_it_and_all_before_it() -> None:
    for asked in (0, 1, None):
        small = Small()
        small.write(small.b)
        completions = [small.call(stream) for stream in (small.b, small.a)]
        if asked is not None:
            while not completions[asked].query():
                small.device.check()
        small.write(small.c)
        assert len(small.flagged) == (0 if asked == 1 else 1 if asked == 0 else 2), asked


def test_a_stream_that_ran_out_of_work_has_run_its_host_functions() -> None:
    small = Small()
    small.call(small.a)
    small.a.synchronize()
    small.write(small.b)
    assert small.flagged == []


def test_the_launching_threads_own_accesses() -> None:
    small = Small()
    region = (small.memory.region(),)
    small.device.host_access(reads=(), writes=region, name="filled")
    small.read(small.a)  # behind what the thread did before
    assert small.flagged == []
    small.device.host_access(reads=(), writes=region, name="filled again")
    assert len(small.flagged) == 1
    small.a.synchronize()
    small.device.host_access(reads=(), writes=region, name="filled")
    assert len(small.flagged) == 1


def test_a_graph_records_and_waits_at_every_launch_and_a_capture_does_neither() -> None:
    small = Small()
    event, back = small.device.event("event"), small.device.event("back")
    with small.device.capture(small.a) as graph:
        back.wait(small.a)
        small.write(small.a, 0, 4)
        event.record(small.a)
        small.write(small.a, 4, 8)
    small.write(small.b)  # the capture wrote nothing
    back.record(small.b)
    for _ in range(3):
        graph.launch(small.a)
        event.wait(small.b)
        small.read(small.b, 0, 4)
        back.record(small.b)
    assert small.flagged == []
    small.read(small.b, 4, 8)
    assert len(small.flagged) == 1
    graph.launch(small.a)  # waits for a record that does not cover the read
    assert len(small.flagged) == 2


def test_an_event_that_is_recorded_again_while_somebody_waits_for_it() -> None:
    small = Small()
    event = small.device.event("event")
    event.record(small.a)
    event.wait(small.b)
    small.order(small.b, small.a)
    event.record(small.a)  # behind the wait
    event.wait(small.a)  # the recording stream itself
    event.record(small.a)
    assert small.flagged == []
    event.wait(small.b)
    event.record(small.a)
    assert small.flagged == [
        "nothing orders 'record of event' on stream a behind 'wait for event' on stream b: "
        "event event is recorded again while the wait for its earlier record may be pending; "
        "let stream a wait for something behind the wait on stream b, or take another event"
    ]


def test_a_stream_that_comes_late_is_no_stranger() -> None:
    """Clocks grow with the streams, those that are kept as well."""
    small = Small()
    event = small.device.event("event")
    small.write(small.a)
    event.record(small.a)
    completion = small.call(small.a)
    late = small.device.stream("late")
    event.wait(late)
    small.read(late)
    small.read(small.b)
    assert len(small.flagged) == 1
    assert not completion.query()
    small.device.synchronize()
    assert completion.query()
    small.write(late)
    assert len(small.flagged) == 1


# ---------------------------------------------------------------------- the real program, and an endless one


@pytest.mark.parametrize("early_lengths", [False, True])
def test_the_step_program_is_in_order(early_lengths: bool) -> None:
    device = HostDevice(OrderChecker())  # raises at the first violation
    bench = Bench(device, small_config(), early_lengths=early_lengths)
    bench.prompt(0, [5, 6, 7])
    bench.step(slots=bench.fill(1, [1, 2, 3, 4, 5]), sampling=[(1, 0.5, 3)], chunks=[(1, 0, 0, 3, 1)])
    for i in range(12):
        bench.step(decode=[1], slots=bench.fill(2, [10 + i]))
    device.synchronize()
    device.close()
    assert len(bench.completed) == 13


def endless(steps: int, look: bool) -> list[int]:
    """How much a checker remembers after each of `steps` rounds on three streams, with regions of all sizes."""
    checker = OrderChecker()
    device = AdversaryDevice(observer=checker)
    streams = [device.stream(name) for name in "abc"]
    events = [device.event(str(i)) for i in range(3)]
    memory, shared = device.buffer((64,), np.int32, "memory"), device.buffer((64,), np.int32, "shared")
    sizes = []
    for step in range(steps):
        for i, stream in enumerate(streams):
            events[i - 1].wait(stream)
            for count in (1 + step % 64, 1 + step % 7):
                rows = (memory.rows(0, count),)
                reads = (*rows, shared.rows(step % 64, step % 64 + 1))
                device.launch(stream, lambda: None, reads=reads, writes=rows, name="work")
            events[i].record(stream)
        scratch = device.buffer((4,), np.int32, "scratch")  # as a result slot that is thrown away
        device.buffers.pop()
        device.launch(streams[2], lambda: None, reads=(), writes=(scratch.region(),), name="work")
        completion = device.call(streams[2], lambda: None, reads=(), writes=(scratch.region(),), name="done")
        if look:
            while not completion.query():
                device.check()
        if step % 64 == 63:
            device.synchronize()
            for track in device.queues.tracks:
                track.items[:] = [lambda: None] * len(track.items)  # type: ignore[list-item]  # what ran is forgotten
            device.queues.calls[:] = [None] * len(device.queues.calls)  # type: ignore[list-item]
            del scratch
            gc.collect()
            sizes.append(checker.remembered)
    assert checker.violations == []
    return sizes


def test_it_stays_small_however_long_it_looks_on() -> None:
    sizes = endless(64 * 7, look=True)
    assert max(sizes[3:]) <= sizes[2], sizes
    assert sizes[-1] < 64 * 6


def test_it_stays_small_if_nobody_ever_looks_at_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "UNSEEN_MAX", 128)
    sizes = endless(4 * 128, look=False)
    assert sizes[-1] - 128 < 64 * 6
    assert sizes[-1] == sizes[-2] == sizes[-3]


def test_the_newest_completions_are_those_that_it_keeps() -> None:
    small = Small()
    for _ in range(UNSEEN_MAX + 3):
        last = small.call(small.a)
    small.checker.host_saw(last)
    small.write(small.b)
    assert small.flagged == []


@pytest.mark.parametrize("mixed", [False, True])
def test_a_launch_loop_that_goes_on_for_long_leaves_no_trace(mixed: bool) -> None:
    checker = OrderChecker()
    loop = Loop(checker, mixed=mixed, early_lengths=True)
    sizes = []
    for step in range(120):
        loop.step()
        if step % 12 == 11:  # a multiple of slots and lanes
            sizes.append(checker.remembered)
    loop.close()
    assert max(sizes[1:]) == min(sizes[1:]), sizes


@pytest.mark.parametrize("make", [AdversaryDevice, HostDevice, lambda: CudaDevice(api=FakeCuda().api())])
def test_every_device_of_a_test_is_observed(make: Callable[[], Any]) -> None:
    """By `tests/conftest.py`; and a race in a test that does not say so ends it."""
    device = make()
    assert isinstance(device.observer, OrderChecker)
    buffer, one, two = device.buffer((4,), np.int32, "b"), device.stream("one"), device.stream("two")
    device.launch(one, lambda: None, reads=(), writes=(buffer.region(),), name="write")
    with pytest.raises(OrderViolation):
        device.launch(two, lambda: None, reads=(buffer.region(),), writes=(), name="read")
    device.close()


@pytest.mark.unordered
def test_but_for_those_that_race_on_purpose() -> None:
    assert AdversaryDevice().observer is None
