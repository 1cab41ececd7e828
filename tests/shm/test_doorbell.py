"""Doorbells: no lost wake-up, no needless one."""

import os
import select
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from shm.control import Control
from shm.doorbell import Doorbell, fence
from shm.launch import die_with
from shm.segment import Segment

LONG_MS = 10_000  # a lost wake-up would last this long


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    control = Control(Segment.create("control", Control.size()))
    fd = Doorbell.create_fd()
    yield control.doorbell("gpu", fd)
    os.close(fd)
    control.segment.close()


def readable(bell: Doorbell) -> bool:
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def test_ring_is_silent_unless_the_owner_waits(bell: Doorbell) -> None:
    bell.ring()
    assert not readable(bell)
    bell.arm()
    bell.ring()
    bell.ring()
    assert readable(bell)
    bell.drain()
    assert not readable(bell)
    bell.disarm()
    bell.ring()
    assert not readable(bell)
    bell.drain()  # nothing to take back is no error


def test_kick_wakes_in_any_case(bell: Doorbell) -> None:
    bell.kick()
    begin = time.monotonic()
    assert not bell.wait(lambda: False, LONG_MS)
    assert time.monotonic() - begin < LONG_MS / 2000
    assert not readable(bell), "the kick was taken back"


def test_wait_returns_at_once_if_ready_and_after_the_timeout_if_not(bell: Doorbell) -> None:
    assert bell.wait(lambda: True, LONG_MS)
    begin = time.monotonic()
    assert not bell.wait(lambda: False, 20)
    assert time.monotonic() - begin >= 0.019


@pytest.mark.parametrize("check", [1, 2])
def test_a_publish_right_after_any_check_is_seen(bell: Doorbell, check: int) -> None:
    """The worst two interleavings: work appears right behind the first look, or right behind the second."""
    checks, work = 0, False

    def ready() -> bool:
        nonlocal checks, work
        seen = work
        checks += 1
        if checks == check:
            work = True
            bell.ring()
        return seen

    begin = time.monotonic()
    assert bell.wait(ready, LONG_MS)
    assert time.monotonic() - begin < LONG_MS / 2000


def test_the_flag_is_taken_back_if_ready_raises(bell: Doorbell) -> None:
    def ready() -> bool:
        if bell._words[bell._index]:
            raise KeyError
        return False

    with pytest.raises(KeyError):
        bell.wait(ready, LONG_MS)
    bell.ring()
    assert not readable(bell)


def test_ping_pong_between_two_processes_loses_no_wake_up() -> None:
    rounds = 1500
    control = Control(Segment.create("control", Control.size()))
    data = Segment.create("data", 4096).words
    mine = control.doorbell("scheduler", Doorbell.create_fd())
    theirs = control.doorbell("gpu", Doorbell.create_fd())
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        die_with(parent)
        for i in range(1, rounds + 1):
            while not theirs.wait(lambda i=i: data[0] >= i, LONG_MS):
                pass
            data[8] = i
            mine.ring()
        os._exit(0)
    begin = time.monotonic()
    longest = 0.0
    try:
        for i in range(1, rounds + 1):
            start = time.monotonic()
            data[0] = i
            theirs.ring()
            while not mine.wait(lambda i=i: data[8] >= i, LONG_MS):
                assert time.monotonic() - begin < 60, f"no answer in round {i}"
            longest = max(longest, time.monotonic() - start)
    finally:
        os.kill(pid, signal.SIGKILL)  # it has answered everything, or never will
        os.waitpid(pid, 0)
    assert longest < LONG_MS / 2000, "a wake-up was lost: the wait ended by its timeout"


def test_fences_and_rings_from_many_threads(bell: Doorbell) -> None:
    """A fence has no lock that two threads, or a signal handler and its thread, could meet at."""

    def work() -> None:
        for _ in range(500):
            fence()
            bell.ring()

    threads = [threading.Thread(target=work) for _ in range(4)]
    bell.arm()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert readable(bell)


def test_a_closed_eventfd_is_an_error(bell: Doorbell) -> None:
    broken = Doorbell(10_000, bell._words, bell._index)
    with pytest.raises(OSError, match="doorbell eventfd 10000"):
        broken.kick()
