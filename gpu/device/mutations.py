"""Mutations: a device that loses one edge of the program that runs on it.

Owns the dropping of records and waits, by the family of the event (its name without the number), on any device of the
protocol. An edge that nobody misses was either redundant or unproven, so every edge of the step program is dropped in
turn by whoever wants to know. It changes nothing else.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from gpu.device.protocol import Device, Event, Stream

RECORD, WAIT = "record", "wait"


class Edge(NamedTuple):
    """One half of an order between streams: a record or a wait of an event of `family` on the stream of that name."""

    kind: str  # RECORD or WAIT
    family: str
    stream: str

    def __str__(self) -> str:
        return f"{self.stream} {'records' if self.kind == RECORD else 'waits for'} {self.family}"


class MutatedDevice:
    """Everything of `device`, but `dropped` never happens. `edges`: what was issued so far, and how often."""

    def __init__(self, device: Device, dropped: Edge | None) -> None:
        self._device = device
        self.dropped = dropped
        self.edges: dict[Edge, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def event(self, name: str) -> "_MutatedEvent":
        """A new event that may lose records or waits."""
        return _MutatedEvent(self, self._device.event(name))

    def issue(self, kind: str, event: Event, stream: Stream, act: Callable[[Stream], None]) -> None:
        """Do what the program asks for, unless it is to be dropped."""
        edge = Edge(kind, event.name.rstrip("0123456789"), stream.name)
        self.edges[edge] = self.edges.get(edge, 0) + 1
        if edge != self.dropped:
            act(stream)


class _MutatedEvent:
    """An event of the device below, see `protocol.Event`."""

    def __init__(self, device: MutatedDevice, event: Event) -> None:
        self._device = device
        self._event = event
        self.name = event.name

    def record(self, stream: Stream) -> None:
        """Queue the marker, unless it is to be dropped."""
        self._device.issue(RECORD, self._event, stream, self._event.record)

    def wait(self, stream: Stream) -> None:
        """Hold the stream back, unless the wait is to be dropped."""
        self._device.issue(WAIT, self._event, stream, self._event.wait)

    def query(self) -> bool:
        """Whether the latest record was reached; True if there is none."""
        return self._event.query()

    def synchronize(self) -> None:
        """Block the caller until the latest record was reached."""
        self._event.synchronize()
