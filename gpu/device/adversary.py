"""The adversary: the device protocol in one thread, in any order that CUDA's rules permit.

Owns the memory that it hands out. Between any two calls of the host, and while the host waits, a policy decides which
stream goes on. Whatever it does a GPU might do; whatever a GPU might do there is a policy for. What holds for every
policy holds by the order of the program and not by luck. Nothing depends on the time: a timestamp counts what its
stream was given.

Never runs an operation while another one runs, and never lets an operation call the device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpu.device import protocol
from gpu.device.adversary_parts import (
    AdversaryCompletion,
    AdversaryEvent,
    AdversaryGraph,
    AdversaryStream,
    AdversaryTimestamp,
    Node,
)
from gpu.device.adversary_queues import HostCall, Operation, Queues
from gpu.device.buffers import ArrayBuffer, signed
from gpu.device.guard import LaunchGuard
from gpu.device.policies import Lazy, Policy
from gpu.device.protocol import DeviceError, Observer, Regions

Memory = Literal["numpy", "torch"]


class AdversaryDevice:
    """Streams, events, graphs and memory, see `protocol.Device`. `observer` hears of all that is queued.

    memory: whether buffers are numpy arrays or torch tensors on the CPU (u64 as i64, as on CUDA). guard: see `guard`.
    """

    warms_before_capture = False

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        observer: Observer | None = None,
        memory: Memory = "numpy",
        guard: LaunchGuard | None = None,
    ) -> None:
        self.queues = Queues(policy or Lazy(), nullcontext if guard is None else guard.lifted)
        self.observer = observer
        self.buffers: list[ArrayBuffer] = []
        self._streams: list[AdversaryStream] = []
        self._memory = memory
        self._guard = guard
        self._closed = False

    def stream(self, name: str) -> AdversaryStream:
        """A new stream. No two have the same name."""
        self.check()
        self._streams.append(AdversaryStream(self, name))
        return self._streams[-1]

    def event(self, name: str) -> AdversaryEvent:
        """A new event, usable inside and outside graphs."""
        return AdversaryEvent(self, name)

    def timestamp(self, name: str) -> AdversaryTimestamp:
        """A new timestamp."""
        return AdversaryTimestamp(self, name)

    # ------------------------------------------------------------------ memory

    def buffer(self, shape: Sequence[int], dtype: DTypeLike, name: str) -> ArrayBuffer:
        """Zeroed memory of `shape` and `dtype`."""
        return self._watched(name, self._on_device(np.zeros(tuple(shape), dtype)))

    def pinned(self, array: NDArray[Any], name: str) -> ArrayBuffer:
        """Registers C-contiguous host memory."""
        array = self._on_device(array)
        return self._kept(ArrayBuffer(name, array if self._guard is None else self._guard.pin(array)))

    def adopt(self, array: Any, name: str) -> ArrayBuffer:
        """Memory that somebody else allocated, as it is."""
        return self._watched(name, array)

    def _watched(self, name: str, array: Any) -> ArrayBuffer:
        return self._kept(ArrayBuffer(name, array if self._guard is None else self._guard.watch(array)))

    def _kept(self, buffer: ArrayBuffer) -> ArrayBuffer:
        self.buffers.append(buffer)
        return buffer

    def _on_device(self, array: NDArray[Any]) -> Any:
        """The same memory in the form that this device hands out."""
        if self._memory == "numpy":
            return array
        import torch

        return torch.from_numpy(signed(array))

    # ------------------------------------------------------------------ operations

    def launch(
        self, stream: protocol.Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str
    ) -> None:
        """Queue an operation. `reads` and `writes` name every byte of any buffer that it touches."""
        self.issue(stream, Node(operation=Operation(name, fn, reads, writes)))

    def call(
        self, stream: protocol.Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str
    ) -> AdversaryCompletion:
        """Queue a host function: it runs at any time once its stream has come so far, and holds nothing back."""
        target = self.owned(stream)
        if target.capturing is not None:
            raise DeviceError(f"host function {name} cannot be part of a graph")
        completion = AdversaryCompletion(self, name, len(self.queues.calls))
        if self.observer is not None:
            self.observer.call(target, completion, reads, writes)
        self.queues.calls.append(HostCall(Operation(name, fn, reads, writes), target.track.end))
        self.queues.go_on()
        return completion

    def host_access(self, *, reads: Regions, writes: Regions, name: str) -> None:
        """Declare what the calling thread does with pinned memory, or knows that another process did."""
        if self.observer is not None:
            self.observer.host_access(name, reads, writes)
        self.queues.go_on()

    @contextmanager
    def capture(self, stream: protocol.Stream) -> Iterator[AdversaryGraph]:
        """Operations issued to `stream` inside the block become the graph that the block yields."""
        target = self.owned(stream)
        if target.capturing is not None:
            raise DeviceError(f"stream {target.name} is capturing already")
        target.capturing = graph = AdversaryGraph(self)
        try:
            yield graph
        finally:
            target.capturing = None

    def issue(self, stream: protocol.Stream, node: Node) -> None:
        """Queue one item, or keep it in the graph that the stream records, and let the device go on."""
        target = self.owned(stream)
        if target.capturing is not None:
            target.capturing.nodes.append(node)
            return
        self.append(target, node)
        self.queues.go_on()

    def append(self, stream: AdversaryStream, node: Node) -> None:
        """Report one item and queue it. What a record means is fixed here: the place at which its stream ends now."""
        observer, items = self.observer, stream.track.items
        if node.operation is not None:
            if observer is not None:
                observer.launch(stream, node.operation.name, node.operation.reads, node.operation.writes)
            items.append(node.operation)
        elif node.record is not None:
            if observer is not None:
                observer.record(stream, node.record)
            node.record.latest = stream.track.end
        elif node.wait is not None:
            if observer is not None:
                observer.wait(stream, node.wait)
            if node.wait.latest is not None:
                items.append(node.wait.latest)

    # ------------------------------------------------------------------ waiting and failing

    def owned(self, stream: protocol.Stream) -> AdversaryStream:
        """`stream` as one of this device's own. Raises DeviceError if the device failed, or an operation calls it."""
        self.check()
        if self.queues.is_running:
            raise DeviceError("an operation calls the device")
        assert isinstance(stream, AdversaryStream) and stream.device is self, stream
        return stream

    def waits(self, what: str) -> None:
        """On the way of every call that waits."""
        self.check()
        if self._guard is not None:
            self._guard.refuse(what)

    def check(self) -> None:
        """Raise the sticky DeviceError, if there is one."""
        if self._closed:
            raise DeviceError("the device is closed")
        self.queues.check()

    def synchronize(self) -> None:
        """Block the caller until everything has run. Raises DeviceError."""
        self.waits("Device.synchronize")
        self.queues.drain()
        self.check()
        if self.observer is not None:
            for stream in self._streams:
                self.observer.host_wait(None, stream)

    def close(self) -> None:
        """Run what is queued. May be called twice."""
        if not self._closed:
            self._closed = True
            self.queues.drain()
