"""The fence: keeps the schedule stream's writes behind the running step's reads of the same tables.

Owns a small ring of events. Step N records its own behind its last read of a shared table, which is its gather; the
schedule stream waits for that of step N-1 before it writes anything for step N. Without it no check fails and no
process dies: a step reads a row that was written for a later step, and the answers get worse.

A ring, because re-arming one event while a stream still waits on it would tie that stream to a later step. Never
waits on the CPU.
"""

from gpu.device.protocol import Device, Event, Stream


class Fence:
    """`depth` events, used in turn; more than there are steps in flight."""

    def __init__(self, device: Device, depth: int) -> None:
        assert depth >= 2, "a step would wait for its own fence"
        self._events: list[Event] = [device.event(f"fence{i}") for i in range(depth)]

    def record(self, stream: Stream, lane: int) -> None:
        """The step in `lane` has read all that it reads of the shared tables."""
        self._events[lane].record(stream)  # SYNC tables-read

    def hold(self, stream: Stream, step: int) -> None:
        """What is queued on `stream` from now on, for `step`, runs behind the reads of the step before it."""
        self._events[(step - 1) % len(self._events)].wait(stream)  # SYNC tables-read
