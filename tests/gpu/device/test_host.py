"""The host device keeps CUDA's rules of streams, events, graphs and errors, and is asynchronous in earnest."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu.device.host import HostDevice, HostStream
from gpu.device.protocol import DeviceError

WAIT_S = 10.0  # far above anything a test needs; a test that reaches it fails


class Gate:
    """An operation that holds its stream until the test opens it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(WAIT_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice()
    yield device
    device.close()


def put(device: HostDevice, stream: HostStream, fn: Callable[[], Any], name: str = "op") -> None:
    device.launch(stream, fn, reads=(), writes=(), name=name)


def test_a_launch_returns_while_the_stream_is_busy(device: HostDevice) -> None:
    stream, gate, seen = device.stream("s"), Gate(), []
    put(device, stream, gate)
    put(device, stream, lambda: seen.append(1))
    assert gate.entered.wait(WAIT_S)
    event = device.event("e")
    event.record(stream)
    assert seen == []
    assert not event.query()
    gate.open()
    event.synchronize()
    assert event.query()
    assert seen == [1]


def test_a_stream_keeps_its_order(device: HostDevice) -> None:
    stream, seen = device.stream("s"), []
    for i in range(200):
        put(device, stream, lambda i=i: seen.append(i))
    stream.synchronize()
    assert seen == list(range(200))


def test_streams_are_independent(device: HostDevice) -> None:
    one, two, gate, seen = device.stream("one"), device.stream("two"), Gate(), []
    put(device, one, gate)
    put(device, two, lambda: seen.append("two"))
    two.synchronize()
    assert seen == ["two"]
    gate.open()


def test_a_wait_holds_the_stream_back_until_the_record(device: HostDevice) -> None:
    one, two, gate, event, seen = device.stream("one"), device.stream("two"), Gate(), device.event("e"), []
    put(device, one, gate)
    put(device, one, lambda: seen.append("one"))
    event.record(one)
    event.wait(two)
    put(device, two, lambda: seen.append("two"))
    assert gate.entered.wait(WAIT_S)
    time.sleep(0.02)
    assert seen == []
    gate.open()
    two.synchronize()
    assert seen == ["one", "two"]


def test_a_wait_on_a_never_recorded_event_does_not_block(device: HostDevice) -> None:
    stream, event = device.stream("s"), device.event("e")
    event.wait(stream)
    stream.synchronize()
    assert event.query()
    event.synchronize()


@pytest.mark.unordered
def test_a_wait_refers_to_the_latest_record_issued_before_it(device: HostDevice) -> None:
    one, two, three = device.stream("one"), device.stream("two"), device.stream("three")
    first, second, event, seen = Gate(), Gate(), device.event("e"), []
    put(device, one, first)
    event.record(one)
    event.wait(two)  # the first record
    put(device, two, lambda: seen.append("two"))
    put(device, one, second)
    event.record(one)  # must not re-arm the wait above
    event.wait(three)  # the second record
    put(device, three, lambda: seen.append("three"))
    first.open()
    two.synchronize()
    assert second.entered.wait(WAIT_S)
    assert seen == ["two"]
    assert not event.query()
    second.open()
    three.synchronize()
    assert seen == ["two", "three"]


def test_many_streams_may_wait_for_one_record(device: HostDevice) -> None:
    source, event, gate = device.stream("source"), device.event("e"), Gate()
    sinks = [device.stream(f"sink{i}") for i in range(5)]
    put(device, source, gate)
    event.record(source)
    for sink in sinks:
        event.wait(sink)
    gate.open()
    for sink in sinks:
        sink.synchronize()


def test_capture_runs_nothing_and_each_replay_runs_all(device: HostDevice) -> None:
    stream, seen = device.stream("s"), []
    with device.capture(stream) as graph:
        put(device, stream, lambda: seen.append("a"))
        put(device, stream, lambda: seen.append("b"))
    stream.synchronize()
    assert seen == []
    graph.launch(stream)
    graph.launch(stream)
    stream.synchronize()
    assert seen == ["a", "b", "a", "b"]


def test_only_the_capturing_stream_is_captured(device: HostDevice) -> None:
    one, two, seen = device.stream("one"), device.stream("two"), []
    with device.capture(one):
        put(device, one, lambda: seen.append("one"))
        put(device, two, lambda: seen.append("two"))
    one.synchronize()
    two.synchronize()
    assert seen == ["two"]


def test_an_event_recorded_during_capture_is_recorded_at_replay(device: HostDevice) -> None:
    one, two, gate, event, seen = device.stream("one"), device.stream("two"), Gate(), device.event("e"), []
    with device.capture(one) as graph:
        put(device, one, gate)
        event.record(one)
        put(device, one, lambda: seen.append("after"))
    event.wait(two)  # nothing was recorded yet
    put(device, two, lambda: seen.append("early"))
    two.synchronize()
    graph.launch(one)  # counts as a record
    event.wait(two)
    put(device, two, lambda: seen.append("late"))
    assert gate.entered.wait(WAIT_S)
    assert seen == ["early"]
    assert not event.query()
    gate.open()
    one.synchronize()
    two.synchronize()
    assert sorted(seen) == ["after", "early", "late"]


def test_an_event_inside_a_graph_opens_before_the_graph_ends(device: HostDevice) -> None:
    one, two, gate, event, seen = device.stream("one"), device.stream("two"), Gate(), device.event("e"), []
    with device.capture(one) as graph:
        event.record(one)
        put(device, one, gate)
    graph.launch(one)
    event.wait(two)
    put(device, two, lambda: seen.append("two"))
    two.synchronize()
    assert seen == ["two"]
    gate.open()


def test_a_wait_inside_a_graph_refers_to_the_latest_record_before_its_launch(device: HostDevice) -> None:
    one, two, gate, event, seen = device.stream("one"), device.stream("two"), Gate(), device.event("e"), []
    with device.capture(two) as graph:
        event.wait(two)
        put(device, two, lambda: seen.append("two"))
    graph.launch(two)
    two.synchronize()
    put(device, one, gate)
    event.record(one)
    graph.launch(two)
    assert gate.entered.wait(WAIT_S)
    assert seen == ["two"]
    gate.open()
    two.synchronize()
    assert seen == ["two", "two"]


def test_an_error_sticks_skips_what_is_queued_and_opens_events(device: HostDevice) -> None:
    one, two, gate, event, seen = device.stream("one"), device.stream("two"), Gate(), device.event("e"), []

    def broken() -> None:
        raise ValueError("no such page")

    put(device, one, gate)
    put(device, one, broken, name="attention")
    put(device, one, lambda: seen.append("behind"))
    event.record(one)
    event.wait(two)
    put(device, two, lambda: seen.append("other stream"))
    gate.open()
    for _ in range(2):
        with pytest.raises(DeviceError, match="attention on stream one: ValueError: no such page"):
            event.synchronize()
    for use in (
        lambda: put(device, two, lambda: None),
        lambda: event.record(one),
        lambda: event.wait(one),
        event.query,
        one.synchronize,
        device.synchronize,
        device.check,
    ):
        with pytest.raises(DeviceError):
            use()
    assert seen == []


def test_an_error_inside_a_graph_still_opens_its_events(device: HostDevice) -> None:
    stream, event, seen = device.stream("s"), device.event("e"), []
    with device.capture(stream) as graph:
        put(device, stream, lambda: 1 // 0, name="divide")
        put(device, stream, lambda: seen.append("behind"))
        event.record(stream)
    graph.launch(stream)
    with pytest.raises(DeviceError, match="divide"):
        event.synchronize()
    assert seen == []


def test_misuse_is_refused(device: HostDevice) -> None:
    stream = device.stream("s")
    with device.capture(stream) as graph:
        with pytest.raises(DeviceError, match="capturing"):
            stream.synchronize()
        with pytest.raises(DeviceError, match="capture"):
            graph.launch(stream)
        with pytest.raises(DeviceError, match="capturing already"), device.capture(stream):
            pass


def test_regions_are_byte_ranges(device: HostDevice) -> None:
    buffer = device.buffer((8, 4), np.int32, "table")
    assert buffer.nbytes == 128
    assert buffer.region()[1:] == (0, 128)
    assert buffer.rows(2, 4)[1:] == (32, 64)
    assert buffer.rows(2, 4).overlaps(buffer.rows(3, 5))
    assert not buffer.rows(2, 4).overlaps(buffer.rows(4, 5))
    assert not buffer.rows(2, 4).overlaps(device.buffer((8, 4), np.int32, "other").region())
    shared = np.zeros((4, 2), np.int32)
    pinned = device.pinned(shared, "slot")
    pinned.array[1] = 7
    assert shared[1, 0] == 7


def test_close_runs_what_is_queued_and_ends_the_threads() -> None:
    device, seen = HostDevice(), []
    threads = threading.active_count()
    streams = [device.stream(f"s{i}") for i in range(3)]
    assert threading.active_count() == threads + 3
    for stream in streams:
        put(device, stream, lambda: (time.sleep(0.01), seen.append(1)))
    device.close()
    device.close()
    assert seen == [1, 1, 1]
    assert threading.active_count() == threads
    with pytest.raises(DeviceError, match="closed"):
        put(device, streams[0], lambda: None)


class Log:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, ...]] = []

    def launch(self, stream: Any, name: str, reads: Any, writes: Any) -> None:
        self.heard.append(("launch", stream.name, name, *(f"{r.buffer.name}:{r.lo}-{r.hi}" for r in (*reads, *writes))))

    def record(self, stream: Any, event: Any) -> None:
        self.heard.append(("record", stream.name, event.name))

    def wait(self, stream: Any, event: Any) -> None:
        self.heard.append(("wait", stream.name, event.name))

    def graph_launch(self, stream: Any, graph: Any) -> None:
        self.heard.append(("graph", stream.name))

    def graph_end(self, stream: Any, graph: Any) -> None:
        self.heard.append(("end", stream.name))

    def host_wait(self, event: Any, stream: Any) -> None:
        self.heard.append(("host", event.name if event is not None else stream.name))


def test_the_observer_hears_everything_when_it_is_queued() -> None:
    log = Log()
    device = HostDevice(observer=log)
    stream, event, gate = device.stream("s"), device.event("e"), Gate()
    table = device.buffer((4,), np.int64, "table")
    device.launch(stream, gate, reads=[table.rows(0, 1)], writes=[table.rows(1, 3)], name="hold")
    with device.capture(stream) as graph:
        event.wait(stream)
        device.launch(stream, lambda: None, reads=(), writes=[table.region()], name="fill")
        event.record(stream)
    assert log.heard == [("launch", "s", "hold", "table:0-8", "table:8-24")]  # nothing of the capture
    log.heard.clear()
    graph.launch(stream)
    event.wait(stream)
    assert log.heard == [
        ("graph", "s"),
        ("wait", "s", "e"),
        ("launch", "s", "fill", "table:0-32"),
        ("record", "s", "e"),
        ("end", "s"),
        ("wait", "s", "e"),
    ]
    log.heard.clear()
    gate.open()
    event.synchronize()
    stream.synchronize()
    assert log.heard == [("host", "e"), ("host", "s")]
    device.close()


@pytest.mark.unordered
def test_random_programs_keep_every_order_that_events_promise() -> None:
    """Each operation writes a serial number; whatever an event orders must be seen in that order, in many runs."""
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for seed in range(20):
            _random_program(np.random.default_rng(seed))
    finally:
        sys.setswitchinterval(old)


def _random_program(rng: np.random.Generator) -> None:
    device = HostDevice()
    streams = [device.stream(f"s{i}") for i in range(3)]
    events = [device.event(f"e{i}") for i in range(3)]
    finished: list[int] = []
    behind: list[set[int]] = [set() for _ in streams]  # operations that everything later on the stream comes after
    recorded: list[set[int]] = [set() for _ in events]
    required: dict[int, set[int]] = {}
    for op in range(120):
        s, e = int(rng.integers(3)), int(rng.integers(3))
        match int(rng.integers(3)):
            case 0:
                required[op] = set(behind[s])
                behind[s].add(op)
                put(device, streams[s], lambda op=op: finished.append(op))
            case 1:
                events[e].record(streams[s])
                recorded[e] = set(behind[s])
            case _:
                events[e].wait(streams[s])
                behind[s] |= recorded[e]
    device.synchronize()
    device.close()
    place = {op: i for i, op in enumerate(finished)}
    assert len(place) == len(required)
    for op, before in required.items():
        assert all(place[b] < place[op] for b in before), op
