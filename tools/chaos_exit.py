"""Has another process call exit, between any two of its instructions and without its help: `exit_now(pid, status)`.

Owns the few ptrace requests that this takes: the process is stopped, its first thread's registers are made those of a
call of exit_group at a system call instruction of the vDSO, and it goes on. No handler, no `finally` and no atexit of
it runs. Linux on x86-64; it needs the right to trace, which a process has over those that it started.
"""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

_SEIZE, _INTERRUPT, _GETREGS, _SETREGS, _DETACH = 0x4206, 0x4207, 12, 13, 17
_ALL_THREADS = 0x40000000  # __WALL: whatever thread it is
_REGISTERS = 27  # words of user_regs_struct
_RAX, _RDI, _ORIG_RAX, _RIP = 10, 14, 15, 16
_EXIT_GROUP = 231
_NO_CALL = 2**64 - 1  # or the kernel would start the interrupted call again
_SYSCALL = b"\x0f\x05"

_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def exit_now(pid: int, status: int = 0) -> None:
    """The process ends by itself with `status`, whatever it was doing. Raises OSError where it may not be traced."""
    if platform.machine() != "x86_64":
        raise OSError(f"making a process exit is not known for {platform.machine()}")
    _call(_SEIZE, pid)
    try:
        _call(_INTERRUPT, pid)
        os.waitpid(pid, _ALL_THREADS)
        registers = (ctypes.c_uint64 * _REGISTERS)()
        _call(_GETREGS, pid, ctypes.addressof(registers))
        registers[_RIP] = _system_call_instruction(pid)
        registers[_RAX], registers[_RDI], registers[_ORIG_RAX] = _EXIT_GROUP, status, _NO_CALL
        _call(_SETREGS, pid, ctypes.addressof(registers))
    finally:
        _call(_DETACH, pid)


def _call(request: int, pid: int, data: int = 0) -> None:
    if _ptrace(request, pid, None, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace {request:#x} of process {pid}: {os.strerror(error)}")


def _system_call_instruction(pid: int) -> int:
    """The address of one in the code that the kernel maps into every process."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if line.endswith("[vdso]"):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(begin)
                found = memory.read(end - begin).find(_SYSCALL)
            if found >= 0:
                return begin + found
    raise OSError(f"process {pid} has no system call in its vDSO")
