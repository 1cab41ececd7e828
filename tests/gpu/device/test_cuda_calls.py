"""Host functions of the CUDA device run behind their stream and beside it, and know the time; errors stick."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu.device.cuda import CudaDevice
from gpu.device.cuda_clock import CudaClock
from gpu.device.protocol import DeviceError
from tests.gpu.device.fake_cuda import FakeCuda

WAIT_S = 10.0


@pytest.fixture
def fake() -> FakeCuda:
    return FakeCuda()


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[CudaDevice]:
    device = CudaDevice(api=fake.api())
    yield device
    device.close()


def put(device: Any, stream: Any, fn: Callable[[], Any], fake: FakeCuda, name: str = "op") -> None:
    device.launch(stream, lambda: fake.kernel(name, fn), reads=(), writes=(), name=name)


def call(device: CudaDevice, stream: Any, fn: Callable[[], Any], name: str = "call") -> Any:
    return device.call(stream, fn, reads=(), writes=(), name=name)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_host_functions_run_in_the_order_of_the_calls_and_hold_nothing_back(fake: FakeCuda, device: CudaDevice) -> None:
    one, two, seen, gate = device.stream("one"), device.stream("two"), [], threading.Event()
    with fake.paused(one.raw):
        first = call(device, one, lambda: (gate.wait(WAIT_S), seen.append("first")))
        put(device, one, lambda: seen.append("behind"), fake)
        second = call(device, two, lambda: seen.append("second"))
        time.sleep(0.02)
        assert seen == []  # `two` is there, but the first call comes first
    until(lambda: seen == ["behind"])
    assert not first.query()
    gate.set()
    until(second.query)
    assert seen == ["behind", "first", "second"]
    assert first.name == "call"
    assert "stream_synchronize" not in [entry[0] for entry in fake.log]


def test_synchronize_waits_for_host_functions_too(fake: FakeCuda, device: CudaDevice) -> None:
    stream, seen = device.stream("s"), []
    done = call(device, stream, lambda: (time.sleep(0.05), seen.append(1)))
    stream.synchronize()
    assert seen == [1] and done.query()


def test_the_waiting_event_sleeps_and_is_used_again(fake: FakeCuda, device: CudaDevice) -> None:
    stream, events = device.stream("s"), []
    for _ in range(6):
        done = call(device, stream, lambda: None)
        events.append(done.event)
        device.synchronize()
    assert all(event.blocking and event.timing for event in events)
    assert len(set(map(id, events))) == 2  # the newest is what the clock measures from


def test_timestamps_are_the_hosts_monotonic_time() -> None:
    fake = FakeCuda(clock=lambda: time.monotonic_ns() + 10**15)  # the GPU's clock began at another time
    device = CudaDevice(api=fake.api())
    stream, begin, end, told = device.stream("s"), device.timestamp("begin"), device.timestamp("end"), []
    for _ in range(5):
        queued_ns = time.monotonic_ns()
        begin.record(stream)
        put(device, stream, lambda: time.sleep(0.01), fake)
        end.record(stream)
        call(device, stream, lambda: told.append((begin.ns(), end.ns(), time.monotonic_ns())))
        device.synchronize()
        begin_ns, end_ns, seen_ns = told[-1]
        assert queued_ns <= begin_ns and end_ns <= seen_ns
        assert abs(end_ns - begin_ns - (end._raw.time_ns - begin._raw.time_ns)) < 1000
    device.close()


class Moment:
    """An event of which only the time is known."""

    def __init__(self, ns: float) -> None:
        self.ns = ns

    def elapsed_time(self, end: "Moment") -> float:
        return float(np.float32((end.ns - self.ns) / 1e6))


def test_the_clock_stays_exact_over_hours_and_follows_the_hosts() -> None:
    """The GPU's clock is 50 ppm fast; the watcher wakes 20 us late at best, and now and then 5 ms late."""
    clock, rng = CudaClock(), np.random.default_rng(1)
    host_ns, worst_ns, replaced = 5 * 10**12, 0.0, None

    def gpu(ns: float) -> Moment:
        return Moment(ns * 1.00005 + 3e15)

    for step in range(20000):
        pause_ns = 3.1e9 if step % 7000 == 6999 else 5e6
        begin_ns, host_ns = host_ns + 1e5, host_ns + pause_ns
        late_ns = 20e3 + (5e6 if rng.random() < 0.1 else rng.exponential(30e3))
        event = gpu(host_ns)
        replaced = clock.reached(event, int(host_ns + late_ns))
        assert (replaced is None) == (step == 0)
        told = clock.ns(gpu(host_ns)), clock.ns(gpu(host_ns - 4e6))
        assert abs(told[0] - told[1] - 4e6) < 500  # neighbours: exact, whatever the hour
        assert told[0] <= host_ns + late_ns  # never later than it was seen
        if step % 7000 > 20:  # a few steps after a pause it knows
            worst_ns = max(worst_ns, abs(told[0] - host_ns - 20e3))
        assert begin_ns < host_ns
    assert worst_ns < 250e3


def test_an_error_in_a_launch_sticks_and_is_raised_at_once(fake: FakeCuda, device: CudaDevice) -> None:
    stream, event = device.stream("s"), device.event("e")

    def broken() -> None:
        raise ValueError("no such page")

    with pytest.raises(DeviceError, match="attention on stream s: ValueError: no such page"):
        device.launch(stream, broken, reads=(), writes=(), name="attention")
    check_dead(device, stream, event, "attention on stream s: ValueError: no such page")


def test_an_error_on_the_gpu_reaches_the_launch_loop_by_the_watcher(fake: FakeCuda, device: CudaDevice) -> None:
    stream, event, seen = device.stream("s"), device.event("e"), []
    with fake.paused(stream.raw):
        put(device, stream, lambda: 1 // 0, fake, "divide")
        done = call(device, stream, lambda: seen.append(1), "complete")
        device.check()
    until(lambda: device.failed)
    check_dead(device, stream, event, "complete on stream s: FakeError: CUDA error")
    assert seen == [] and not done.query()


def test_an_error_in_a_host_function_sticks(fake: FakeCuda, device: CudaDevice) -> None:
    stream, event, seen = device.stream("s"), device.event("e"), []
    with fake.paused(stream.raw):
        call(device, stream, lambda: 1 // 0, "complete")
        call(device, stream, lambda: seen.append(1))
    with pytest.raises(DeviceError, match="ZeroDivisionError"):
        stream.synchronize()
    check_dead(device, stream, event, "complete on stream s: ZeroDivisionError")
    assert seen == []


def check_dead(device: CudaDevice, stream: Any, event: Any, match: str) -> None:
    for use in (
        lambda: call(device, stream, lambda: None),
        lambda: event.record(stream),
        lambda: event.wait(stream),
        event.query,
        event.synchronize,
        stream.synchronize,
        device.synchronize,
        device.check,
    ):
        with pytest.raises(DeviceError, match=match):
            use()


def test_close_runs_what_is_queued_and_ends_the_thread() -> None:
    threads = threading.active_count()
    fake, seen = FakeCuda(), []
    api = fake.api()
    device = CudaDevice(api=api)
    stream = device.stream("s")
    call(device, stream, lambda: (time.sleep(0.02), seen.append(1)))
    device.close()
    device.close()
    assert seen == [1] and threading.active_count() == threads and api.taken == set()
    with pytest.raises(DeviceError, match="closed"):
        call(device, stream, lambda: None)
