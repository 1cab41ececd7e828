"""What a device that runs elsewhere shares with every other one: the error that sticks, and who looks on.

Owns the first error, the guard and the observer. It knows nothing of streams or memory. The error may be set from any
thread; everything else is for the launching thread.
"""

from threading import Lock

from gpu.device.guard import LaunchGuard
from gpu.device.protocol import DeviceError, Observer, Regions


class StickyDevice:
    """The part of `protocol.Device` that fails and is looked at."""

    def __init__(self, observer: Observer | None, guard: LaunchGuard | None) -> None:
        self.observer = observer
        self.failed = False
        self._guard = guard
        self._error: tuple[str, BaseException] | None = None
        self._error_lock = Lock()
        self._closed = False

    def fail(self, stream: str, name: str, error: BaseException) -> DeviceError:
        """Make the first error stick. Returns what to raise for this one."""
        message = f"{name} on stream {stream}: {type(error).__name__}: {error}"
        with self._error_lock:
            if self._error is None:
                self._error = (message, error)
            self.failed = True
        return DeviceError(message)

    def check(self) -> None:
        """Raise the sticky DeviceError, if there is one."""
        if self._closed:
            raise DeviceError("the device is closed")
        if self._error is not None:
            message, cause = self._error
            raise DeviceError(message) from cause

    def waits(self, what: str) -> None:
        """On the way of every call that waits. Raises DeviceError in the launch loop of a guarded device."""
        self.check()
        if self._guard is not None:
            self._guard.refuse(what)

    def host_access(self, *, reads: Regions, writes: Regions, name: str) -> None:
        """Declare what the calling thread does with pinned memory, or knows that another process did."""
        if self.observer is not None:
            self.observer.host_access(name, reads, writes)
