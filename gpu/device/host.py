"""The host device: the device protocol on a CPU, one worker thread per stream.

Owns its threads and the memory it hands out. Real asynchrony: a call only fills a queue and returns, and the streams
run independently, so a missing wait is a real race here as it is on a GPU. It never runs an operation in the caller's
thread, and never waits for a stream except in `synchronize` and `close`.

Threads of one process share the interpreter lock. Operations should therefore be few and spend their time in code that
releases it; the process should also lower `sys.setswitchinterval` (to 5e-5), because a stream whose thread wants the
lock back waits up to that long for a thread that is busy in Python.
"""

import queue
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpu.device import protocol
from gpu.device.buffers import ArrayBuffer
from gpu.device.guard import LaunchGuard
from gpu.device.protocol import DeviceError, Observer, Region, Regions
from gpu.device.sticky import StickyDevice

_JOIN_SECONDS_MAX = 60.0


class _Marker:
    """One record of an event: set once, by the stream that reaches it.

    A bare lock, held until the marker is set, because a threading.Event costs several times as much.
    """

    __slots__ = ("done", "lock", "stream")

    def __init__(self, stream: "HostStream") -> None:
        self.stream = stream
        self.done = False
        self.lock = allocate_lock()
        self.lock.acquire()

    def set(self) -> None:
        self.done = True  # before the lock, so that nobody who got through the lock sees it unset
        self.lock.release()

    def wait(self) -> None:
        if not self.done:
            with self.lock:  # each waiter passes it on to the next one
                pass


class _Work(NamedTuple):
    """One queue entry. `always`: runs even after the device failed, so that no waiter is left hanging."""

    run: Callable[[], None]
    always: bool
    name: str


class _Node(NamedTuple):
    """One operation of a graph: exactly one of run, record, wait is set."""

    name: str
    run: Callable[[], None] | None = None
    record: "HostEvent | None" = None
    wait: "HostEvent | None" = None
    reads: Regions = ()
    writes: Regions = ()


class HostStream:
    """A worker thread and its queue, see `protocol.Stream`."""

    def __init__(self, device: "HostDevice", name: str) -> None:
        self.name = name
        self.device = device
        self.capturing: HostGraph | None = None
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def put(self, run: Callable[[], None], *, name: str, always: bool = False) -> None:
        """Queue one piece of work."""
        self._queue.put(_Work(run, always, name))

    def synchronize(self) -> None:
        """Block the caller until everything queued so far has run. Raises DeviceError."""
        self.device.waits("Stream.synchronize")
        if self.capturing is not None:
            raise DeviceError(f"stream {self.name} is capturing")
        marker = _Marker(self)
        self.put(marker.set, name="synchronize", always=True)
        marker.wait()
        self.device.check()
        if self.device.observer is not None:
            self.device.observer.host_wait(None, self)

    def end(self) -> None:
        """Run what is queued, then stop the thread."""
        self._queue.put(None)
        self._thread.join(_JOIN_SECONDS_MAX)
        assert not self._thread.is_alive(), f"stream {self.name} does not end"

    def _work(self) -> None:
        get = self._queue.get
        device = self.device
        while (work := get()) is not None:
            if device.failed and not work.always:
                continue
            try:
                work.run()
            except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it becomes the device's sticky error
                device.fail(self.name, work.name, error)


class HostEvent:
    """A marker that can be recorded again and again, see `protocol.Event`."""

    def __init__(self, device: "HostDevice", name: str) -> None:
        self.name = name
        self.device = device
        self.latest: _Marker | None = None

    def record(self, stream: protocol.Stream) -> None:
        """Queue the marker on `stream`. From now on waits refer to this record."""
        target = self.device.owned(stream)
        if target.capturing is not None:
            target.capturing.nodes.append(_Node(self.name, record=self))
            return
        if self.device.observer is not None:
            self.device.observer.record(target, self)
        self.latest = marker = _Marker(target)
        target.put(marker.set, name=self.name, always=True)

    def wait(self, stream: protocol.Stream) -> None:
        """Hold back what is queued on `stream` from now on until the latest record issued so far was reached."""
        target = self.device.owned(stream)
        if target.capturing is not None:
            target.capturing.nodes.append(_Node(self.name, wait=self))
            return
        if self.device.observer is not None:
            self.device.observer.wait(target, self)
        marker = self.latest
        if marker is not None and not marker.done and marker.stream is not target:
            target.put(marker.wait, name=self.name, always=True)

    def query(self) -> bool:
        """Whether the latest record was reached; True if there is none."""
        self.device.check()
        reached = self.latest is None or self.latest.done
        if reached and self.device.observer is not None:
            self.device.observer.host_wait(self, None)
        return reached

    def synchronize(self) -> None:
        """Block the caller until the latest record was reached. Raises DeviceError."""
        self.device.waits("Event.synchronize")
        if self.latest is not None:
            self.latest.wait()
        self.device.check()
        if self.device.observer is not None:
            self.device.observer.host_wait(self, None)


class HostTimestamp:
    """A moment on a stream, see `protocol.Timestamp`."""

    def __init__(self, device: "HostDevice", name: str) -> None:
        self.name = name
        self.device = device
        self._buffer = device.buffer((1,), np.int64, name)
        self._writes = (self._buffer.region(),)

    def record(self, stream: protocol.Stream) -> None:
        """Queue the taking of the time on `stream`."""
        if self.device.owned(stream).capturing is not None:
            raise DeviceError(f"timestamp {self.name} cannot be recorded inside a graph")
        self.device.launch(stream, self._take, reads=(), writes=self._writes, name=self.name)

    def region(self) -> Region:
        """What `record` writes."""
        return self._writes[0]

    def ns(self) -> int:
        """CLOCK_MONOTONIC ns of the latest record. Only in a host function that is queued behind that record."""
        return int(self._buffer.array[0])

    def _take(self) -> None:
        self._buffer.array[0] = time.monotonic_ns()


class HostCompletion:
    """What is known of a host function, see `protocol.Completion`."""

    __slots__ = ("_device", "_done", "_fn", "name")

    def __init__(self, device: "HostDevice", name: str, fn: Callable[[], None]) -> None:
        self.name = name
        self._device = device
        self._fn = fn
        self._done = False

    def run(self) -> None:
        """What the stream does when it reaches the host function."""
        self._fn()
        self._done = True

    def query(self) -> bool:
        """Whether it has run. From True on, what the caller does counts as done behind it."""
        if self._done and self._device.observer is not None:
            self._device.observer.host_saw(self)
        return self._done


class HostGraph:
    """A recorded sequence of operations, see `protocol.Graph`."""

    def __init__(self, device: "HostDevice") -> None:
        self.device = device
        self.nodes: list[_Node] = []

    def launch(self, stream: protocol.Stream) -> None:
        """Queue one replay on `stream`: one queue entry, whatever the number of operations."""
        target = self.device.owned(stream)
        if target.capturing is not None:
            raise DeviceError("a graph cannot be launched into a capture")
        if self.device.observer is not None:
            self._report(target, self.device.observer)
        steps: list[tuple[Callable[[], None], bool, str]] = []
        for node in self.nodes:
            if node.run is not None:
                steps.append((node.run, False, node.name))
            elif node.record is not None:
                node.record.latest = marker = _Marker(target)
                steps.append((marker.set, True, node.name))
            elif node.wait is not None and (awaited := node.wait.latest) is not None and awaited.stream is not target:
                steps.append((awaited.wait, True, node.name))
        target.put(lambda: self._replay(target, steps), name="graph", always=True)

    def _replay(self, stream: HostStream, steps: list[tuple[Callable[[], None], bool, str]]) -> None:
        device = self.device
        for run, always, name in steps:
            if device.failed and not always:
                continue
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - becomes the device's sticky error; later events must still be set
                device.fail(stream.name, name, error)

    def _report(self, stream: HostStream, observer: Observer) -> None:
        observer.graph_launch(stream, self)
        for node in self.nodes:
            if node.record is not None:
                observer.record(stream, node.record)
            elif node.wait is not None:
                observer.wait(stream, node.wait)
            else:
                observer.launch(stream, node.name, node.reads, node.writes)
        observer.graph_end(stream, self)


class HostDevice(StickyDevice):
    """Streams, events, graphs and memory on a CPU, see `protocol.Device`. `observer` hears of all that is queued.

    guard: closes the memory to the launch loop, and refuses calls of it that wait; see `guard`.
    """

    warms_before_capture = False  # what a graph runs was compiled before, whatever its size

    def __init__(self, observer: Observer | None = None, guard: LaunchGuard | None = None) -> None:
        super().__init__(observer, guard)
        self._streams: list[HostStream] = []

    def stream(self, name: str) -> HostStream:
        """A new stream with a thread of its own."""
        self.check()
        stream = HostStream(self, name)
        self._streams.append(stream)
        return stream

    def event(self, name: str) -> HostEvent:
        """A new event, usable inside and outside graphs."""
        return HostEvent(self, name)

    def timestamp(self, name: str) -> HostTimestamp:
        """A new timestamp."""
        return HostTimestamp(self, name)

    def buffer(self, shape: Sequence[int], dtype: DTypeLike, name: str) -> ArrayBuffer:
        """Zeroed memory of `shape` and `dtype`."""
        return self._watched(name, np.zeros(tuple(shape), dtype))

    def pinned(self, array: NDArray[Any], name: str) -> ArrayBuffer:
        """Registers C-contiguous host memory; a CPU needs nothing more than its name."""
        return ArrayBuffer(name, array if self._guard is None else self._guard.pin(array))

    def adopt(self, array: NDArray[Any], name: str) -> ArrayBuffer:
        """Memory that somebody else allocated."""
        return self._watched(name, array)

    def _watched(self, name: str, array: NDArray[Any]) -> ArrayBuffer:
        return ArrayBuffer(name, array if self._guard is None else self._guard.watch(array))

    def launch(
        self, stream: protocol.Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str
    ) -> None:
        """Queue an operation. `reads` and `writes` name every byte of any buffer that it touches."""
        target = self.owned(stream)
        if target.capturing is not None:
            target.capturing.nodes.append(_Node(name, run=fn, reads=reads, writes=writes))
            return
        if self.observer is not None:
            self.observer.launch(target, name, reads, writes)
        target.put(fn, name=name)

    def call(
        self, stream: protocol.Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str
    ) -> HostCompletion:
        """Queue a host function. Here the stream's own thread runs it, and what is queued behind it does wait."""
        target = self.owned(stream)
        if target.capturing is not None:
            raise DeviceError(f"host function {name} cannot be part of a graph")
        completion = HostCompletion(self, name, fn)
        if self.observer is not None:
            self.observer.call(target, completion, reads, writes)
        target.put(completion.run, name=name)
        return completion

    @contextmanager
    def capture(self, stream: protocol.Stream) -> Iterator[HostGraph]:
        """Operations issued to `stream` inside the block become the graph that the block yields."""
        target = self.owned(stream)
        if target.capturing is not None:
            raise DeviceError(f"stream {target.name} is capturing already")
        target.capturing = graph = HostGraph(self)
        try:
            yield graph
        finally:
            target.capturing = None

    def owned(self, stream: protocol.Stream) -> HostStream:
        """`stream` as one of this device's own, on the way of every call: raises DeviceError if the device failed."""
        if self.failed or self._closed:
            self.check()
        assert isinstance(stream, HostStream) and stream.device is self, stream
        return stream

    def synchronize(self) -> None:
        """Block the caller until every stream has run out of work. Raises DeviceError."""
        self.waits("Device.synchronize")
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Run what is queued, then end every thread. May be called twice."""
        if not self._closed:
            self._closed = True
            for stream in self._streams:
                stream.end()
