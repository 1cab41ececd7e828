"""Whether the device gets on with the steps in flight; once it does not, the process ends itself (`procs.executor`).

Owns how long a step may take without an end, for each kind of device. Decides over what it is told and over processor
time, and waits for nothing. Nobody outside could tell as well: whoever looks from there sees that the process works,
and not for what.

On the host device a step that gets on takes processor time, however large the model and however busy the machine, so
one that takes none is known at once. What takes it may be in a loop without an end, or at a long prompt with a large
model on few cores, which takes minutes. On CUDA the process sleeps either way, and no step takes seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

LOOK_SECONDS_MAX = 0.1  # that count from look to look: the loop itself may have been stopped; it looks every 0.05 s
_PER_THREAD, _SCHED = 4, 2  # bits of a clock's number
WORK_SECONDS = 1e-4  # of processor time that show work: two clocks that are not read at once differ by less


class Patience(NamedTuple):
    """Seconds in which the oldest step in flight has not ended."""

    asleep: float  # without any processor time of the device's threads
    at_work: float


PATIENCE = {"host": Patience(1.0, 600.0), "cuda": Patience(30.0, 30.0)}


class DeviceTime:
    """Processor time of all threads of the process but the caller's and `helpers`, in seconds."""

    def __init__(self, *helpers: threading.Thread) -> None:
        """helpers: threads that do nothing for a step, so that what they do is no sign of it. They may still be to be
        started, and may end.
        """
        self._helpers = helpers
        self._helped_s = [0.0] * len(helpers)

    def __call__(self) -> float:
        for i, thread in enumerate(self._helpers):
            with contextlib.suppress(OSError):  # it has ended: what it had had at the last look stays
                self._helped_s[i] = time.clock_gettime(_clock_of(thread)) if thread.native_id else 0.0
        return time.process_time() - time.thread_time() - sum(self._helped_s)


def _clock_of(thread: threading.Thread) -> int:
    """The clock of the thread's processor time, as Linux numbers those. (pthread_getcpuclockid gives the same, but may
    not be asked about a thread that has ended.)
    """
    assert thread.native_id is not None
    return (~thread.native_id << 3) | _PER_THREAD | _SCHED


class DeviceWatch:
    """For one thread, the one that launches."""

    def __init__(
        self,
        patience: Patience,
        now_s: Callable[[], float] = time.monotonic,
        worked_s: Callable[[], float] | None = None,
    ) -> None:
        """worked_s: processor time that the device's threads have had, in seconds; as a rule, all but the caller's."""
        self._patience = patience
        self._now_s = now_s
        self._worked_s = worked_s or DeviceTime()
        self._oldest: object = None
        self._looked_s = 0.0
        self._waited_s = 0.0  # since the oldest step became it
        self._asleep_s = 0.0  # since it was last seen at work
        self._worked_before_s = 0.0

    @property
    def waited_s(self) -> float:
        """For how long the oldest step has been it, at the last look."""
        return self._waited_s

    def gets_on(self, oldest: object | None) -> bool:
        """Whether the device lives. oldest: what stands for the oldest step that has not ended, None without one."""
        now_s = self._now_s()
        passed_s, self._looked_s = min(now_s - self._looked_s, LOOK_SECONDS_MAX), now_s
        if oldest is None or oldest is not self._oldest:
            self._oldest, self._waited_s, self._asleep_s = oldest, 0.0, 0.0
            return True
        self._waited_s += passed_s
        self._asleep_s += passed_s
        if self._waited_s >= self._patience.at_work:
            return False
        if self._waited_s < LOOK_SECONDS_MAX:  # as nearly every step: no clock need be read for it
            return True
        worked_s = self._worked_s()
        if worked_s - self._worked_before_s >= WORK_SECONDS:
            self._worked_before_s, self._asleep_s = worked_s, 0.0
        return self._asleep_s < self._patience.asleep
