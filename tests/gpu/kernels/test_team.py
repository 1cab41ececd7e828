"""The team: every task once, phases in order, late helpers, and jobs one after the other."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from gpu.kernels.native import entry
from gpu.kernels.team import Team, await_phase, finish, take
from gpu.kernels.vectors import load_i64, store_i64, word

PHASES, TASKS, COUNTS, FAULTS, BASE = range(5)


@entry
def count_tasks(worker: int, block: int, control: int, first: int) -> None:
    """Each task adds one to its count, after it has seen that all tasks of the phase before did."""
    serial = first
    tasks = word(block, TASKS)
    for phase in range(word(block, PHASES)):
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            place = word(block, COUNTS) + 8 * task
            other = word(block, COUNTS) + 8 * ((task + 1) % tasks)
            seen = load_i64(other)
            done = seen - word(block, BASE)
            if done != phase and done != phase + 1:
                store_i64(word(block, FAULTS), 1)
            store_i64(place, load_i64(place) + 1)
            finish(control, serial, tasks)
        serial = await_phase(control, serial)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [1, 3, 64])
def test_every_task_of_every_phase_runs_once(threads: int, tasks: int) -> None:
    team = Team(threads)
    counts, faults = np.zeros(tasks, np.int64), np.zeros(1, np.int64)
    block = team.block(8)
    for repeat in range(60):
        block[:5] = (7, tasks, counts.ctypes.data, faults.ctypes.data, 7 * repeat)
        team.run(count_tasks, block)
        assert counts.tolist() == [7 * (repeat + 1)] * tasks
    assert faults[0] == 0
    team.close()


def test_at_rest_it_runs_nothing() -> None:
    team = Team(2)
    counts, faults = np.zeros(3, np.int64), np.zeros(1, np.int64)
    block = team.block(8)
    block[:5] = (7, 3, counts.ctypes.data, faults.ctypes.data, 0)
    with team.rest():
        team.run(count_tasks, block)
    assert counts.tolist() == [0] * 3
    team.run(count_tasks, block)
    assert counts.tolist() == [7] * 3
    team.close()


def test_more_threads_than_cores_and_many_short_jobs() -> None:
    team = Team(8)
    counts, faults = np.zeros(4, np.int64), np.zeros(1, np.int64)
    blocks = [team.block(8) for _ in range(3)]
    for phases, block in enumerate(blocks, 1):
        block[:4] = (phases, 4, counts.ctypes.data, faults.ctypes.data)
    for repeat in range(2000):
        team.run(count_tasks, blocks[repeat % 3])
    assert counts.tolist() == [sum(1 + r % 3 for r in range(2000))] * 4
    team.close()


def test_a_second_job_at_the_same_time_is_refused() -> None:
    team = Team(2)
    counts, faults = np.zeros(4, np.int64), np.zeros(1, np.int64)
    long, short = team.block(8), team.block(8)
    long[:4] = (2_000_000, 4, counts.ctypes.data, faults.ctypes.data)
    short[:4] = (1, 4, counts.ctypes.data, faults.ctypes.data)
    other = threading.Thread(target=team.run, args=(count_tasks, long))
    other.start()
    time.sleep(0.05)
    with pytest.raises(RuntimeError, match="one job at a time"):
        team.run(count_tasks, short)
    other.join()
    team.close()


def test_close_ends_the_threads() -> None:
    before = threading.active_count()
    team = Team(4)
    assert threading.active_count() == before + 3
    team.close()
    team.close()
    assert threading.active_count() == before
    lost = Team(3)
    del lost
    assert threading.active_count() == before


def test_a_team_of_nobody() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Team(0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_helpers_keep_off_the_leaders_core() -> None:
    ours = os.sched_getaffinity(0)
    team = Team(2)
    counts, faults = np.zeros(4, np.int64), np.zeros(1, np.int64)
    block = team.block(8)
    block[:5] = (1, 4, counts.ctypes.data, faults.ctypes.data, 0)
    (helper,) = (t.native_id for t in threading.enumerate() if t.name == "team-1")
    try:
        for core in sorted(ours)[:2]:
            os.sched_setaffinity(0, {core})
            deadline = time.monotonic() + 5
            while os.sched_getaffinity(helper) != ours - {core} and time.monotonic() < deadline:
                block[BASE] = counts[0]
                team.run(count_tasks, block)
            assert os.sched_getaffinity(helper) == ours - {core}
    finally:
        os.sched_setaffinity(0, ours)
        team.close()
