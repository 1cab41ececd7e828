"""The device protocol: what the step program may ask of a device, on CUDA and on a CPU alike.

Owns the vocabulary (streams, events, graphs, buffers, regions) and its ordering rules, which are CUDA's:

- A stream runs its operations in order. Two streams are ordered by events alone.
- `Event.wait` refers to the latest `record` *issued* before it. An event that was never recorded does not block.
- An operation issued to a capturing stream is kept in the graph and does not run. An event recorded during capture is
  recorded at every replay: launching a graph counts as a record of each event inside it, and a wait inside it refers
  to the latest record issued before the launch.
- A host function (`Device.call`) runs behind everything queued before it on its stream, and after every call queued
  before it. What is queued behind it is *not* held back by it. The launching thread learns that it has run from its
  `Completion` and in no other way.
- An error inside an operation is sticky: work queued behind it is skipped, and every later call raises `DeviceError`.

No call but `synchronize` and `close` may ever wait for the device. Every launch declares the byte regions that it reads
and writes, so that an observer can prove the order of conflicting accesses without running them. What the launching
thread itself does with pinned memory is declared with `host_access`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from numpy.typing import DTypeLike, NDArray


class DeviceError(RuntimeError):
    """The device failed, or was used against its rules. Sticky once a launched operation raised it."""


class Buffer(Protocol):
    """Memory that launches may declare: the device's own, pinned host memory, or memory that a model owns."""

    @property
    def name(self) -> str:
        """For messages and traces."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    @property
    def array(self) -> Any:
        """What kernels take; only code that runs in a launched operation may touch it once streams are running."""

    def region(self) -> "Region":
        """All of it."""

    def rows(self, lo: int, hi: int) -> "Region":
        """Rows [lo, hi) of the first axis."""


class Region(NamedTuple):
    """Bytes [lo, hi) of a buffer."""

    buffer: Buffer
    lo: int
    hi: int

    def overlaps(self, other: "Region") -> bool:
        """Whether the two share a byte."""
        return self.buffer is other.buffer and self.lo < other.hi and other.lo < self.hi


Regions = Sequence[Region]


class Stream(Protocol):
    """A queue of operations, run in order."""

    @property
    def name(self) -> str:
        """For messages and traces."""

    def synchronize(self) -> None:
        """Block the caller until everything queued so far has run. Raises DeviceError."""


class Event(Protocol):
    """A marker that a stream sets when it reaches it. May be recorded any number of times."""

    @property
    def name(self) -> str:
        """For messages and traces."""

    def record(self, stream: Stream) -> None:
        """Queue the marker on `stream`. From now on waits refer to this record."""

    def wait(self, stream: Stream) -> None:
        """Hold back what is queued on `stream` from now on until the latest record issued so far was reached."""

    def query(self) -> bool:
        """Whether the latest record was reached; True if there is none."""

    def synchronize(self) -> None:
        """Block the caller until the latest record was reached. Raises DeviceError."""


class Timestamp(Protocol):
    """A moment on a stream, in the host's clock. Never recorded inside a graph."""

    @property
    def name(self) -> str:
        """For messages and traces."""

    def record(self, stream: Stream) -> None:
        """Queue the taking of the time on `stream`."""

    def region(self) -> Region:
        """What `record` writes, for those who declare that they read it."""

    def ns(self) -> int:
        """CLOCK_MONOTONIC ns of the latest record. Only in a host function that is queued behind that record."""


class Completion(Protocol):
    """What is known of a host function."""

    @property
    def name(self) -> str:
        """For messages and traces."""

    def query(self) -> bool:
        """Whether it has run. From True on, what the caller does counts as done behind it."""


class Graph(Protocol):
    """A recorded sequence of operations, launched by one call."""

    def launch(self, stream: Stream) -> None:
        """Queue one replay on `stream`."""


class Observer(Protocol):
    """Hears of every operation when it is queued, in the order of the calls, before it can have run.

    The operations of a graph are reported at each launch of it, between `graph_launch` and `graph_end`, by the same
    calls as if they had been issued one by one. What a capture records is not reported.
    """

    def launch(self, stream: Stream, name: str, reads: Regions, writes: Regions) -> None:
        """An operation with the regions it touches."""

    def call(self, stream: Stream, completion: Completion, reads: Regions, writes: Regions) -> None:
        """A host function, named like its completion, with the regions it touches."""

    def record(self, stream: Stream, event: Event) -> None:
        """A record of `event`."""

    def wait(self, stream: Stream, event: Event) -> None:
        """A wait for the latest record of `event` reported so far (none: it does not block)."""

    def graph_launch(self, stream: Stream, graph: Graph) -> None:
        """What follows comes from one replay of `graph`."""

    def graph_end(self, stream: Stream, graph: Graph) -> None:
        """The replay has been reported in full."""

    def host_wait(self, event: Event | None, stream: Stream | None) -> None:
        """The calling thread knows that the latest record of `event`, or all of `stream`, was reached."""

    def host_saw(self, completion: Completion) -> None:
        """The calling thread knows that this host function has run."""

    def host_access(self, name: str, reads: Regions, writes: Regions) -> None:
        """The calling thread touches pinned memory, or knows that another process did so before this moment."""


class Device(Protocol):
    """Streams, events, graphs and memory. Calls come from one thread; operations run elsewhere."""

    warms_before_capture: bool  # whether every shape must have run once before it is captured

    def stream(self, name: str) -> Stream:
        """A new stream of its own (never one that another caller also holds)."""

    def event(self, name: str) -> Event:
        """A new event, usable inside and outside graphs."""

    def timestamp(self, name: str) -> Timestamp:
        """A new timestamp."""

    def buffer(self, shape: Sequence[int], dtype: DTypeLike, name: str) -> Buffer:
        """Zeroed device memory of `shape` and `dtype`."""

    def pinned(self, array: NDArray[Any], name: str) -> Buffer:
        """Registers C-contiguous host memory (a view of a shared segment) so that copies may reach it."""

    def adopt(self, array: Any, name: str) -> Buffer:
        """Device memory that somebody else allocated (a model's KV pool), so that launches may declare it."""

    def launch(self, stream: Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str) -> None:
        """Queue an operation on device memory. `reads` and `writes` name every byte of any buffer that it touches.

        On a CPU `fn` is the operation. On CUDA it is called at once, with `stream` current, and queues it.
        """

    def call(self, stream: Stream, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str) -> Completion:
        """Queue a host function: it may touch pinned memory and timestamps, and must not call the device."""

    def host_access(self, *, reads: Regions, writes: Regions, name: str) -> None:
        """Declare what the calling thread does with pinned memory, or knows that another process did."""

    def capture(self, stream: Stream) -> AbstractContextManager[Graph]:
        """Operations issued to `stream` inside the block become the graph that the block yields."""

    def check(self) -> None:
        """Raise the sticky DeviceError, if there is one."""

    def synchronize(self) -> None:
        """Block the caller until every stream has run out of work. Raises DeviceError."""

    def close(self) -> None:
        """Run what is queued, then end every stream. No call but `close` is allowed afterwards."""
