"""The watcher of the CUDA device: runs host functions, each once its stream has come so far, in the order of the calls.

Owns one thread, the events that it waits for and the device's clock. The launching thread hands over and goes on; it
learns from a completion what has run. The wait releases the interpreter lock and sleeps. Once the device has failed
nothing more is run, but whoever waits for the watcher is always answered.

A host function holds back nothing on the device, unlike one of CUDA's own (cudaLaunchHostFunc), which would stop its
stream until the interpreter lock is free.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpu.device.cuda_clock import CudaClock

if TYPE_CHECKING:
    from gpu.device.cuda import CudaDevice
    from gpu.device.cuda_parts import CudaStream

_JOIN_SECONDS_MAX = 60.0


class CudaCompletion:
    """What is known of a host function, see `protocol.Completion`."""

    __slots__ = ("_device", "done", "event", "fn", "name", "stream")

    def __init__(self, stream: CudaStream, name: str, fn: Callable[[], None], event: Any) -> None:
        self._device = stream.device
        self.stream = stream
        self.name = name
        self.fn = fn
        self.event = event
        self.done = False

    def query(self) -> bool:
        """Whether it has run. From True on, what the caller does counts as done behind it."""
        if self.done and self._device.observer is not None:
            self._device.observer.host_saw(self)
        return self.done


class Watcher:
    """The thread. `event`, `put`, `drain` and `end` are for the launching thread."""

    def __init__(self, device: CudaDevice) -> None:
        self.clock = CudaClock()
        self._device = device
        self._free: deque[Any] = deque()  # events that nobody waits for any more
        self._queue: queue.SimpleQueue[CudaCompletion | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cuda-calls", daemon=True)
        self._thread.start()

    def event(self) -> Any:
        """An event to record behind what a host function waits for."""
        return self._free.popleft() if self._free else self._device.api.new_event(enable_timing=True, blocking=True)

    def put(self, call: CudaCompletion) -> None:
        """Have it run once its event, which was recorded, is reached, and behind all calls before it."""
        self._queue.put(call)

    def drain(self) -> None:
        """Block the caller until every call so far has run, or was skipped because the device failed."""
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()

    def end(self) -> None:
        """Run what is queued, then stop the thread."""
        self._queue.put(None)
        self._thread.join(_JOIN_SECONDS_MAX)
        assert not self._thread.is_alive(), "the thread for host functions does not end"

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif not self._device.failed:
                self._run(item)

    def _run(self, call: CudaCompletion) -> None:
        try:
            call.event.synchronize()
            replaced = self.clock.reached(call.event, time.monotonic_ns())
            call.fn()
            call.done = True
        except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it becomes the device's sticky error
            self._device.fail(call.stream.name, call.name, error)
        else:
            if replaced is not None:
                self._free.append(replaced)
