"""Whether the device gets on: a step that does is never taken for a hang, one that does not always is."""

from __future__ import annotations

import threading
import time

import pytest

from procs.device_watch import LOOK_SECONDS_MAX, PATIENCE, DeviceTime, DeviceWatch, Patience
from shm.limits import WAIT_MS_MAX

LOOK_S = WAIT_MS_MAX / 1000
SLACK_S = 3 * LOOK_SECONDS_MAX


class Loop:
    """A launch loop that looks every now and then; the device's threads get `share` of a core."""

    def __init__(self, device: str) -> None:
        self.now_s, self.worked_s, self.share = 1000.0, 50.0, 0.0
        self.patience = PATIENCE[device]
        self.watch = DeviceWatch(self.patience, lambda: self.now_s, lambda: self.worked_s)

    def look(self, oldest: object | None, seconds: float = LOOK_S) -> bool:
        self.now_s += seconds
        self.worked_s += self.share * seconds
        return self.watch.gets_on(oldest)

    def until_silent(self, oldest: object | None, most_s: float) -> float | None:
        """Seconds until it is taken for dead, and from then on for good."""
        began_s = self.now_s
        while self.now_s < began_s + most_s:
            if not self.look(oldest):
                silent_s = self.now_s - began_s
                assert not any(self.look(oldest) for _ in range(100)), "what has stopped stays so"
                return silent_s
        return None


@pytest.mark.parametrize("device", PATIENCE)
def test_a_device_without_work_lives(device: str) -> None:
    loop = Loop(device)
    assert loop.until_silent(None, 2000.0) is None


def test_a_host_device_that_sleeps_is_known_soon_and_one_that_works_late() -> None:
    asleep_s = Loop("host").until_silent(object(), 60.0)
    assert asleep_s is not None and asleep_s <= PATIENCE["host"].asleep + SLACK_S
    for share in (2.0, 0.05, 0.001):  # of a core: others want it as well
        loop = Loop("host")
        loop.share = share
        assert loop.until_silent(object(), PATIENCE["host"].at_work - 1) is None, share
        loop = Loop("host")
        loop.share = share
        assert loop.until_silent(object(), PATIENCE["host"].at_work + SLACK_S) is not None, share


def test_a_step_that_worked_and_then_sleeps_is_known() -> None:
    loop, step = Loop("host"), object()
    loop.share = 1.0
    assert loop.until_silent(step, 100.0) is None
    loop.share = 0.0
    found_s = loop.until_silent(step, 60.0)
    assert found_s is not None and found_s <= PATIENCE["host"].asleep + SLACK_S


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_on_cuda_it_tells_nothing_that_the_process_sleeps(share: float) -> None:
    loop = Loop("cuda")
    loop.share = share
    found_s = loop.until_silent(object(), 60.0)
    assert found_s is not None and 30.0 <= found_s < 30.0 + SLACK_S


@pytest.mark.parametrize("device", PATIENCE)
def test_steps_that_end_are_signs_of_life(device: str) -> None:
    loop = Loop(device)
    for _ in range(200):
        step = object()
        assert all(loop.look(step) for _ in range(int(PATIENCE[device].asleep / LOOK_S)))


@pytest.mark.parametrize("device", PATIENCE)
def test_time_in_which_nobody_looks_does_not_count(device: str) -> None:
    """The process was stopped, or the launching thread compiled something."""
    loop, step = Loop(device), object()
    assert loop.look(step) and loop.look(step, 3600.0) and loop.look(step)


def test_whoever_comes_back_is_alive_again() -> None:
    loop, step = Loop("host"), object()
    assert loop.until_silent(step, 60.0) is not None
    assert loop.look(object())


def spin(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_processor_time_of_the_other_threads_is_seen_and_the_caller_s_is_not() -> None:
    worked_s = DeviceTime()
    before_s = worked_s()
    spin(0.02)
    assert abs(worked_s() - before_s) < 0.01
    other = threading.Thread(target=spin, args=(0.02,))
    other.start()
    other.join()
    assert worked_s() - before_s >= 0.015


def test_helpers_count_as_little_as_the_caller_while_they_run_and_when_they_have_ended() -> None:
    looked, go_on = threading.Event(), threading.Event()

    def help_out() -> None:
        spin(0.03)
        looked.set()
        go_on.wait()

    helper = threading.Thread(target=help_out)
    worked_s = DeviceTime(helper)
    before_s = worked_s()
    assert before_s == pytest.approx(DeviceTime()(), abs=0.005), "it has not been started"
    helper.start()
    looked.wait()
    assert DeviceTime()() - before_s >= 0.025
    assert worked_s() - before_s < 0.005
    go_on.set()
    helper.join()
    assert worked_s() - before_s < 0.005
    other = threading.Thread(target=spin, args=(0.02,))
    other.start()
    other.join()
    assert worked_s() - before_s >= 0.015


def test_a_real_wait_is_no_work() -> None:
    watch, step = DeviceWatch(Patience(0.05, 60.0)), object()
    sleeper = threading.Thread(target=time.sleep, args=(2.0,), daemon=True)
    sleeper.start()
    end_s = time.monotonic() + 1.9
    while watch.gets_on(step):
        assert time.monotonic() < end_s, "nobody noticed"
        time.sleep(0.01)
