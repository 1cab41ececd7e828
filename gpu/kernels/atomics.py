"""Atomic words, waiting and calls by address, for native code that runs on several threads at once.

Owns nothing; every operation is sequentially consistent. Blocking is a POSIX semaphore of the C library, so that a
thread can sleep and be woken without the interpreter lock."""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from gpu.kernels.emit import I8, I32, I64, const, emitted, pointer

WORD = types.int64
ORDER = "seq_cst"
HAS_PAUSE = binding.get_default_triple().startswith("x86_64")
VOID = ir.VoidType()


def external(b: ir.IRBuilder, name: str, result: ir.Type, operands: list[ir.Value]) -> Any:
    """Call of a function of the C library, or of an intrinsic, by its name."""
    kind = ir.FunctionType(result, [o.type for o in operands])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), operands)


@emitted(WORD, WORD)
def atomic_load(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Value of the int64 at `address`."""
    return b.load_atomic(pointer(b, address, I64), ORDER, 8)


@emitted(types.void, WORD, WORD)
def atomic_store(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Store the int64 at `address`."""
    b.store_atomic(value, pointer(b, address, I64), ORDER, 8)


@emitted(WORD, WORD, WORD)
def atomic_add(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    """Add to the int64 at `address`; returns the sum."""
    return b.add(b.atomic_rmw("add", pointer(b, address, I64), value, ORDER), value)


@emitted(types.boolean, WORD, WORD, WORD)
def atomic_replace(b: ir.IRBuilder, address: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    """Compare and swap; true when the word held `expected`."""
    both = b.cmpxchg(pointer(b, address, I64), expected, value, ORDER, ORDER)
    return b.extract_value(both, 1)


@emitted(types.void)
def pause(b: ir.IRBuilder) -> None:
    """Tell the core that this is a waiting loop."""
    if HAS_PAUSE:
        external(b, "llvm.x86.sse2.pause", VOID, [])


@emitted(types.void)
def yield_core(b: ir.IRBuilder) -> None:
    """Let another thread have the core."""
    external(b, "sched_yield", I32, [])


@emitted(types.int32, WORD)
def semaphore_init(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Make a semaphore of this process, count 0, in the 32 bytes at `address`."""
    return external(b, "sem_init", I32, [pointer(b, address, I8), const(0, I32), const(0, I32)])


@emitted(types.int32, WORD)
def semaphore_post(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Add one; wakes a sleeper."""
    return external(b, "sem_post", I32, [pointer(b, address, I8)])


@emitted(types.int32, WORD)
def semaphore_wait(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Sleep until the count is positive, then take one. Non-zero when a signal came first."""
    return external(b, "sem_wait", I32, [pointer(b, address, I8)])


@emitted(types.int32)
def current_core(b: ir.IRBuilder) -> ir.Value:
    """Number of the core that runs this thread."""
    return external(b, "sched_getcpu", I32, [])


@emitted(types.int32)
def thread_number(b: ir.IRBuilder) -> ir.Value:
    """The kernel's number of this thread."""
    return external(b, "gettid", I32, [])


@emitted(types.int32, types.int32, WORD, WORD)
def set_cores(b: ir.IRBuilder, thread: ir.Value, size: ir.Value, mask: ir.Value) -> ir.Value:
    """Let `thread` run on the cores of the bit mask of `size` bytes at `mask` only. Not 0 when that was refused."""
    return external(b, "sched_setaffinity", I32, [thread, size, pointer(b, mask)])


@emitted(types.void, WORD, WORD, WORD, WORD, WORD)
def call_job(
    b: ir.IRBuilder, function: ir.Value, worker: ir.Value, block: ir.Value, control: ir.Value, first: ir.Value
) -> None:
    """Call `void job(worker, block, control, first)` at the address `function`."""
    kind = ir.FunctionType(VOID, [I64] * 4)
    b.call(b.inttoptr(function, kind.as_pointer()), [worker, block, control, first])
