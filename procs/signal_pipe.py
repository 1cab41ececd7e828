"""Signals as bytes in a pipe: handlers do nothing, whoever waits on the pipe decides.

Owns the handlers of SIGTERM and SIGINT while it is open, and puts the earlier ones back. Only the main thread may open
it; any thread may ask.
"""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Self

CAUGHT = (signal.SIGTERM, signal.SIGINT)
ASKED = 0  # not a signal: another thread asks for the end


class SignalPipe:
    """A context manager. `fileno()` becomes readable when something came; `take()` returns what did."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._write = -1

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
        with self._lock:
            os.close(self._read)
            os.close(self._write)
            self._write = -1

    def fileno(self) -> int:
        return self._read

    def ask(self) -> None:
        """Put ASKED into the pipe; nothing happens if it is closed. Safe in any thread."""
        with self._lock:
            if self._write >= 0:
                os.write(self._write, bytes([ASKED]))

    def take(self) -> list[int]:
        """Return the signals that came since the last call, in order, ASKED among them; others are left out."""
        try:
            return [number for number in os.read(self._read, 256) if number in (*CAUGHT, ASKED)]
        except BlockingIOError:
            return []


def _nothing(_number: int, _frame: object) -> None:
    """The number is in the pipe already: the interpreter wrote it before it came here."""
