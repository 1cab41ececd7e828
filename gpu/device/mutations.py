"""Mutations: a device that loses, or misplaces, one edge of the program that runs on it.

Owns the dropping of records and waits, and the moving of records ahead of the operation that they should come behind,
by the family of the event (its name without the number), on any device of the protocol. An edge that nobody misses was
either redundant or unproven, so every edge of the step program is mutated in turn by whoever wants to know. It changes
nothing else, and what it mutates is what the program asks for: inside a capture that is what the graph will hold.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from numpy.typing import DTypeLike, NDArray

from gpu.device.protocol import Buffer, Completion, Device, Event, Graph, Region, Regions, Stream, Timestamp

RECORD, WAIT = "record", "wait"
How = Literal["drop", "early"]


class Edge(NamedTuple):
    """One half of an order between streams: a record or a wait of an event of `family` on the stream of that name."""

    kind: str  # RECORD or WAIT
    family: str
    stream: str

    def __str__(self) -> str:
        return f"{self.stream} {'records' if self.kind == RECORD else 'waits for'} {self.family}"


class MutatedDevice:
    """Everything of `device`, but `edge` never happens ("drop"), or happens one operation too early ("early").

    Only a record whose stream was given an operation right before it can be early. `edges`: what was issued so far,
    and how often; `mutated`: how many of them were not what the program asked for. While edges are early an operation
    is held back until the next call, so such a program waits with the device's `synchronize`, not with a stream's.
    """

    def __init__(self, device: Device, edge: Edge | None, how: How = "drop") -> None:
        self._device = device
        self._edge = edge
        self._how = how
        self._held: tuple[Stream, Callable[[], None]] | None = None
        self.warms_before_capture = device.warms_before_capture
        self.edges: dict[Edge, int] = {}
        self.mutated = 0

    # ------------------------------------------------------------------ what mutates

    def issue(self, kind: str, event: Event, stream: Stream, act: Callable[[Stream], None]) -> None:
        """Do what the program asks for, unless it is to be mutated."""
        edge = Edge(kind, event.name.rstrip("0123456789"), stream.name)
        self.edges[edge] = self.edges.get(edge, 0) + 1
        if edge != self._edge:
            self.release()
            act(stream)
        elif self._how == "drop":
            self.mutated += 1
        elif kind == RECORD and self._held is not None and self._held[0] is stream:
            self.mutated += 1
            act(stream)
            self.release()
        else:
            self.release()
            act(stream)

    def operate(self, stream: Stream, act: Callable[[], None]) -> None:
        """Queue an operation, or hold it back if a record may have to go ahead of it."""
        self.release()
        if self._how == "early" and self._edge is not None:
            self._held = stream, act
        else:
            act()

    def release(self) -> None:
        """Queue what is held back, if anything is."""
        if self._held is not None:
            (_, act), self._held = self._held, None
            act()

    def event(self, name: str) -> "_MutatedEvent":
        """A new event that may lose records or waits."""
        return _MutatedEvent(self, self._device.event(name))

    # ------------------------------------------------------------------ what does not

    def launch(self, stream: Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str) -> None:
        """See `protocol.Device`, as all that follows."""
        self.operate(stream, lambda: self._device.launch(stream, fn, reads=reads, writes=writes, name=name))

    def call(self, stream: Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str) -> Completion:
        self.release()
        return self._device.call(stream, fn, reads=reads, writes=writes, name=name)

    def host_access(self, *, reads: Regions, writes: Regions, name: str) -> None:
        self.release()
        self._device.host_access(reads=reads, writes=writes, name=name)

    @contextmanager
    def capture(self, stream: Stream) -> Iterator["_MutatedGraph"]:
        self.release()
        with self._device.capture(stream) as graph:
            yield _MutatedGraph(self, graph)
            self.release()

    def timestamp(self, name: str) -> "_MutatedTimestamp":
        return _MutatedTimestamp(self, self._device.timestamp(name))

    def stream(self, name: str) -> Stream:
        return self._device.stream(name)

    def buffer(self, shape: Sequence[int], dtype: DTypeLike, name: str) -> Buffer:
        return self._device.buffer(shape, dtype, name)

    def pinned(self, array: NDArray[Any], name: str) -> Buffer:
        return self._device.pinned(array, name)

    def adopt(self, array: Any, name: str) -> Buffer:
        return self._device.adopt(array, name)

    def check(self) -> None:
        self._device.check()

    def synchronize(self) -> None:
        self.release()
        self._device.synchronize()

    def close(self) -> None:
        self._device.close()


class _MutatedEvent:
    """An event of the device below, see `protocol.Event`."""

    def __init__(self, device: MutatedDevice, event: Event) -> None:
        self._device = device
        self._event = event
        self.name = event.name

    def record(self, stream: Stream) -> None:
        self._device.issue(RECORD, self._event, stream, self._event.record)

    def wait(self, stream: Stream) -> None:
        self._device.issue(WAIT, self._event, stream, self._event.wait)

    def query(self) -> bool:
        self._device.release()
        return self._event.query()

    def synchronize(self) -> None:
        self._device.release()
        self._event.synchronize()


class _MutatedTimestamp:
    """A timestamp of the device below: its record is an operation like others, see `protocol.Timestamp`."""

    def __init__(self, device: MutatedDevice, timestamp: Timestamp) -> None:
        self._device = device
        self._timestamp = timestamp
        self.name = timestamp.name

    def record(self, stream: Stream) -> None:
        self._device.operate(stream, lambda: self._timestamp.record(stream))

    def region(self) -> Region:
        return self._timestamp.region()

    def ns(self) -> int:
        return self._timestamp.ns()


class _MutatedGraph:
    """A graph of the device below, see `protocol.Graph`."""

    def __init__(self, device: MutatedDevice, graph: Graph) -> None:
        self._device = device
        self._graph = graph

    def launch(self, stream: Stream) -> None:
        self._device.release()
        self._graph.launch(stream)
