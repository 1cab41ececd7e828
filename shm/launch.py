"""Runs a stage's module in a process that ends with its supervisor from the first moments on.

    python -P -m shm.launch SUPERVISOR_PID MODULE ...

A stage holds what it inherits, the listening socket among it, while it still imports. So that is not left to the
module: nothing is imported before the kernel knows whom this process goes with.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(supervisor_pid: int) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends; end now if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != supervisor_pid:
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
