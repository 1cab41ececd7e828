"""Whether the device gets on with the steps in flight; once it does not, the launch loop gives no heartbeat.

Owns how long a step may take without an end, for each kind of device. Decides over what it is told and over processor
time; it waits for nothing, and what becomes of a process without a heartbeat is decided elsewhere (`procs.restarts`).

On the host device a step that gets on takes processor time, however large the model and however busy the machine, so
one that takes none is known at once. What takes it may be in a loop without an end, or at a long prompt with a large
model on few cores, which takes minutes. On CUDA the process sleeps either way, and no step takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

LOOK_SECONDS_MAX = 0.1  # that count from look to look: the loop itself may have been stopped; it looks every 0.05 s
WORK_SECONDS = 1e-4  # of processor time that show work: two clocks that are not read at once differ by less


class Patience(NamedTuple):
    """Seconds in which the oldest step in flight has not ended."""

    asleep: float  # without any processor time of the device's threads
    at_work: float


PATIENCE = {"host": Patience(1.0, 600.0), "cuda": Patience(30.0, 30.0)}


def others_worked_s() -> float:
    """Processor time of all threads of the process but the caller's, in seconds."""
    return time.process_time() - time.thread_time()


class DeviceWatch:
    """For one thread, the one that launches."""

    def __init__(
        self,
        patience: Patience,
        now_s: Callable[[], float] = time.monotonic,
        worked_s: Callable[[], float] = others_worked_s,
    ) -> None:
        """worked_s: processor time that the device's threads have had, in seconds."""
        self._patience = patience
        self._now_s = now_s
        self._worked_s = worked_s
        self._oldest: object = None
        self._looked_s = 0.0
        self._waited_s = 0.0  # since the oldest step became it
        self._asleep_s = 0.0  # since it was last seen at work
        self._worked_before_s = 0.0

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
        if self._asleep_s < self._patience.asleep:
            return True
        worked_s = self._worked_s()
        if worked_s - self._worked_before_s < WORK_SECONDS:
            return False
        self._worked_before_s, self._asleep_s = worked_s, 0.0
        return True
