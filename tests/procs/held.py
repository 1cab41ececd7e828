"""A tracer, as a debugger is one: who ends in its hands stays a zombie that its own parent cannot collect."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

PTRACE_SEIZE = 0x4206
WAIT_ALL = 0x40000000  # __WALL: threads too


class Held:
    """Traces one thread, from entering the block to its end. Where that is all of the process (its only thread, or the
    last one), the process is dead but cannot be collected; where it is another than the first one, it is not even dead.
    """

    def __init__(self, tid: int) -> None:
        self.tid = tid
        self._holds = False

    def __enter__(self) -> Held:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        libc.ptrace.restype = ctypes.c_long
        assert libc.ptrace(PTRACE_SEIZE, self.tid, None, None) == 0, os.strerror(ctypes.get_errno())
        self._holds = True
        return self

    def let_go(self) -> None:
        """Wait for its end, which somebody must have seen to."""
        if self._holds:
            os.waitpid(self.tid, WAIT_ALL)
            self._holds = False

    def __exit__(self, *_: object) -> None:
        self.let_go()


def second_thread(pid: int) -> int:
    """Of a process that has more than one."""
    return next(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if int(task.name) != pid)
