"""A stand-in for torch.cuda on a machine without a GPU: logs every driver call, and refuses what CUDA refuses.

Operations are Python functions on host memory. Each stream runs its own, in order, as soon as they are issued and no
event holds them back; a test may pause a stream. Where torch or CUDA would silently do the wrong thing (drop a wait for
an event that was never made, copy pageable memory and wait for it) this raises.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu.device.cuda_api import CudaApi

POOL = 32
WAIT_S = 10.0
ALREADY_REGISTERED, NOT_REGISTERED, INVALID = 712, 713, 1


class FakeError(RuntimeError):
    """What torch raises for a CUDA error."""


class Item(NamedTuple):
    """One thing that a stream does: a kernel, or the record of an event or a wait for it, of one serial number."""

    name: str
    run: Callable[[], Any] | None = None
    record: FakeEvent | None = None
    wait: FakeEvent | None = None
    serial: int = 0


@dataclass
class Track:
    """What one handle stands for."""

    handle: int
    items: deque[Item] = field(default_factory=deque)
    paused: bool = False
    capture: FakeGraph | None = None


class FakeStream:
    """torch.cuda.Stream"""

    def __init__(self, fake: FakeCuda, track: Track) -> None:
        self._fake = fake
        self.track = track
        self.cuda_stream = track.handle

    def synchronize(self) -> None:
        self._fake.call("stream_synchronize", self.cuda_stream)
        self._fake.refuse_in_capture("cudaStreamSynchronize")
        self._fake.wait_until(lambda: not self.track.items)


class FakeEvent:
    """torch.cuda.Event"""

    def __init__(
        self, fake: FakeCuda, enable_timing: bool = False, blocking: bool = False, external: bool = False
    ) -> None:
        self._fake = fake
        self.timing, self.blocking, self.external = enable_timing, blocking, external
        self.issued = self.reached = 0  # serial numbers of records; 0: torch has not even made the event
        self.inside: FakeGraph | None = None  # the capture in which it is an edge
        self.time_ns = 0

    def record(self, stream: FakeStream) -> None:
        fake = self._fake
        fake.call("record", stream.cuda_stream, self)
        track, current = stream.track, fake.current().track
        as_node = self.external and current.capture is not None
        if as_node and track.capture is None:
            raise FakeError("illegal state: cudaEventRecordExternal on a stream that does not capture")
        if track.capture is None:
            self.inside = None
            fake.put(track, Item("record", record=self, serial=self.issue()))
        elif as_node:
            self.make()
            track.capture.items.append(Item("record", record=self))
        else:
            self.make()
            self.inside = track.capture

    def make(self) -> None:
        """It is there, and holds nobody back."""
        if not self.issued:
            self.issued = self.reached = 1

    def wait(self, stream: FakeStream) -> None:
        fake = self._fake
        fake.call("wait", stream.cuda_stream, self)
        if not self.issued:
            raise FakeError("a wait for an event that was never made: torch drops it")
        track, current = stream.track, fake.current().track
        as_node = self.external and current.capture is not None
        if track.capture is None:
            if as_node:
                raise FakeError("illegal state: cudaEventWaitExternal on a stream that does not capture")
            if self.inside is not None:
                raise FakeError("captured event: it was recorded in a capture, and is no external one")
            fake.put(track, Item("wait", wait=self, serial=self.issued))
        elif as_node:
            track.capture.items.append(Item("wait", wait=self))
        elif self.inside is not track.capture:
            raise FakeError("stream capture isolation: a wait for an event that was recorded outside of the capture")

    def issue(self) -> int:
        self.issued += 1
        return self.issued

    def query(self) -> bool:
        self._fake.call("event_query", self)
        self._fake.refuse_in_capture("cudaEventQuery")
        return self.reached >= self.issued

    def synchronize(self) -> None:
        self._fake.call("event_synchronize", self)
        self._fake.refuse_in_capture("cudaEventSynchronize")
        serial = self.issued
        self._fake.wait_until(lambda: self.reached >= serial)

    def elapsed_time(self, end: FakeEvent) -> float:
        if not (self.timing and end.timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.issued and end.issued):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.reached < self.issued or end.reached < end.issued:
            raise FakeError("Both events must be completed before calculating elapsed time.")
        return float(np.float32((end.time_ns - self.time_ns) / 1e6))


class FakeGraph:
    """torch.cuda.CUDAGraph"""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self.items: list[Item] = []
        self.track: Track | None = None
        self.mode = ""
        self.pool: Any = None
        self.ready = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        fake = self._fake
        track = fake.current().track
        fake.call("capture_begin", track.handle)
        if track.handle == 0:
            raise FakeError("CUDA graphs must be captured on a non-default stream.")
        if any(other.capture is not None for other in fake.tracks.values()):
            raise FakeError("illegal state: a stream is capturing")
        self.track, self.pool, self.mode = track, pool, capture_error_mode
        fake.capturing_thread = threading.get_ident()
        track.capture = self

    def capture_end(self) -> None:
        fake, track = self._fake, self.track
        fake.call("capture_end", fake.current().cuda_stream)
        if track is None or fake.current().track is not track:
            raise FakeError("Capture must end on the same stream it began on.")
        track.capture, self.ready = None, True

    def replay(self) -> None:
        fake = self._fake
        track = fake.current().track
        fake.call("replay", track.handle, self)
        if not self.ready:
            raise FakeError("Called CUDAGraph::replay without a preceding successful capture.")
        if track.capture is not None:
            raise FakeError("operation not permitted when stream is capturing")
        for item in self.items:
            serial = 0
            if item.record is not None:
                item.record.inside = None
                serial = item.record.issue()
            elif item.wait is not None:
                serial = item.wait.issued
            fake.put(track, item._replace(serial=serial))


class FakeRuntime:
    """torch.cuda.cudart(): keeps byte ranges that are registered."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake
        self.ranges: dict[int, int] = {}

    def cudaHostRegister(self, lo: int, nbytes: int, flags: int) -> int:
        self._fake.call("host_register", lo, nbytes)
        if nbytes <= 0 or flags != 0:
            return INVALID
        if any(lo < end and start < lo + nbytes for start, end in self.ranges.items()):
            return ALREADY_REGISTERED
        self.ranges[lo] = lo + nbytes
        return 0

    def cudaHostUnregister(self, lo: int) -> int:
        self._fake.call("host_unregister", lo)
        return 0 if self.ranges.pop(lo, None) is not None else NOT_REGISTERED

    def cudaGetErrorString(self, result: int) -> str:
        return {ALREADY_REGISTERED: "resource already mapped"}.get(result, "unknown error")

    def holds(self, lo: int, nbytes: int) -> bool:
        """Whether one registration holds all of it."""
        return any(start <= lo and lo + nbytes <= end for start, end in self.ranges.items())


class FakeCuda:
    """The GPU and torch's state of it. `log`: (call, operands ...) of every driver call of the thread that made it."""

    def __init__(
        self,
        *,
        pool: int = POOL,
        clock: Callable[[], int] = time.monotonic_ns,
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        self.capability = capability
        self.log: list[tuple[Any, ...]] = []
        self.thread = threading.get_ident()
        self.tracks = {handle: Track(handle) for handle in (0, *(0x100 + i for i in range(pool)))}
        self.runtime = FakeRuntime(self)
        self.capturing_thread: int | None = None
        self.clock = clock
        self._handed = 0
        self._pool = pool
        self._current: dict[int, FakeStream] = {}
        self._lock = threading.RLock()
        self._moved = threading.Condition(self._lock)
        self._running = False
        self._error: Exception | None = None

    def api(self) -> CudaApi:
        return CudaApi(
            new_stream=self.new_stream,
            new_event=lambda **options: FakeEvent(self, **options),
            new_graph=lambda: FakeGraph(self),
            new_pool=object,
            set_stream=self.set_stream,
            current_stream=self.current,
            default_stream=lambda: FakeStream(self, self.tracks[0]),
            zeros=self.zeros,
            runtime=self.runtime,
            place=torch.device("cpu"),
            capability=self.capability,
        )

    # ------------------------------------------------------------------ what torch does

    def new_stream(self) -> FakeStream:
        self._handed += 1
        return FakeStream(self, self.tracks[0x100 + (self._handed - 1) % self._pool])

    def set_stream(self, stream: FakeStream) -> None:
        self.call("set_stream", stream.cuda_stream)
        self._current[threading.get_ident()] = stream

    def current(self) -> FakeStream:
        return self._current.get(threading.get_ident()) or FakeStream(self, self.tracks[0])

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory is 99s until the current stream comes to zero it."""
        self.call("malloc", shape)
        if self.current().track.capture is not None:
            raise FakeError("operation not permitted when stream is capturing: cudaMalloc")
        tensor = torch.full(shape, 99, dtype=dtype)
        self.kernel("zero", tensor.zero_)
        return tensor

    # ------------------------------------------------------------------ what operations do

    def kernel(self, name: str, fn: Callable[[], Any], kind: str = "kernel") -> None:
        """Queue `fn` on the current stream of the calling thread."""
        track = self.current().track
        self.call(kind, track.handle, name)
        if track.capture is not None:
            track.capture.items.append(Item(name, fn))
        else:
            self.put(track, Item(name, fn))

    def copy(self, name: str, fn: Callable[[], Any], host: list[Any]) -> None:
        """Queue an asynchronous copy that touches these tensors or arrays of host memory."""
        for memory in host:
            lo = memory.data_ptr() if isinstance(memory, torch.Tensor) else memory.ctypes.data
            if not self.runtime.holds(lo, memory.nbytes):
                raise FakeError(f"{name} copies host memory that is not registered: it would wait")
        self.kernel(name, fn, "memcpy")

    # ------------------------------------------------------------------ the machine

    def call(self, *what: Any) -> None:
        """Log a driver call. Raises the error that stuck, as CUDA does from then on."""
        with self._lock:
            if threading.get_ident() == self.thread:
                self.log.append(what)
            if self._error is not None:
                raise FakeError(f"CUDA error: {self._error}")

    def refuse_in_capture(self, what: str) -> None:
        for track in self.tracks.values():
            graph = track.capture
            if graph is not None and (graph.mode == "global" or threading.get_ident() == self.capturing_thread):
                raise FakeError(f"operation not permitted when stream is capturing: {what}")

    def put(self, track: Track, item: Item) -> None:
        with self._lock:
            track.items.append(item)
            self._advance()

    @contextmanager
    def paused(self, stream: FakeStream) -> Iterator[None]:
        """The stream stands still inside the block, and goes on behind it."""
        stream.track.paused = True
        try:
            yield
        finally:
            with self._lock:
                stream.track.paused = False
                self._advance()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: condition() or self._error is not None, WAIT_S), "it hangs"
        if self._error is not None:
            raise FakeError(f"CUDA error: {self._error}")

    def _advance(self) -> None:
        if self._running:
            return
        self._running = True
        while any(self._step(track) for track in self.tracks.values()):
            pass
        self._running = False
        self._moved.notify_all()

    def _step(self, track: Track) -> bool:
        if track.paused or not track.items:
            return False
        item = track.items[0]
        if item.wait is not None and item.wait.reached < item.serial:
            return False
        track.items.popleft()
        if item.record is not None:
            item.record.time_ns = self.clock()
            item.record.reached = max(item.record.reached, item.serial)
        elif item.run is not None and self._error is None:
            try:
                item.run()
            except Exception as error:  # noqa: BLE001 - it sticks
                self._error = error
        return True
