"""The CUDA device: the device protocol on an NVIDIA GPU, by torch.cuda.

Owns the streams, the memory that it hands out, and what sticks when something fails. A launch calls its function at
once, with the stream current, and the function queues kernels and copies. Nothing waits for the GPU but `synchronize`
and `close`; host functions run in a thread of their own, see `cuda_watcher`.

Torch keeps a current stream for each thread, and this device sets it, and leaves it set. So all calls must come from
the thread that opened the device, which is checked, and whoever changes the current stream there must restore it.

What torch computes outside of any launch (new memory is zeroed, weights are loaded) runs on the stream that is current
then. Every stream waits for that before its next operation, by an event that `buffer` and `adopt` record.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from gpu.device import protocol
from gpu.device.buffers import ArrayBuffer, signed
from gpu.device.cuda_api import CudaApi, torch_cuda
from gpu.device.cuda_parts import CudaEvent, CudaGraph, CudaStream, CudaTimestamp, Node
from gpu.device.cuda_pinned import PinnedMemory
from gpu.device.cuda_watcher import CudaCompletion, Watcher
from gpu.device.guard import LaunchGuard
from gpu.device.protocol import DeviceError, Observer, Regions
from gpu.device.sticky import StickyDevice

_DRAWS_MAX = 256  # torch has 32 streams and hands them out in turn, to others as well


class CudaDevice(StickyDevice):
    """Streams, events, graphs and memory on the current GPU, see `protocol.Device`.

    `observer` hears of all that is queued. `guard`: see `guard_torch`. `api`: stands in for torch.cuda in tests.
    Raises DeviceError if there is no GPU that torch can use.
    """

    warms_before_capture = True  # kernels are compiled, and libraries find their workspaces, outside of captures

    def __init__(
        self, observer: Observer | None = None, guard: LaunchGuard | None = None, *, api: CudaApi | None = None
    ) -> None:
        super().__init__(observer, guard)
        self.api = torch_cuda() if api is None else api
        self.capturing: CudaGraph | None = None
        self._thread = get_ident()
        self._streams: list[CudaStream] = []
        self._current: CudaStream | None = None  # what this device has set last
        self._fresh: Any = None  # event behind all that was queued on memory before it was handed out
        self._memory: list[Any] = []  # lives as long as the device: what is queued may still need it
        self._pinned = PinnedMemory(self.api.runtime)
        self.watcher = Watcher(self)

    # ------------------------------------------------------------------ streams, events, graphs

    def stream(self, name: str) -> CudaStream:
        """A new stream that nobody else in this process holds. Raises DeviceError if torch has no more of them."""
        self._outside_capture("stream", name)
        for _ in range(_DRAWS_MAX):
            raw = self.api.new_stream()
            if raw.cuda_stream not in self.api.taken and raw.cuda_stream != self.api.default_stream().cuda_stream:
                self.api.taken.add(raw.cuda_stream)
                self._streams.append(CudaStream(self, name, raw))
                return self._streams[-1]
        raise DeviceError(f"no stream is left for {name}: all {len(self.api.taken)} that torch has are taken")

    def event(self, name: str) -> CudaEvent:
        """A new event, usable inside and outside graphs."""
        self._outside_capture("event", name)
        return CudaEvent(self, name)

    def timestamp(self, name: str) -> CudaTimestamp:
        """A new timestamp."""
        self.check()
        return CudaTimestamp(self, name)

    @contextmanager
    def capture(self, stream: protocol.Stream) -> Iterator[CudaGraph]:
        """Operations issued to `stream` inside the block become the graph that the block yields. One at a time."""
        target = self.owned(stream)
        if self.capturing is not None:
            raise DeviceError(f"a stream is capturing already, {target.name} has to wait")
        graph = CudaGraph(target)
        # thread_local: what the watcher does meanwhile is no part of the capture, and does not break it
        begin = partial(graph.raw.capture_begin, pool=target.pool, capture_error_mode="thread_local")
        self.issue(target, "capture", begin)
        self.capturing = target.capturing = graph
        try:
            yield graph
        except BaseException:
            with suppress(Exception):  # CUDA has nothing to add to what went wrong
                self._enter(target)
                graph.raw.capture_end()
            raise
        else:
            self.issue(target, "capture", graph.raw.capture_end)
        finally:
            self.capturing = target.capturing = None

    # ------------------------------------------------------------------ memory

    def buffer(self, shape: Sequence[int], dtype: DTypeLike, name: str) -> ArrayBuffer:
        """Zeroed memory of `shape` and `dtype`; a tensor, of int64 where uint64 is asked for."""
        self._outside_capture("buffer", name)
        kind = torch.from_numpy(signed(np.empty(0, dtype))).dtype
        return self._handed_out(self.api.zeros(tuple(shape), kind), name)

    def pinned(self, array: NDArray[Any], name: str) -> ArrayBuffer:
        """Registers the memory that C-contiguous `array` lies in; the buffer is a tensor on the same memory."""
        self._outside_capture("pinned memory", name)
        self._pinned.register(array, name)
        tensor = torch.from_numpy(signed(array))
        return ArrayBuffer(name, tensor if self._guard is None else self._guard.pin(tensor))

    def adopt(self, array: Any, name: str) -> ArrayBuffer:
        """Memory that somebody else allocated, and all that was queued on it outside of launches."""
        self._outside_capture("memory", name)
        return self._handed_out(array, name)

    def _handed_out(self, array: Any, name: str) -> ArrayBuffer:
        self._memory.append(array)
        current = self.api.current_stream()
        if self._fresh is not None:
            self._fresh.wait(current)  # so that the newest event stands for the ones before
        self._fresh = self.api.new_event()
        self._fresh.record(current)
        return ArrayBuffer(name, array if self._guard is None else self._guard.watch(array))

    # ------------------------------------------------------------------ operations

    def launch(
        self, stream: protocol.Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str
    ) -> None:
        """Queue an operation: `fn` is called at once and queues it. What it raises sticks, and is raised here too."""
        target = self.owned(stream)
        if target.capturing is not None:
            target.capturing.nodes.append(Node(name, reads=reads, writes=writes))
        elif self.observer is not None:
            self.observer.launch(target, name, reads, writes)
        self.issue(target, name, fn)

    def call(
        self, stream: protocol.Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str
    ) -> CudaCompletion:
        """Queue a host function: the watcher runs it once `stream` has come so far. The stream itself goes on."""
        target = self.owned(stream)
        if target.capturing is not None:
            raise DeviceError(f"host function {name} cannot be part of a graph")
        completion = CudaCompletion(target, name, fn, self.watcher.event())
        if self.observer is not None:
            self.observer.call(target, completion, reads, writes)
        self.issue(target, name, completion.event.record, target.raw)
        target.last_call = completion
        self.watcher.put(completion)
        return completion

    def issue(self, stream: CudaStream, name: str, fn: Callable[..., None], *args: Any) -> None:
        """Call what queues something, with `stream` current. Whatever it raises becomes a DeviceError that sticks."""
        try:
            if stream is not self._current or stream.fresh is not self._fresh:
                self._enter(stream)
            fn(*args)
        except Exception as error:
            raise self.fail(stream.name, name, error) from error

    def _enter(self, stream: CudaStream) -> None:
        if stream is not self._current:
            self.api.set_stream(stream.raw)
            self._current = stream
        if stream.fresh is not self._fresh:
            self._fresh.wait(stream.raw)
            stream.fresh = self._fresh

    # ------------------------------------------------------------------ waiting and failing

    def owned(self, stream: protocol.Stream) -> CudaStream:
        """`stream` as one of this device's own, on the way of every call. Raises DeviceError if the device failed."""
        if self.failed or self._closed:
            self.check()
        if get_ident() != self._thread:
            raise DeviceError("the device is called from a thread other than the one that opened it")
        assert isinstance(stream, CudaStream) and stream.device is self, stream
        return stream

    def block(self, name: str, fn: Callable[[], Any]) -> Any:
        """Call what waits for the GPU, or asks it. Whatever it raises becomes a DeviceError that sticks."""
        try:
            return fn()
        except Exception as error:
            raise self.fail(name, "waiting", error) from error

    def synchronize(self) -> None:
        """Block the caller until every stream has run out of work. Raises DeviceError."""
        self.waits("Device.synchronize")
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Run what is queued, then give back streams and pinned memory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            with suppress(DeviceError):  # there is nothing left that it could stop
                self.block(stream.name, stream.raw.synchronize)
        self.watcher.end()
        with suppress(Exception) if self.failed else nullcontext():  # a device that failed may refuse everything
            self.api.set_stream(self.api.default_stream())
            self._pinned.release()
        self.api.taken.difference_update(stream.raw.cuda_stream for stream in self._streams)

    def _outside_capture(self, what: str, name: str) -> None:
        self.check()
        if self.capturing is not None:
            raise DeviceError(f"{what} {name} cannot be made during a capture")
