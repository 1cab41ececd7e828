"""The step program on the CUDA device, under a fake driver: what the driver is told is what the host device does.

The driver's log is translated, call by call, into what an observer of the host device hears: each operation, each edge,
each graph with all that is in it. So whatever is proven of the program by observing the host device holds for what a
GPU is given.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from gpu.device.buffers import ArrayBuffer
from gpu.device.cuda import CudaDevice
from gpu.device.cuda_parts import CudaEvent
from gpu.device.host import HostDevice
from gpu.device.order import OrderChecker
from gpu.device.protocol import Regions
from gpu.lanes import LANES, ResultSlot
from shm.limits import STEPS_IN_FLIGHT
from shm.records import ResultLayout
from tests.gpu.device.fake_cuda import FakeCuda
from tests.gpu.device.log import Log
from tests.gpu.paged_mill import Bench, reference, small_config


class WarmHostDevice(HostDevice):
    """Runs every shape before it is captured, as a GPU needs it."""

    warms_before_capture = True


class MillDevice(CudaDevice):
    """Hands out its tensors as numpy arrays, which the mill computes with, and queues each launch as one kernel."""

    def __init__(self, fake: FakeCuda, observer: Any = None) -> None:
        super().__init__(observer, api=fake.api())
        self.fake = fake
        self.names: dict[Any, str] = {}  # of streams by handle, and of events
        self.stamps: set[Any] = set()
        self._host: set[int] = set()  # pinned buffers

    def stream(self, name: str) -> Any:
        stream = super().stream(name)
        self.names[stream.raw.cuda_stream] = name
        return stream

    def event(self, name: str) -> Any:
        event = super().event(name)
        self.names[event.raw] = name
        return event

    def timestamp(self, name: str) -> Any:
        stamp = super().timestamp(name)
        self.names[stamp._raw] = name
        self.stamps.add(stamp._raw)
        return stamp

    def buffer(self, shape: Any, dtype: Any, name: str) -> ArrayBuffer:
        return ArrayBuffer(name, super().buffer(shape, dtype, name).array.numpy().view(dtype))

    def pinned(self, array: Any, name: str) -> ArrayBuffer:
        buffer = ArrayBuffer(name, super().pinned(array, name).array.numpy().view(array.dtype))
        assert np.shares_memory(buffer.array, array)
        self._host.add(id(buffer))
        return buffer

    def launch(self, stream: Any, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str) -> None:
        host = [region.buffer.array for region in (*reads, *writes) if id(region.buffer) in self._host]
        queue = partial(self.fake.copy, name, fn, host) if host else partial(self.fake.kernel, name, fn)
        super().launch(stream, queue, reads=reads, writes=writes, name=name)


PROMPTS = {1: [5, 6, 7, 8, 9], 2: [20, 21, 22], 3: [40] * 6}


def steps(bench: Bench) -> list[dict[str, Any]]:
    """Chunks, mixed and decode steps; each is described before it is queued."""
    return [
        {"slots": bench.fill(1, [1, 2, 3]), "sampling": [(1, 0.5, 2**63 + 7)], "chunks": [(1, 1, 0, 3, 0)]},
        {"slots": bench.fill(2, [4, 5, 6]), "chunks": [(1, 1, 3, 2, 1), (2, 2, 0, 3, 1)]},
        {"decode": [2, 1]},
        {"decode": [1, 2], "slots": bench.fill(3, [7, 8]), "chunks": [(3, 3, 0, 6, 1)]},
        {"decode": [1, 2, 3]},
        {"decode": [3, 1, 2]},
        {"decode": [2]},
    ]


def run(
    device: Any, around: Callable[[], ExitStack] = ExitStack, in_flight: int = 99, **options: Any
) -> list[list[int] | None]:
    """All steps, each queued inside `around()`, at most `in_flight` at once. Returns the tokens of each."""
    bench = Bench(device, small_config(), **options)
    for row, prompt in PROMPTS.items():
        bench.prompt(row, prompt)
    for number, step in enumerate(steps(bench), start=1):
        with around():
            bench.step(**step)
        while number - len(bench.completed) >= in_flight:
            device.check()
    device.synchronize()
    device.close()
    return [step.tokens for step in bench.completed]


def expected() -> list[list[int]]:
    one, two, three = reference(PROMPTS[1], 5, 0.5, 2**63 + 7), reference(PROMPTS[2], 6), reference(PROMPTS[3], 3)
    return [
        [], [one[0], two[0]], [two[1], one[1]], [one[2], two[2], three[0]], [one[3], two[3], three[1]],
        [three[2], one[4], two[4]], [two[5]],
    ]  # fmt: skip


def told_to_the_driver(device: MillDevice) -> Iterator[tuple[str, ...]]:
    """The driver's log in the words of an observer."""
    names, capturing = device.names, None
    for what, *operands in device.fake.log:
        stream = names.get(operands[0]) if operands else None
        if what in ("capture_begin", "capture_end"):
            capturing = stream if what == "capture_begin" else None
        elif stream is None or stream == capturing:  # the default stream prepares memory and events
            continue
        elif what in ("kernel", "memcpy"):
            yield "launch", stream, operands[1]
        elif what == "replay":
            yield "graph", stream
            for item in operands[1].items:
                event = item.record or item.wait
                kind = "launch" if event is None else "record" if item.record else "wait"
                yield kind, stream, item.name if event is None else names[event]
            yield "end", stream
        elif what == "record" and operands[1] not in names:
            yield "call", stream
        elif what == "record" and operands[1] in device.stamps:
            yield "launch", stream, names[operands[1]]
        elif what in ("record", "wait") and operands[1] in names:
            yield what, stream, names[operands[1]]


def heard_of_the_host(log: Log) -> Iterator[tuple[str, ...]]:
    """What the driver should be told: waits for events that were never recorded cost it nothing."""
    recorded = set()
    for what, *rest in log.heard:
        if what == "record":
            recorded.add(rest[1])
        if what == "call":
            yield "call", rest[0]
        elif not what.startswith("host") and (what != "wait" or rest[1] in recorded):
            yield what, *rest[:2]


def compare(fake: FakeCuda, **options: Any) -> None:
    """Run the program on both devices and assert that they agree in everything."""
    log, cuda_log = Log(), Log()
    assert run(WarmHostDevice(log), **options) == expected()
    device = MillDevice(fake, cuda_log)
    assert run(device, **options) == expected()
    assert cuda_log.heard == log.heard
    assert list(told_to_the_driver(device)) == list(heard_of_the_host(log))


@pytest.mark.parametrize("early_lengths", [False, True])
def test_the_driver_is_told_what_the_host_device_does(early_lengths: bool) -> None:
    fake = FakeCuda()
    compare(fake, early_lengths=early_lengths)
    told = Counter(entry[0] for entry in fake.log)
    assert told["replay"] == 4 and told["capture_begin"] > 10 and told["record"] > 30


def test_plans_reach_the_driver_in_the_same_order() -> None:
    """An attention that is planned on the CPU: one more operation, before each pass."""
    planned: list[Any] = []
    fake = FakeCuda()
    compare(fake, in_flight=STEPS_IN_FLIGHT, plan=lambda lengths, rows: planned.append((lengths, rows)))
    host = planned[: len(planned) // 2]
    assert [(None if told is None else told.tolist(), rows) for told, rows in host[-7:]] == [
        (None, 1), (None, 2), ([4, 6], 2), (None, 3), ([8, 6, 7], 3), ([8, 9, 7], 3), ([8], 1)
    ]  # fmt: skip
    told = [entry[2] for entry in fake.log if entry[0] == "memcpy"]
    assert told.count("plan") == len(planned) // 2


def drop_waits(device: CudaDevice, stream: Any, name: str, fn: Any, *args: Any) -> None:
    if getattr(fn, "__func__", None) is not None and fn.__name__ == "wait":
        return
    ISSUE(device, stream, name, fn, *args)


def record_late(device: CudaDevice, stream: Any, name: str, fn: Any, *args: Any) -> None:
    if name.startswith("done"):
        return
    ISSUE(device, stream, name, fn, *args)


def stay_on_a_stream(device: CudaDevice, stream: Any, name: str, fn: Any, *args: Any) -> None:
    if device._current is None or name == "capture":
        ISSUE(device, stream, name, fn, *args)
    else:
        fn(*args)


ISSUE = CudaDevice.issue


@pytest.mark.parametrize("fault", [drop_waits, record_late, stay_on_a_stream])
def test_the_comparison_sees_what_the_driver_is_not_told(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "issue", fault)
    with pytest.raises((AssertionError, RuntimeError)):
        compare(FakeCuda())


def test_the_fake_sees_events_that_are_not_external(monkeypatch: pytest.MonkeyPatch) -> None:
    made = CudaEvent.__init__

    def internal(event: CudaEvent, device: CudaDevice, name: str) -> None:
        made(event, device, name)
        event.raw.external = False

    monkeypatch.setattr(CudaEvent, "__init__", internal)
    with pytest.raises(RuntimeError, match="captured event"):
        compare(FakeCuda())


def result_slot(device: MillDevice, bench: Bench) -> ResultSlot:
    layout = ResultLayout(bench.config)
    payload = np.zeros(layout.nbytes // 4, np.int32)
    return ResultSlot(
        device.pinned(payload, "result"), layout.view(payload), device.timestamp("begin"), device.timestamp("end")
    )


def test_a_decode_step_is_one_graph_launch_and_one_descriptor_copy() -> None:
    """And what orders them: no call allocates, registers, asks or waits."""
    fake = FakeCuda()
    device = MillDevice(fake, OrderChecker())
    bench = Bench(device, small_config())
    bench.prompt(1, PROMPTS[1])
    bench.step(slots=bench.fill(1, [1, 2, 3, 4]), chunks=[(1, 1, 0, 5, 1)])
    ready = [(bench.describe(decode=[1]), result_slot(device, bench)) for _ in range(6)]
    for i, (slot, result) in enumerate(ready, start=1):
        fake.log.clear()
        bench.program.enqueue(slot, result, lambda: None)
        calls = Counter(entry[0] for entry in fake.log)
        waits = 4 if i >= LANES else 3  # a lane that was never used is not waited for
        assert calls == {"memcpy": 2, "replay": 1, "record": 6, "wait": waits, "set_stream": 3}
        copies = [(device.names[entry[1]], entry[2]) for entry in fake.log if entry[0] == "memcpy"]
        assert copies == [("schedule", "upload"), ("copy", "result")]
    device.synchronize()
    tokens = [int(result.view.tokens[0, 0]) for _, result in ready]
    assert tokens == reference(PROMPTS[1], 7)[1:]
    begins, ends = [r.view.begin_ns for _, r in ready], [r.view.end_ns for _, r in ready]
    assert all(0 < begin <= end for begin, end in zip(begins, ends, strict=True))
    device.close()


def test_a_mixed_step_is_told_operation_by_operation_and_waits_for_nothing() -> None:
    fake = FakeCuda()
    device = MillDevice(fake)
    bench = Bench(device, small_config())
    bench.prompt(1, PROMPTS[1])
    slots = [bench.describe(slots=bench.fill(1, [1, 2]), chunks=[(1, 1, i, 1, 0)]) for i in range(4)]
    results = [result_slot(device, bench) for _ in slots]
    with ExitStack() as paused:
        for stream in device._streams:
            paused.enter_context(fake.paused(stream.raw))
        for slot, result in zip(slots, results, strict=True):
            fake.log.clear()
            bench.program.enqueue(slot, result, lambda: None)
    calls = Counter(entry[0] for entry in fake.log)
    assert calls == {"kernel": 5, "memcpy": 2, "record": 7, "wait": 4, "set_stream": 3}
    device.synchronize()
    device.close()


@pytest.mark.parametrize("seed", range(8))
def test_the_answers_are_right_whichever_streams_lag(seed: int) -> None:
    fake, rng = FakeCuda(), random.Random(seed)
    device = MillDevice(fake, OrderChecker())

    def lag() -> ExitStack:
        stack = ExitStack()
        for stream in rng.sample(device._streams, rng.randint(0, len(device._streams))):
            stack.enter_context(fake.paused(stream.raw))
        return stack

    assert run(device, lag, early_lengths=seed % 2 == 0) == expected()
