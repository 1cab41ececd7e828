"""Processes that do not go: a tracer has their status, or they were killed and still are there. Nobody waits for them.

Where a test holds another thread than the first one, it stands for whatever the kernel does not let go.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from procs.burials import END_SECONDS, Burials
from procs.child_specs import child_environment
from procs.server_memory import ServerMemory
from procs.stage_process import StageProcess
from tests.procs.fake_server import config, open_fds, spec
from tests.procs.held import Held, second_thread
from tests.procs.test_standbys import pid
from tests.procs.test_supervisor import FRONTEND, GPU, Server

SERVER_SECONDS = 60.0
SCHEDULER = {"stage": "scheduler", "fake": "serve", "stop_seconds": 0.5}
TWO_THREADS = {"stage": "gpu", "fake": "in two threads", "stop_seconds": 0.5}
SLOW_FRONTEND = {"stage": "frontend", "fake": "frontend 3 60"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers; those that wait for what does not come are killed."""
    started: list[Server] = []
    timers: list[threading.Timer] = []

    def one(*stages: dict[str, object], **more: Any) -> Server:
        started.append(Server(tmp_path, *stages, **more))
        timers.append(threading.Timer(SERVER_SECONDS, started[-1].process.kill))
        timers[-1].start()
        started[-1].wait_line("ready")
        for stage in stages:
            if stage["stage"] != "frontend" and not memories(started[-1], str(stage["stage"])):
                started[-1].wait_line(f"progress {stage['stage']}: memory")
        return started[-1]

    yield one
    for timer in timers:
        timer.cancel()
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def memories(server: Server, stage: str) -> list[int]:
    """What the processes of a stage were told, each when it began to serve."""
    start = f"progress {stage}: memory of epoch "
    return [int(line.removeprefix(start)) for line in server.lines if line.startswith(start)]


def end(server: Server) -> list[str]:
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0, server.errors
    return lines


def test_a_stage_that_ends_under_a_tracer_is_replaced_at_once_and_collected_when_it_can_be(
    start: Callable[..., Server],
) -> None:
    server = start(GPU, SCHEDULER, FRONTEND)
    dead = server.pids["stepahead: scheduler"]
    with Held(dead) as tracer:
        os.kill(dead, signal.SIGKILL)
        server.wait_line("note scheduler died (ended under a tracer, nobody knows how), back after ")
        os.kill(server.pids["stepahead: gpu"], signal.SIGKILL)
        server.wait_line("note gpu died (killed by SIGKILL (is memory short?)), back after ")
        assert psutil.Process(dead).status() == psutil.STATUS_ZOMBIE
        tracer.let_go()
    wait_until(lambda: not psutil.pid_exists(dead))
    end(server)
    assert memories(server, "scheduler") == [1, 2]


def test_who_was_killed_and_does_not_go_is_not_replaced_before_and_holds_up_nobody(
    start: Callable[..., Server],
) -> None:
    server = start(TWO_THREADS, SCHEDULER, FRONTEND)
    stuck = server.pids["stepahead: gpu"]
    with Held(second_thread(stuck)) as tracer:
        os.kill(stuck, signal.SIGSTOP)
        server.wait_line(f"note gpu was killed (stopped by a signal), but is not gone: process {stuck} is held by ")
        os.kill(server.pids["stepahead: scheduler"], signal.SIGKILL)
        server.wait_line("note scheduler died (killed by SIGKILL (is memory short?)), back after ")
        assert server.pids["stepahead: gpu"] == stuck and memories(server, "gpu") == [1]
        tracer.let_go()
    server.wait_line("note gpu died (stopped by a signal), back after ")
    end(server)
    assert memories(server, "gpu") == [1, 1]


@pytest.mark.parametrize("stage", ["scheduler", "gpu"])
def test_the_server_ends_in_spite_of_who_does_not_go_and_names_it(start: Callable[..., Server], stage: str) -> None:
    server = start(TWO_THREADS, SCHEDULER, FRONTEND)
    held = server.pids[f"stepahead: {stage}"]
    with Held(second_thread(held) if stage == "gpu" else held):
        began_s = time.monotonic()
        lines = end(server)
        assert time.monotonic() - began_s < END_SECONDS + 5
    assert f"note {stage} did not stop within 0.5 s and was killed" in lines
    (left,) = [line for line in lines if line.startswith("note left behind: ")]
    assert left.startswith(f"note left behind: {stage}, process {held}, ")
    assert ("dead" in left) == (stage == "scheduler")


def test_a_second_signal_is_heard_while_a_stage_does_not_go(start: Callable[..., Server]) -> None:
    server = start(TWO_THREADS, SLOW_FRONTEND)
    stuck = server.pids["stepahead: gpu"]
    with Held(second_thread(stuck)):
        os.kill(stuck, signal.SIGSTOP)
        server.wait_line("note gpu was killed")
        server.process.send_signal(signal.SIGTERM)
        server.wait_line("note finishing")
        time.sleep(0.15)
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 128 + signal.SIGTERM


def test_a_standby_that_ends_under_a_tracer_is_replaced(start: Callable[..., Server]) -> None:
    server = start(GPU, FRONTEND, standby=True)
    dead = pid(server, "gpu (standby)")
    with Held(dead) as tracer:
        os.kill(dead, signal.SIGKILL)
        server.wait_line("note the standby of gpu died (ended under a tracer, nobody knows how); another one")
        pid(server, "gpu (standby)", dead)
        tracer.let_go()
    wait_until(lambda: not psutil.pid_exists(dead))
    end(server)


def test_a_standby_that_is_given_up_and_does_not_go_holds_up_nobody(start: Callable[..., Server]) -> None:
    spec = {"stage": "gpu", "fake": "as standby: sleep in two threads", "ready_seconds": 5}
    server = start(spec, FRONTEND, standby=True)
    stuck = pid(server, "gpu (standby)")
    wait_until(lambda: len(psutil.Process(stuck).threads()) > 1)
    with Held(second_thread(stuck)) as tracer:
        server.wait_line("note the standby of gpu died (not prepared after 5 s); ")
        os.kill(pid(server, "gpu"), signal.SIGKILL)
        server.wait_line("note gpu died (killed by SIGKILL (is memory short?)), back after ")
        tracer.let_go()
    wait_until(lambda: not psutil.pid_exists(stuck))
    end(server)


@pytest.fixture
def child() -> Iterator[StageProcess]:
    memory, before = ServerMemory(config()), open_fds()
    which = spec("gpu", "in two threads")
    env = child_environment(which, config(), os.environ) | {"FAKE": "in two threads"}
    made = StageProcess(which, memory, env, None)
    wait_until(lambda: bool(made.listen()) and made.is_ready)
    wait_until(lambda: len(psutil.Process(made.pid).threads()) > 1)
    yield made
    assert open_fds() == before
    memory.close()


def test_collecting_never_waits_and_reaping_waits_for_so_long(child: StageProcess) -> None:
    with Held(second_thread(child.pid)) as tracer:
        assert not child.collect() and not child.exited
        began_s = time.monotonic()
        assert child.reap(0.3) is None
        assert 0.3 <= time.monotonic() - began_s < 2
        tracer.let_go()
    assert child.reap() == -signal.SIGKILL
    assert child.collect() and child.exited


def test_the_last_ones_are_named_and_their_descriptors_closed(child: StageProcess) -> None:
    burials = Burials()
    with Held(second_thread(child.pid)):
        assert burials.take(child) is None
        assert list(burials.look(time.monotonic())) == []
        (line,) = burials.end([], 0.1)
        assert line == f"left behind: gpu, process {child.pid}, of which the kernel or a tracer has not let go"
    assert child.reap() == -signal.SIGKILL
    assert burials.end([child], 0.1) == []
