"""The parts of the adversary that a program holds: streams, events, timestamps, completions and graphs.

Owns what each of them means in terms of the queues: an event is the place of its latest record, a graph is a list of
items that a launch queues one by one. Runs nothing itself but what a caller waits or asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpu.device import protocol
from gpu.device.adversary_queues import Marker, Operation
from gpu.device.policies import CALLS
from gpu.device.protocol import DeviceError, Region

if TYPE_CHECKING:
    from gpu.device.adversary import AdversaryDevice

STAMP_NS = 1000  # one queued item in the adversary's time


class Node(NamedTuple):
    """One item of a graph: exactly one of operation, record, wait is set."""

    operation: Operation | None = None
    record: AdversaryEvent | None = None
    wait: AdversaryEvent | None = None


class AdversaryStream:
    """See `protocol.Stream`."""

    def __init__(self, device: AdversaryDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.track = device.queues.track(name)
        self.capturing: AdversaryGraph | None = None

    def synchronize(self) -> None:
        """Block the caller until everything queued so far has run. Raises DeviceError."""
        device, queues = self.device, self.device.queues
        device.waits("Stream.synchronize")
        if self.capturing is not None:
            raise DeviceError(f"stream {self.name} is capturing")
        queues.run_until(self.track.end)
        calls = [number for number, call in enumerate(queues.calls) if call.place.track is self.track]
        queues.run_calls(calls[-1] + 1 if calls else 0)
        device.check()
        if device.observer is not None:
            device.observer.host_wait(None, self)


class AdversaryEvent:
    """The place of its latest record, see `protocol.Event`."""

    def __init__(self, device: AdversaryDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.latest: Marker | None = None

    def record(self, stream: protocol.Stream) -> None:
        """Queue the marker on `stream`. From now on waits refer to this record."""
        self.device.issue(stream, Node(record=self))

    def wait(self, stream: protocol.Stream) -> None:
        """Hold back what is queued on `stream` from now on until the latest record issued so far was reached."""
        self.device.issue(stream, Node(wait=self))

    def query(self) -> bool:
        """Whether the latest record was reached; True if there is none. Who asks again and again gets there."""
        device = self.device
        device.check()
        device.queues.go_on()
        reached = self.latest is None or self.latest.reached
        if reached and device.observer is not None:
            device.observer.host_wait(self, None)
        if self.latest is not None and not reached:
            device.queues.run(device.queues.needed(self.latest))
        return reached

    def synchronize(self) -> None:
        """Block the caller until the latest record was reached. Raises DeviceError."""
        device = self.device
        device.waits("Event.synchronize")
        if self.latest is not None:
            device.queues.run_until(self.latest)
        device.check()
        if device.observer is not None:
            device.observer.host_wait(self, None)


class AdversaryTimestamp:
    """A moment in the time of its stream, see `protocol.Timestamp`. Moments of two streams cannot be compared."""

    def __init__(self, device: AdversaryDevice, name: str) -> None:
        self.device = device
        self.name = name
        self._buffer = device.buffer((1,), np.int64, name)

    def record(self, stream: protocol.Stream) -> None:
        """Queue the taking of the time on `stream`."""
        target = self.device.owned(stream)
        if target.capturing is not None:
            raise DeviceError(f"timestamp {self.name} cannot be recorded inside a graph")
        at = (target.track.end.at + 1) * STAMP_NS
        buffer = self._buffer

        def take() -> None:
            buffer.array[0] = at

        self.device.launch(target, take, reads=(), writes=(self.region(),), name=self.name)

    def region(self) -> Region:
        """What `record` writes."""
        return self._buffer.region()

    def ns(self) -> int:
        """The time of the latest record. Only in a host function that is queued behind that record."""
        return int(self._buffer.array[0])


class AdversaryCompletion:
    """One host function, see `protocol.Completion`."""

    def __init__(self, device: AdversaryDevice, name: str, number: int) -> None:
        self.device = device
        self.name = name
        self._number = number  # among all of them

    def query(self) -> bool:
        """Whether it has run. From True on, what the caller does counts as done behind it. Asking again gets there."""
        device, queues = self.device, self.device.queues
        queues.go_on()
        done = queues.calls_run > self._number
        if done and device.observer is not None:
            device.observer.host_saw(self)
        if not done:
            place = queues.calls[queues.calls_run].place
            queues.run(CALLS if place.reached else queues.needed(place))
        return done


class AdversaryGraph:
    """A recorded sequence of operations, see `protocol.Graph`."""

    def __init__(self, device: AdversaryDevice) -> None:
        self.device = device
        self.nodes: list[Node] = []

    def launch(self, stream: protocol.Stream) -> None:
        """Queue one replay on `stream`. Other streams may run between any two of its operations."""
        device = self.device
        target = device.owned(stream)
        if target.capturing is not None:
            raise DeviceError("a graph cannot be launched into a capture")
        if device.observer is not None:
            device.observer.graph_launch(target, self)
        for node in self.nodes:
            device.append(target, node)
        if device.observer is not None:
            device.observer.graph_end(target, self)
        device.queues.go_on()
