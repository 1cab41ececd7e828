"""The parts of the CUDA device that a program holds: streams, events, timestamps and graphs.

Owns what each of them means in terms of torch.cuda. An event that a graph records or waits for is `external` to torch:
the graph gets a node for it, instead of an edge between its own nodes. Torch makes it so only while the *current*
stream is the one that captures, so everything here goes through `CudaDevice.issue`. Never waits for the device but in
`synchronize`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpu.device import protocol
from gpu.device.buffers import ArrayBuffer
from gpu.device.cuda_watcher import CudaCompletion
from gpu.device.protocol import DeviceError, Observer, Region, Regions

if TYPE_CHECKING:
    from gpu.device.cuda import CudaDevice


class CudaStream:
    """One of torch's streams, held by nobody else, see `protocol.Stream`."""

    def __init__(self, device: CudaDevice, name: str, raw: Any) -> None:
        self.device = device
        self.name = name
        self.raw = raw
        self.pool = device.api.new_pool()  # graphs of one stream never run at once, so they may share memory
        self.capturing: CudaGraph | None = None
        self.fresh: Any = None  # the latest event of `CudaDevice` on new memory that this stream has waited for
        self.last_call: CudaCompletion | None = None

    def synchronize(self) -> None:
        """Block the caller until everything queued so far has run. Raises DeviceError."""
        device = self.device
        device.waits("Stream.synchronize")
        if self.capturing is not None:
            raise DeviceError(f"stream {self.name} is capturing")
        device.block(self.name, self.raw.synchronize)
        if self.last_call is not None and not self.last_call.done:
            device.watcher.drain()
        device.check()
        if device.observer is not None:
            device.observer.host_wait(None, self)


class CudaEvent:
    """An event for use inside and outside graphs, see `protocol.Event`."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.recorded = False
        self.raw = device.api.new_event(blocking=True, external=True)
        # Torch makes the event at its first record, and drops a wait for one that is not made yet, even from a graph.
        self.raw.record(device.api.default_stream())

    def record(self, stream: protocol.Stream) -> None:
        """Queue the marker on `stream`. From now on waits refer to this record."""
        device = self.device
        target = device.owned(stream)
        if target.capturing is not None:
            target.capturing.nodes.append(Node(self.name, record=self))
        else:
            if device.observer is not None:
                device.observer.record(target, self)
            self.recorded = True
        device.issue(target, self.name, self.raw.record, target.raw)

    def wait(self, stream: protocol.Stream) -> None:
        """Hold back what is queued on `stream` from now on until the latest record issued so far was reached."""
        device = self.device
        target = device.owned(stream)
        if target.capturing is not None:
            target.capturing.nodes.append(Node(self.name, wait=self))
        else:
            if device.observer is not None:
                device.observer.wait(target, self)
            if not self.recorded:
                return
        device.issue(target, self.name, self.raw.wait, target.raw)

    def query(self) -> bool:
        """Whether the latest record was reached; True if there is none."""
        device = self.device
        device.check()
        if device.capturing is not None:
            raise DeviceError(f"asking for event {self.name} would break the capture")
        reached = not self.recorded or bool(device.block(self.name, self.raw.query))
        if reached and device.observer is not None:
            device.observer.host_wait(self, None)
        return reached

    def synchronize(self) -> None:
        """Block the caller until the latest record was reached. Raises DeviceError."""
        device = self.device
        device.waits("Event.synchronize")
        if device.capturing is not None:
            raise DeviceError(f"waiting for event {self.name} would break the capture")
        if self.recorded:
            device.block(self.name, self.raw.synchronize)
        device.check()
        if device.observer is not None:
            device.observer.host_wait(self, None)


class CudaTimestamp:
    """A moment on a stream, see `protocol.Timestamp`."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self.name = name
        self._device = device
        self._raw = device.api.new_event(enable_timing=True)
        self._region = ArrayBuffer(name, np.zeros(1, np.int64)).region()  # stands for what the event holds

    def record(self, stream: protocol.Stream) -> None:
        """Queue the taking of the time on `stream`."""
        device = self._device
        target = device.owned(stream)
        if target.capturing is not None:
            raise DeviceError(f"timestamp {self.name} cannot be recorded inside a graph")
        if device.observer is not None:
            device.observer.launch(target, self.name, (), (self._region,))
        device.issue(target, self.name, self._raw.record, target.raw)

    def region(self) -> Region:
        """What `record` writes."""
        return self._region

    def ns(self) -> int:
        """CLOCK_MONOTONIC ns of the latest record. Only in a host function that is queued behind that record."""
        return self._device.watcher.clock.ns(self._raw)


class Node(NamedTuple):
    """One item of a graph, as the observer hears of it: a record, a wait, or else a launch with its regions."""

    name: str
    record: CudaEvent | None = None
    wait: CudaEvent | None = None
    reads: Regions = ()
    writes: Regions = ()


class CudaGraph:
    """What a stream recorded, see `protocol.Graph`."""

    def __init__(self, stream: CudaStream) -> None:
        self.raw = stream.device.api.new_graph()
        self.nodes: list[Node] = []
        self._stream = stream

    def launch(self, stream: protocol.Stream) -> None:
        """Queue one replay on `stream`, the one that recorded it: by one call, whatever the number of operations."""
        device = self._stream.device
        target = device.owned(stream)
        if device.capturing is not None:
            raise DeviceError("a graph cannot be launched during a capture")
        if target is not self._stream:
            raise DeviceError(f"the graph was captured on stream {self._stream.name}, whose memory it shares")
        if device.observer is not None:
            self._report(target, device.observer)
        device.issue(target, "graph", self.raw.replay)
        for node in self.nodes:
            if node.record is not None:
                node.record.recorded = True

    def _report(self, stream: CudaStream, observer: Observer) -> None:
        observer.graph_launch(stream, self)
        for node in self.nodes:
            if node.record is not None:
                observer.record(stream, node.record)
            elif node.wait is not None:
                observer.wait(stream, node.wait)
            else:
                observer.launch(stream, node.name, node.reads, node.writes)
        observer.graph_end(stream, self)
