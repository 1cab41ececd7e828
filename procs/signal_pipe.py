"""Signals as bytes in a pipe: handlers do nothing, whoever waits on the pipe decides.

Owns the handlers of SIGTERM and SIGINT while it is open, and puts the earlier ones back. Only the main thread may open
it; any thread may push.
"""

from __future__ import annotations

import os
import signal
from types import TracebackType
from typing import Self

CAUGHT = (signal.SIGTERM, signal.SIGINT)


class SignalPipe:
    """A context manager. `fileno()` becomes readable when a signal came; `take()` returns those that did."""

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {caught: signal.signal(caught, _nothing) for caught in CAUGHT}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for caught, handler in self._before.items():
            signal.signal(caught, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        return self._read

    def push(self, caught: signal.Signals) -> None:
        """Do as if the signal had come. Safe in any thread while the pipe is open."""
        os.write(self._write, bytes([caught]))

    def take(self) -> list[signal.Signals]:
        """Return the signals that came since the last call, in order; those that nobody asked for are left out."""
        try:
            return [signal.Signals(number) for number in os.read(self._read, 256) if number in CAUGHT]
        except BlockingIOError:
            return []


def _nothing(_number: int, _frame: object) -> None:
    """The number is in the pipe already: the interpreter wrote it before it came here."""
