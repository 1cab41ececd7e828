"""A team of threads that run one native job together, without the interpreter lock.

Owns the threads and the protocol by which they share the work. A job is a sequence of phases, a phase is a number of
tasks, and a phase begins when every task of the one before is done. Any thread may take any task, and a thread that
comes late, or never, costs nothing but its help: nobody waits for threads, only for tasks. So a job must give the
same bits whoever runs a task, and may never let a result depend on `worker` or on the number of threads.

Protocol. Phases are numbered by a serial that never repeats. The claim word holds (serial, tasks taken). Taking a
task is a compare-and-swap that fails once the serial moved on, so a thread that slept through the end of a job, or
through the whole next one, can take nothing with what it remembers. Whoever finishes the last task of a phase resets
the count and moves the serial. What a latecomer remembers is harmless only while it counts phases as the job did, so
the number of phases may depend on words of the block that never change, and on nothing else; and a job that holds no
task may read its block and nothing else. Blocks therefore live as long as the team.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.kernels.atomics import (
    atomic_add,
    atomic_load,
    atomic_replace,
    atomic_store,
    call_job,
    current_core,
    pause,
    semaphore_init,
    semaphore_post,
    semaphore_wait,
    set_cores,
    thread_number,
    yield_core,
)
from gpu.kernels.native import Entry, entry, kernel
from gpu.kernels.vectors import load_i64, store_i64

# Byte offsets in the control block, a cache line each. The writer is named.
CLAIM = 0  # any thread, by compare-and-swap: serial << TASK_BITS | tasks taken
DONE = 64  # any thread: tasks finished in this phase
EPOCH = 128  # the leader: odd while the three words below are being written
JOB = 136  # the leader: address of the job
BLOCK = 144  # the leader: address of its block
FIRST = 152  # the leader: serial of its first phase
STOP = 192  # the leader: not 0 when the threads shall end
SLEEP = 256  # semaphore
LEADER_CORE = 320  # the leader: the core that it ran on when it last announced a job, plus 1
OUR_CORES = 384  # bit mask, written once: the cores of this process
OTHER_CORES = 512  # bit mask, the leader: those without the leader's
CORE_BYTES = 128
MEMBERS = 640  # each helper its own int64: its thread number
HELPERS_MAX = 255
CONTROL_BYTES = MEMBERS + 8 * HELPERS_MAX

TASK_BITS = 20
TASKS_MAX = 1 << TASK_BITS
SPINS = 300  # pauses (some 20 ns each) before the core is offered to others

assert SLEEP + 32 <= LEADER_CORE
assert OUR_CORES + CORE_BYTES <= OTHER_CORES
assert OTHER_CORES + CORE_BYTES <= MEMBERS


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeroed array that begins on a cache line."""
    count = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.zeros(count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count].view(dtype).reshape(shape)


@kernel
def take(control: int, serial: int, tasks: int) -> int:
    """Number of a task of phase `serial` that is now this thread's, or -1 when none is left."""
    while True:
        word = atomic_load(control + CLAIM)
        task: int = word & (TASKS_MAX - 1)
        if (word >> TASK_BITS) != serial or task >= tasks:
            return -1
        if atomic_replace(control + CLAIM, word, word + 1):
            return task


@kernel
def finish(control: int, serial: int, tasks: int) -> None:
    """Report one task as done. The last one opens the next phase."""
    if atomic_add(control + DONE, 1) == tasks:
        atomic_store(control + DONE, 0)
        atomic_store(control + CLAIM, (serial + 1) << TASK_BITS)  # SYNC phase-done


@kernel
def await_phase(control: int, serial: int) -> int:
    """Wait until phase `serial` is done; returns the next serial."""
    spins = 0
    while (atomic_load(control + CLAIM) >> TASK_BITS) == serial:  # SYNC phase-done
        pause()
        spins += 1
        if spins > SPINS:
            yield_core()
    return serial + 1


@entry
def prepare_control(control: int) -> None:
    """Make the semaphore of a new control block."""
    semaphore_init(control + SLEEP)


@kernel
def make_room(control: int, helpers: int) -> None:
    """Keep the helpers off the leader's core: a thread is woken on the core of its waker when the others are busy.

    Two threads on one core while another is free for one of them would make a pass take twice as long.
    """
    core = current_core()
    if core < 0 or core >= 8 * CORE_BYTES or load_i64(control + LEADER_CORE) == core + 1:
        return
    others, told = 0, True
    for i in range(0, CORE_BYTES, 8):
        cores = load_i64(control + OUR_CORES + i)
        if i == core // 64 * 8:
            cores &= ~(1 << (core % 64))
        store_i64(control + OTHER_CORES + i, cores)
        others |= cores
    for helper in range(helpers):
        thread = atomic_load(control + MEMBERS + 8 * helper)
        if thread == 0:  # it has not begun yet: tell it with the next job
            told = False
        elif others != 0:
            set_cores(np.int32(thread), CORE_BYTES, control + OTHER_CORES)
    if told:
        store_i64(control + LEADER_CORE, core + 1)


@entry
def lead(control: int, job: int, block: int, helpers: int) -> None:
    """Announce a job, wake the helpers, and take part until it is done."""
    make_room(control, helpers)
    first = atomic_load(control + CLAIM) >> TASK_BITS
    atomic_add(control + EPOCH, 1)
    atomic_store(control + JOB, job)
    atomic_store(control + BLOCK, block)
    atomic_store(control + FIRST, first)
    atomic_add(control + EPOCH, 1)  # SYNC job-announced
    for _ in range(helpers):
        semaphore_post(control + SLEEP)
    call_job(job, 0, block, control, first)


@entry
def follow(control: int, worker: int) -> None:
    """Life of a helper: sleep, take part in the job that is announced, sleep again."""
    seen = -1
    atomic_store(control + MEMBERS + 8 * (worker - 1), thread_number())
    while True:
        if semaphore_wait(control + SLEEP) != 0:
            continue
        if atomic_load(control + STOP) != 0:
            return
        while True:
            epoch = atomic_load(control + EPOCH)  # SYNC job-announced
            job = atomic_load(control + JOB)
            block = atomic_load(control + BLOCK)
            first = atomic_load(control + FIRST)
            if epoch % 2 == 0 and atomic_load(control + EPOCH) == epoch:
                break
            pause()
        if first != seen:
            seen = first
            call_job(job, worker, block, control, first)


@entry
def dismiss(control: int, helpers: int) -> None:
    """Make the helpers end."""
    atomic_store(control + STOP, 1)
    for _ in range(helpers):
        semaphore_post(control + SLEEP)


ENTRIES = (prepare_control, lead, follow, dismiss)


def _function(made: Entry, arguments: int) -> ctypes._CFunctionType:  # type: ignore[name-defined]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(made.compile())


class Team:
    """`threads` threads, the caller of `run` being one of them. One job at a time.

    A helper sleeps in native code between jobs and is woken without the interpreter lock.
    """

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= HELPERS_MAX + 1:
            raise ValueError(f"a team needs at least one thread and at most {HELPERS_MAX + 1}, not {threads}")
        self.threads = threads
        self._busy = threading.Lock()
        self._rests = False
        self._blocks: list[npt.NDArray[Any]] = []
        control = aligned((CONTROL_BYTES,), np.uint8)
        self._control = control
        for core in os.sched_getaffinity(0):
            if core < 8 * CORE_BYTES:
                control[OUR_CORES + core // 8] |= 1 << core % 8
        self._lead = _function(lead, 4)
        follower = _function(follow, 2)
        _function(prepare_control, 1)(control.ctypes.data)
        self._members = [
            threading.Thread(target=_follow, args=(follower, control, i), name=f"team-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for member in self._members:
            member.start()
        self._end = weakref.finalize(self, _dismiss, _function(dismiss, 2), control, self._members, self._blocks)

    def block(self, words: int) -> npt.NDArray[np.int64]:
        """Zeroed int64 words that live as long as the team: what a job reads before it holds a task."""
        made: npt.NDArray[np.int64] = aligned((words,), np.int64)
        self._blocks.append(made)
        return made

    def run(self, job: Entry, block: npt.NDArray[np.int64]) -> None:
        """Run `job(worker, block, control, first)` to its end. Raises RuntimeError when a job is running."""
        if self._rests:
            return
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the team is busy: one job at a time")
        try:
            self._lead(self._control.ctypes.data, job.compile(), block.ctypes.data, len(self._members))
        finally:
            self._busy.release()

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Inside of it no job is run: what one would have written is left as it was."""
        self._rests = True
        try:
            yield
        finally:
            self._rests = False

    def close(self) -> None:
        """End the helpers and wait for them. Idempotent."""
        self._end()


def _follow(function: ctypes._CFunctionType, control: npt.NDArray[np.uint8], worker: int) -> None:  # type: ignore[name-defined]
    function(control.ctypes.data, worker)


def _dismiss(
    function: ctypes._CFunctionType,  # type: ignore[name-defined]
    control: npt.NDArray[np.uint8],
    members: list[threading.Thread],
    _blocks: list[npt.NDArray[Any]],  # kept until the helpers have ended
) -> None:
    function(control.ctypes.data, len(members))
    for member in members:
        member.join()
