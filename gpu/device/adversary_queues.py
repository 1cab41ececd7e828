"""The queues of the adversary: what each stream has been given, how far it has come, and what may run next.

Owns the progress of all streams and host functions, and the first error. Its whole state is a few numbers, so a
run can be taken back, see `enumeration`. It knows nothing of events, graphs and buffers; what orders two streams is
a marker: a place in one of them that another one waits for.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from gpu.device.policies import CALLS, Policy
from gpu.device.protocol import DeviceError, Regions


class Marker(NamedTuple):
    """A place in a track: reached once its first `at` items are behind it."""

    track: "Track"
    at: int

    @property
    def reached(self) -> bool:
        """Whether everything in front of it has run."""
        return self.track.position >= self.at


class Operation(NamedTuple):
    """One thing that runs."""

    name: str
    run: Callable[[], None]
    reads: Regions = ()
    writes: Regions = ()


class HostCall(NamedTuple):
    """A host function, and the place that it runs behind."""

    operation: Operation
    place: Marker


class Track:
    """What one stream was given: operations, and markers that it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: list[Operation | Marker] = []
        self.position = 0

    @property
    def end(self) -> Marker:
        """Behind everything that has been queued."""
        return Marker(self, len(self.items))

    def pass_markers(self) -> bool:
        """Go past the markers in front that are reached. Returns whether there was one."""
        before = self.position
        while self.position < len(self.items):
            head = self.items[self.position]
            if isinstance(head, Operation) or not head.reached:
                break
            self.position += 1
        return self.position > before


class Progress(NamedTuple):
    """How far everything has come: all there is to the state of the queues once everything is issued."""

    positions: tuple[int, ...]
    calls: int
    error: tuple[str, BaseException] | None


class Queues:
    """All tracks of a device, and the host functions, which run one by one in the order in which they were queued."""

    def __init__(self, policy: Policy, around: Callable[[], AbstractContextManager[None]]) -> None:
        """around: entered while an operation runs."""
        self.policy = policy
        self.tracks: list[Track] = []
        self.calls: list[HostCall] = []
        self.calls_run = 0
        self.error: tuple[str, BaseException] | None = None
        self.is_running = False
        self._around = around

    def track(self, name: str) -> Track:
        """A new track. Names are its identity: policies speak of tracks by name."""
        assert name != CALLS and all(track.name != name for track in self.tracks), name
        self.tracks.append(Track(name))
        return self.tracks[-1]

    # ------------------------------------------------------------------ progress

    def enabled(self) -> list[str]:
        """Everything that may run now: tracks with an operation in front, and `CALLS`."""
        while any(track.pass_markers() for track in self.tracks):
            pass
        names = [track.name for track in self.tracks if track.position < len(track.items) and _is_operation(track)]
        if self.calls_run < len(self.calls) and self.calls[self.calls_run].place.reached:
            names.append(CALLS)
        return names

    def run(self, name: str) -> None:
        """Run the next operation of a track, or the next host function. Both count as run if the device has failed."""
        if name == CALLS:
            operation, stream = self.calls[self.calls_run].operation, self.calls[self.calls_run].place.track.name
            self.calls_run += 1
        else:
            track = next(track for track in self.tracks if track.name == name)
            head, stream = track.items[track.position], name
            assert isinstance(head, Operation)
            operation = head
            track.position += 1
        if self.error is not None:
            return
        self.is_running = True
        try:
            with self._around():
                operation.run()
        except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it becomes the device's sticky error
            self.error = (f"{operation.name} on stream {stream}: {type(error).__name__}: {error}", error)
        finally:
            self.is_running = False

    def go_on(self) -> None:
        """Between two calls of the host: let the device come as far as the policy likes."""
        while enabled := self.enabled():
            choice = self.policy.between(enabled)
            if choice is None:
                return
            self.run(enabled[choice])

    def run_until(self, place: Marker) -> None:
        """The host waits for a place: run at least what it takes."""
        enabled = self.enabled()
        while not place.reached:
            self.run(enabled[self.policy.choose(enabled)] if self.policy.hurries else self.needed(place))
            enabled = self.enabled()

    def run_calls(self, count: int) -> None:
        """The host waits for the first `count` host functions."""
        while self.calls_run < count:
            self.run_until(self.calls[self.calls_run].place)
            self.run(CALLS)

    def pass_time(self) -> None:
        """The host has nothing to do: one thing runs, if there is anything."""
        if enabled := self.enabled():
            self.run(enabled[self.policy.choose(enabled)])

    def drain(self) -> None:
        """The host waits for everything."""
        while enabled := self.enabled():
            self.run(enabled[self.policy.choose(enabled)])
        assert all(track.position == len(track.items) for track in self.tracks), "a wait is for an earlier record"

    def needed(self, place: Marker) -> str:
        """A track whose next operation has to run before `place` is reached; call `enabled` before."""
        track = place.track
        while isinstance(head := track.items[track.position], Marker):
            track = head.track
        return track.name

    def check(self) -> None:
        """Raise the sticky DeviceError, if there is one."""
        if self.error is not None:
            message, cause = self.error
            raise DeviceError(message) from cause

    # ------------------------------------------------------------------ taking back

    @property
    def progress(self) -> Progress:
        """How far everything has come."""
        return Progress(tuple(track.position for track in self.tracks), self.calls_run, self.error)

    def go_back(self, progress: Progress) -> None:
        """Count as run what had run then, and no more. Memory is the caller's business."""
        for track, position in zip(self.tracks, progress.positions, strict=True):
            track.position = position
        self.calls_run, self.error = progress.calls, progress.error


def _is_operation(track: Track) -> bool:
    return isinstance(track.items[track.position], Operation)
