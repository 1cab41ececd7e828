"""The CUDA device asks of torch.cuda what it should, in an order that CUDA accepts, and never waits unless it may."""

import gc
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpu.device.cuda import CudaDevice
from gpu.device.guard import LaunchGuard
from gpu.device.guard_torch import TorchGuard
from gpu.device.host import HostDevice
from gpu.device.protocol import DeviceError
from shm.segment import Segment
from tests.gpu.device.fake_cuda import FakeCuda, FakeError
from tests.gpu.device.log import Log

WAIT_S = 10.0


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[CudaDevice]:
    device = CudaDevice(api=fake.api())
    yield device
    device.close()


def put(device: Any, stream: Any, fn: Callable[[], Any], fake: FakeCuda | None = None, name: str = "op") -> None:
    """Launch `fn` as one kernel; without a fake, on the host device."""
    body = fn if fake is None else lambda: fake.kernel(name, fn)
    device.launch(stream, body, reads=(), writes=(), name=name)


def call(device: CudaDevice, stream: Any, fn: Callable[[], Any], name: str = "call") -> Any:
    return device.call(stream, fn, reads=(), writes=(), name=name)


def names(fake: FakeCuda) -> list[str]:
    return [entry[0] for entry in fake.log]


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


# ---------------------------------------------------------------------- without a GPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(DeviceError, match=r"without CUDA|no NVIDIA GPU"):
        CudaDevice()


# ---------------------------------------------------------------------- host functions


def test_a_completion_says_so_only_once_its_function_has_run(device: CudaDevice) -> None:
    """What the function works on may be used again from then on."""
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        assert go_on.wait(WAIT_S)

    completion = call(device, device.stream("s"), wait)
    assert began.wait(WAIT_S) and not completion.query()
    go_on.set()
    until(completion.query)


# ---------------------------------------------------------------------- streams


def test_streams_are_distinct_though_torch_hands_out_the_same_again() -> None:
    fake = FakeCuda(pool=3)
    api = fake.api()
    one, two = CudaDevice(api=api), CudaDevice(api=api)
    fake.new_stream()  # somebody else draws as well
    handles = {one.stream("a").raw.cuda_stream, two.stream("b").raw.cuda_stream, one.stream("c").raw.cuda_stream}
    assert len(handles) == 3
    with pytest.raises(DeviceError, match="no stream is left for d: all 3"):
        two.stream("d")
    one.close()
    assert two.stream("d").raw.cuda_stream in handles  # what is given back may be drawn again
    two.close()


def test_the_default_stream_is_never_handed_out() -> None:
    fake = FakeCuda(pool=2)
    api = fake.api()
    draws = iter([api.default_stream(), fake.new_stream()])
    device = CudaDevice(api=type(api)(**(vars(api) | {"new_stream": lambda: next(draws)})))
    assert device.stream("s").raw.cuda_stream != 0
    device.close()


def test_the_current_stream_is_set_only_when_it_changes(fake: FakeCuda, device: CudaDevice) -> None:
    one, two, seen = device.stream("one"), device.stream("two"), []
    for stream in (one, one, two, two, one):
        put(device, stream, lambda: seen.append(fake.current().cuda_stream))
    assert names(fake).count("set_stream") == 3
    assert seen == [stream.raw.cuda_stream for stream in (one, one, two, two, one)]


def test_calls_from_another_thread_are_refused(fake: FakeCuda, device: CudaDevice) -> None:
    stream, errors = device.stream("s"), []

    def use() -> None:
        try:
            put(device, stream, lambda: None, fake)
        except DeviceError as error:
            errors.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 1 and "other than the one that opened it" in errors[0]


# ---------------------------------------------------------------------- events


def test_a_launch_returns_while_the_stream_is_busy(fake: FakeCuda, device: CudaDevice) -> None:
    stream, event, seen = device.stream("s"), device.event("e"), []
    with fake.paused(stream.raw):
        put(device, stream, lambda: seen.append(1), fake)
        event.record(stream)
        assert seen == [] and not event.query()
    event.synchronize()
    assert event.query() and seen == [1]


def test_a_wait_holds_the_stream_back_until_the_latest_record(fake: FakeCuda, device: CudaDevice) -> None:
    one, two, event, seen = device.stream("one"), device.stream("two"), device.event("e"), []
    event.record(one)
    with fake.paused(one.raw):
        put(device, one, lambda: seen.append("one"), fake)
        event.record(one)
        event.wait(two)
        put(device, two, lambda: seen.append("two"), fake)
        assert seen == []
    assert seen == ["one", "two"]


def test_a_never_recorded_event_does_not_block_and_costs_nothing(fake: FakeCuda, device: CudaDevice) -> None:
    stream, event = device.stream("s"), device.event("e")
    fake.log.clear()
    event.wait(stream)
    assert event.query()
    event.synchronize()
    assert fake.log == []


def test_an_event_recorded_in_a_graph_is_an_external_one(fake: FakeCuda, device: CudaDevice) -> None:
    one, two, event, seen = device.stream("one"), device.stream("two"), device.event("e"), []
    with device.capture(one) as graph:
        put(device, one, lambda: seen.append("first"), fake)
        event.record(one)
        put(device, one, lambda: seen.append("second"), fake)
    event.wait(two)  # nothing was recorded yet
    put(device, two, lambda: seen.append("early"), fake)
    assert seen == ["early"]
    with fake.paused(one.raw):
        graph.launch(one)
        event.wait(two)
        put(device, two, lambda: seen.append("late"), fake)
        assert seen == ["early"] and not event.query()
    assert sorted(seen) == ["early", "first", "late", "second"] and seen.index("first") < seen.index("late")


def test_a_graph_waits_for_the_latest_record_before_its_launch(fake: FakeCuda, device: CudaDevice) -> None:
    one, two, event, seen = device.stream("one"), device.stream("two"), device.event("e"), []
    with device.capture(two) as graph:
        event.wait(two)  # first of all: torch has not recorded this event, and must not drop the wait
        put(device, two, lambda: seen.append("two"), fake)
    graph.launch(two)
    assert seen == ["two"]
    with fake.paused(one.raw):
        event.record(one)
        graph.launch(two)
        assert seen == ["two"]
    assert seen == ["two", "two"]


def test_other_streams_may_be_used_during_a_capture(fake: FakeCuda, device: CudaDevice) -> None:
    """Torch looks at the *current* stream to see whether an external event is recorded into a graph."""
    one, two, inner, outer, seen = device.stream("1"), device.stream("2"), device.event("i"), device.event("o"), []
    with device.capture(one) as graph:
        put(device, one, lambda: seen.append("one"), fake)
        outer.record(two)
        put(device, two, lambda: seen.append("two"), fake)
        inner.record(one)
        outer.wait(two)
        done = call(device, two, lambda: seen.append("called"))  # and the watcher may wait meanwhile
        until(done.query)
    assert seen == ["two", "called"]
    assert [node.name for node in graph.nodes] == ["op", "i"]


def test_the_fake_refuses_what_cuda_refuses_of_events(fake: FakeCuda) -> None:
    api = fake.api()
    one, two, graph = api.new_stream(), api.new_stream(), api.new_graph()
    inner, outer, never = api.new_event(), api.new_event(external=True), api.new_event(external=True)
    outer.record(one)
    api.set_stream(one)
    graph.capture_begin()
    inner.record(one)
    with pytest.raises(FakeError, match="does not capture"):
        outer.record(two)
    with pytest.raises(FakeError, match="never made"):
        never.wait(one)
    for what in (one.synchronize, two.synchronize, outer.query, outer.synchronize):
        with pytest.raises(FakeError, match="not permitted"):
            what()
    plain = api.new_event()
    api.set_stream(two)
    with pytest.raises(FakeError, match="same stream"):
        graph.capture_end()
    plain.record(two)
    with pytest.raises(FakeError, match="isolation"):
        plain.wait(one)
    with pytest.raises(FakeError, match="captured event"):
        inner.wait(two)
    api.set_stream(one)
    graph.capture_end()
    api.set_stream(api.default_stream())
    with pytest.raises(FakeError, match="non-default stream"):
        api.new_graph().capture_begin()
    with pytest.raises(ValueError, match="recorded"):
        api.new_event(enable_timing=True).elapsed_time(api.new_event(enable_timing=True))
    with pytest.raises(ValueError, match="enable_timing"):
        plain.elapsed_time(inner)
    with pytest.raises(FakeError, match="not registered"):
        fake.copy("copy", lambda: None, [np.zeros(4)])


# ---------------------------------------------------------------------- graphs


def test_capture_runs_nothing_and_a_replay_is_one_call(fake: FakeCuda, device: CudaDevice) -> None:
    stream, seen = device.stream("s"), []
    with device.capture(stream) as graph:
        put(device, stream, lambda: seen.append("a"), fake)
        put(device, stream, lambda: seen.append("b"), fake)
    assert seen == []
    fake.log.clear()
    graph.launch(stream)
    graph.launch(stream)
    assert names(fake) == ["replay", "replay"]
    assert seen == ["a", "b", "a", "b"]
    assert graph.raw.mode == "thread_local" and graph.raw.pool is stream.pool


def test_a_capture_that_fails_is_ended(fake: FakeCuda, device: CudaDevice) -> None:
    one, two = device.stream("one"), device.stream("two")
    with pytest.raises(KeyError), device.capture(one):
        put(device, two, lambda: None, fake)
        raise KeyError("no")
    put(device, one, lambda: None, fake)
    with device.capture(one):
        pass


def test_misuse_of_captures_is_refused(fake: FakeCuda, device: CudaDevice) -> None:
    stream, other, event = device.stream("s"), device.stream("other"), device.event("e")
    event.record(other)
    with device.capture(stream) as graph:
        for what, match in (
            (stream.synchronize, "capturing"),
            (event.query, "break the capture"),
            (event.synchronize, "break the capture"),
            (lambda: graph.launch(stream), "capture"),
            (lambda: device.timestamp("t").record(stream), "inside a graph"),
            (lambda: call(device, stream, lambda: None), "part of a graph"),
            (lambda: device.buffer((1,), np.int32, "b"), "during a capture"),
            (lambda: device.stream("late"), "during a capture"),
            (lambda: device.event("late"), "during a capture"),
            (lambda: device.pinned(np.zeros(1), "late"), "during a capture"),
        ):
            with pytest.raises(DeviceError, match=match):
                what()
        with pytest.raises(DeviceError, match="capturing already"), device.capture(other):
            pass
    with pytest.raises(DeviceError, match="captured on stream s"):
        graph.launch(other)
    device.check()  # none of it stuck


# ---------------------------------------------------------------------- memory


def test_new_memory_is_zeroed_before_any_stream_touches_it(fake: FakeCuda, device: CudaDevice) -> None:
    """It is zeroed on the stream that is current then, and no event of the program orders that."""
    one, two, seen = device.stream("one"), device.stream("two"), []
    with fake.paused(fake.api().default_stream()):
        table = device.buffer((2, 2), np.uint64, "table")
        assert table.array.dtype == torch.int64
        put(device, one, lambda: seen.append(table.array.tolist()), fake)
    put(device, one, lambda: None, fake)
    with fake.paused(one.raw):
        more = device.buffer((1,), np.float32, "more")  # now `one` is current
        put(device, two, lambda: seen.append(more.array.tolist()), fake)
        assert seen == [[[0, 0], [0, 0]]]
    assert seen == [[[0, 0], [0, 0]], [0.0]]
    fake.log.clear()
    put(device, two, lambda: None, fake)
    assert names(fake) == ["kernel"]  # and it costs nothing afterwards


def test_memory_that_came_before_newer_memory_is_waited_for_as_well(fake: FakeCuda, device: CudaDevice) -> None:
    """Each new event stands for all before it, on whatever stream those were."""
    one, two, seen = device.stream("one"), device.stream("two"), []
    put(device, one, lambda: None, fake)
    with fake.paused(one.raw):
        old = device.buffer((1,), np.float32, "old")  # zeroed on `one`, which stands still
        fake.set_stream(fake.api().default_stream())
        device._current = None
        device.buffer((1,), np.float32, "new")
        put(device, two, lambda: seen.append(old.array.tolist()), fake)
        assert seen == []
    assert seen == [[0.0]]


def test_memory_lives_as_long_as_the_device(device: CudaDevice) -> None:
    """What is queued may still need it, whoever lets go of its buffer."""
    kept = weakref.ref(device.buffer((4,), np.float32, "b").array)
    gc.collect()
    assert kept() is not None


def test_adopted_memory_is_filled_before_any_stream_touches_it(fake: FakeCuda, device: CudaDevice) -> None:
    stream, cache, seen = device.stream("s"), torch.zeros(4), []
    with fake.paused(fake.api().default_stream()):
        fake.kernel("load", lambda: cache.fill_(7))
        assert device.adopt(cache, "cache").array is cache
        put(device, stream, lambda: seen.append(cache.tolist()), fake)
        assert seen == []
    assert seen == [[7.0] * 4]


def test_all_slots_of_a_mapping_share_one_registration(fake: FakeCuda, device: CudaDevice) -> None:
    segment = Segment.create("ring", 3 * mmap.PAGESIZE)
    slots = [segment.array(np.int32, 500, 64 + i * 2064) for i in range(4)]  # several to a page, across pages
    pinned = [device.pinned(slot, f"slot{i}") for i, slot in enumerate(slots)]
    start = np.frombuffer(segment.buf, np.uint8).ctypes.data
    assert fake.runtime.ranges == {start: start + segment.size} and start % mmap.PAGESIZE == 0
    pinned[2].array[3] = 5
    assert slots[2][3] == 5 and pinned[2].nbytes == 2000
    device.close()
    assert fake.runtime.ranges == {}
    segment.close()


def test_arrays_of_their_own_are_registered_whole_and_once(fake: FakeCuda, device: CudaDevice) -> None:
    plane, seed = np.zeros((8, 16), np.int32), np.array([2**64 - 1], np.uint64)
    for rows in (plane[2:4], plane[5:], plane):
        fake.copy("copy", lambda: None, [device.pinned(rows, "rows").array])
    assert device.pinned(seed, "seed").array.tolist() == [-1]
    assert sorted(end - start for start, end in fake.runtime.ranges.items()) == [8, plane.nbytes]


def test_a_refused_registration_is_an_error_that_says_why(fake: FakeCuda, device: CudaDevice) -> None:
    array = np.zeros(16, np.int32)
    assert fake.runtime.cudaHostRegister(array.ctypes.data + 8, 8, 0) == 0  # somebody else has pinned a part of it
    with pytest.raises(DeviceError, match=r"cannot pin 64 bytes for slot: resource already mapped \(CUDA error 712\)"):
        device.pinned(array, "slot")


# ---------------------------------------------------------------------- observer and guard


def program(device: Any, fake: FakeCuda | None) -> list[tuple[Any, ...]]:
    """A bit of everything that an observer hears of."""
    one, two, event, stamp = device.stream("one"), device.stream("two"), device.event("e"), device.timestamp("t")
    table = device.buffer((4,), np.int64, "table")
    with device.capture(one) as graph:
        event.wait(one)
        body = (lambda: None) if fake is None else (lambda: fake.kernel("fill", lambda: None))
        device.launch(one, body, reads=(), writes=[table.region()], name="fill")
        event.record(one)
    event.wait(two)
    for _ in range(2):
        graph.launch(one)
        event.wait(two)
        stamp.record(two)
        done = device.call(two, lambda: None, reads=[stamp.region()], writes=[table.rows(1, 2)], name="done")
        device.host_access(reads=[table.region()], writes=(), name="look")
    device.synchronize()
    event.synchronize()
    assert done.query() and event.query()
    device.close()
    return device.observer.heard


def test_the_observer_hears_what_it_hears_of_the_host_device(fake: FakeCuda) -> None:
    heard = program(CudaDevice(Log(), api=fake.api()), fake)
    assert heard == program(HostDevice(Log()), None)
    assert len(heard) > 20


def test_the_guard_sees_what_the_launching_thread_does(fake: FakeCuda) -> None:
    guard: LaunchGuard = TorchGuard()
    device = CudaDevice(guard=guard, api=fake.api())
    stream, event = device.stream("s"), device.event("e")
    table, slot = device.buffer((4,), np.int32, "table"), device.pinned(np.zeros(4, np.int32), "slot")
    device.synchronize()
    with guard.section():
        slot.array[0] = 5  # the host's own
        event.record(stream)
        call(device, stream, lambda: None)
        for what in (
            table.array.tolist,
            table.array[0].item,
            lambda: table.array.copy_(slot.array),
            stream.synchronize,
            event.synchronize,
            device.synchronize,
        ):
            with pytest.raises(DeviceError, match=r"test_cuda\.py"):
                what()
        table.array.copy_(slot.array, non_blocking=True)
    device.close()
