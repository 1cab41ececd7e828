"""A doorbell wakes one stage: an eventfd, and a word in the control segment that says whether the stage waits.

Owns the order of the two sides: who publishes stores first and looks at the word afterwards, who waits sets the word
first and looks at the data afterwards, with a full fence between on both sides, so one of them always sees the other.
All rings of a stage share its one doorbell. It carries no data, and it may never be the only sign of work: waiters look
again at least every WAIT_MS_MAX.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
from _thread import allocate_lock
from collections.abc import Callable

from shm.limits import WAIT_MS_MAX

_ONE = (1).to_bytes(8, "little")

# PyDLL keeps the GIL during the call: os.eventfd_write gives it away and may have to wait milliseconds to get it back
# beside a busy thread. The write cannot block: the counter would have to overflow first.
_write = ctypes.PyDLL(None, use_errno=True).write
_write.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t]
_write.restype = ctypes.c_ssize_t

STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64")  # total store order: no fence needed between two stores


def fence() -> None:
    """Full memory fence, at about 0.1 us. Safe in any thread and in signal handlers.

    A lock of its own is taken and given back: both are atomic operations, which x86 orders fully. Where acquire and
    release order one direction only (arm64), the second pair's acquire behind the first pair's release closes the gap.
    """
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    if not STORES_ARE_ORDERED:
        lock.acquire()
        lock.release()


class Doorbell:
    """The doorbell of one stage. `eventfd` is non-blocking; `words[index]` is the stage's waiting flag (u64, 0 or 1).

    The owner is one thread of the stage: only it may call wait, arm, disarm and drain. Anyone may ring or kick.
    """

    def __init__(self, eventfd: int, words: memoryview, index: int) -> None:
        self._fd = eventfd
        self._words = words
        self._index = index
        self._poll: select.poll | None = None

    @staticmethod
    def create_fd() -> int:
        """Return a new eventfd of the kind that a doorbell needs."""
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        """Wake the owner if it waits. Call after the store that makes the work visible."""
        fence()  # SYNC doorbell: data stored before, waiting read after
        if self._words[self._index]:
            self.kick()

    def kick(self) -> None:
        """Wake the owner in any case; the next wait of the owner returns at once. Safe in a signal handler."""
        if _write(self._fd, _ONE, 8) != 8:
            errno = ctypes.get_errno()
            raise OSError(errno, f"doorbell eventfd {self._fd}: {os.strerror(errno)}")

    def wait(self, ready: Callable[[], bool], timeout_ms: float = WAIT_MS_MAX) -> bool:
        """Wait until `ready()`, a kick, or the timeout; return `ready()` as it is then.

        Returns early on any kick, so that the caller can look at whatever else may have changed.
        """
        if ready():
            return True
        self.arm()
        try:
            if ready():
                return True
            if self._poll is None:
                self._poll = select.poll()
                self._poll.register(self._fd, select.POLLIN)
            rung = self._poll.poll(timeout_ms)
        finally:
            self.disarm()
        if rung:
            self.drain()
        return ready()

    def arm(self) -> None:
        """Say that the owner is about to wait. It must look at its work once more before it does."""
        self._words[self._index] = 1
        fence()  # SYNC doorbell: waiting stored before, data read after

    def disarm(self) -> None:
        """Say that the owner no longer waits, so that publishers save themselves the wake-up."""
        self._words[self._index] = 0

    def drain(self) -> None:
        """Take back every ring so far; call before looking at the work, never after."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return
