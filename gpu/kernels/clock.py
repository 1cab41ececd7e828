"""The monotonic clock in native code: reading it, and waiting for a moment without the interpreter lock.

Owns the way of waiting: an absolute sleep to shortly before the moment, so that no core is taken, and a spin over what
is left, since a sleeper is woken late by an amount that nobody promises.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from gpu.kernels.atomics import WORD, atomic_load, atomic_store, external, pause
from gpu.kernels.emit import I32, I64, const, emitted, pointer
from gpu.kernels.native import kernel

CLOCK_MONOTONIC, TIMER_ABSTIME, PR_SET_TIMERSLACK = 1, 1, 29  # of Linux
TIMESPEC_BYTES = 16
SPIN_NS = 40_000  # how long before the moment the sleep ends: a wake-up takes 5 to 30 us here
SECOND_NS = 1_000_000_000


@emitted(types.int32, WORD)
def _read_clock(b: ir.IRBuilder, timespec: ir.Value) -> ir.Value:
    """clock_gettime into the 16 bytes at `timespec`."""
    return external(b, "clock_gettime", I32, [const(CLOCK_MONOTONIC, I32), pointer(b, timespec, I64)])


@emitted(types.int32, WORD)
def _sleep(b: ir.IRBuilder, timespec: ir.Value) -> ir.Value:
    """clock_nanosleep until the moment at `timespec`; not 0 when a signal came first."""
    none = pointer(b, const(0), I64)
    moment = pointer(b, timespec, I64)
    operands = [const(CLOCK_MONOTONIC, I32), const(TIMER_ABSTIME, I32), moment, none]
    return external(b, "clock_nanosleep", I32, operands)


@emitted(types.int32)
def _exact_timers(b: ir.IRBuilder) -> ir.Value:
    """Have this thread woken when it asked for it; the kernel may take 50 us more by default."""
    return external(b, "prctl", I32, [const(PR_SET_TIMERSLACK, I32), const(1), const(0), const(0), const(0)])


@kernel
def now_ns(timespec: int) -> int:
    """CLOCK_MONOTONIC in ns. timespec: address of 16 bytes to work in."""
    _read_clock(timespec)
    ns: int = atomic_load(timespec) * SECOND_NS + atomic_load(timespec + 8)
    return ns


@kernel
def wait_until(moment_ns: int, timespec: int, asleep: int) -> None:
    """Return at `moment_ns` of CLOCK_MONOTONIC, or at once if it is over. Addresses of 16 bytes each to work in."""
    wake_ns = moment_ns - SPIN_NS
    if now_ns(timespec) < wake_ns:
        _exact_timers()
        atomic_store(asleep, wake_ns // SECOND_NS)
        atomic_store(asleep + 8, wake_ns % SECOND_NS)
        _sleep(asleep)
    while now_ns(timespec) < moment_ns:
        pause()
