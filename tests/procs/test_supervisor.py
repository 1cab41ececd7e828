"""The life of a server of fake stages: start, drain, every way to die, restarts, and nothing left in any of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
FRONTEND = {"stage": "frontend", "fake": "frontend 0 0"}
GPU = {"stage": "gpu", "fake": "serve"}


def runs(pid: int) -> bool:
    """Whether the process is there and not merely waiting for its new parent, init, to collect it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """A fake server as a subprocess, and what it printed."""

    def __init__(
        self,
        tmp_path: Path,
        *stages: dict[str, object],
        drain_seconds: float = 20,
        standby: bool = False,
        no_room: tuple[int, ...] = (),
    ) -> None:
        self.log = tmp_path / "frontend.log"
        order = {"stages": stages, "drain_seconds": drain_seconds, "standby": standby, "no_room": no_room}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.procs.fake_server", json.dumps(order)],
            cwd=ROOT,
            env={**os.environ, "FAKE_LOG": str(self.log)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.pids: dict[str, int] = {}

    def wait_line(self, start: str, seconds: float = 60) -> str:
        """The next line that begins so; without one for so long the server is killed."""
        assert self.process.stdout is not None
        watch = threading.Timer(seconds, self.process.kill)
        watch.start()
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                if line.startswith(start):
                    self.note_children()
                    return self.lines[-1]
        finally:
            watch.cancel()
        raise AssertionError(f"no line {start!r} in {self.lines}: {self.process.communicate()[1]}")

    def note_children(self) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.pids[name_of(child)] = child.pid

    def end(self, seconds: float = 40) -> tuple[int, list[str]]:
        out, self.errors = self.process.communicate(timeout=seconds)
        self.lines += out.splitlines()
        self.check_nothing_left()
        return self.process.returncode, self.lines

    def check_nothing_left(self) -> None:
        deadline = time.monotonic() + 1
        while alive := [name for name, pid in self.pids.items() if runs(pid)]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.01)
        left = [line for line in self.lines if line.startswith("left")]
        assert left == ["left fds []", "left maps []"] or self.process.returncode == -signal.SIGKILL, left
        port = next((int(line.split()[1]) for line in self.lines if line.startswith("port")), None)
        if port is not None:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0


def name_of(child: psutil.Process, seconds: float = 5) -> str:
    """Its command line, which is empty for the moment in which it becomes another program, and for a zombie."""
    deadline = time.monotonic() + seconds
    while not (name := " ".join(child.cmdline()).strip()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return name


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    started: list[Server] = []

    def one(*stages: dict[str, object], **more: Any) -> Server:
        started.append(Server(tmp_path, *stages, **more))
        return started[-1]

    yield one
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


def test_starts_reports_and_stops_in_reverse(start: type[Server]) -> None:
    server = start(GPU, {"stage": "scheduler", "fake": "serve"}, FRONTEND)
    server.wait_line("ready")
    titles = sorted(title for title in server.pids if title.startswith("stepahead: "))
    assert titles == ["stepahead: frontend", "stepahead: gpu", "stepahead: scheduler"]
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0, server.errors
    assert not [line for line in lines if line.startswith(("note", "failed"))]


DEATHS = [
    ("when ready: exit 0", "ended with status 0, without a reason"),
    ("when ready: exit 3", "ended with status 3, without a reason"),
    ("when ready: killed", "killed by SIGKILL (is memory short?)"),
    ("when ready: crash", "RuntimeError: boom"),
    ("when ready: crash in a thread", "ZeroDivisionError: integer division or modulo by zero"),
    ("when ready: sleep", "hung: asleep without a heartbeat for 1.0 s"),
    ("at start: exit 0", "ended with status 0, without a reason"),
]


@pytest.mark.parametrize(("fake", "reason"), DEATHS)
def test_a_stage_that_dies_is_started_again_alone(start: type[Server], fake: str, reason: str) -> None:
    server = start({"stage": "gpu", "fake": f"once: {fake}"}, {"stage": "frontend", "fake": "frontend 0 0"})
    server.wait_line("ready")
    before = dict(server.pids)
    line = server.wait_line(f"note gpu died ({reason}), back after ")
    assert line.endswith(" in epoch 2; 0 requests were queued again")
    assert server.pids["stepahead: frontend"] == before["stepahead: frontend"]
    assert fake.startswith("at start") or server.pids["stepahead: gpu"] != before.get("stepahead: gpu")
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0
    assert len([line for line in lines if "died" in line and "not back" not in line]) == 1
    assert ("Traceback" in server.errors) == ("crash" in fake)
    memory = 1 if "killed" in fake else 2  # that of the first one is sound where nothing went wrong in it
    assert [line for line in lines if line.startswith("progress gpu: memory")] == [
        f"progress gpu: memory of epoch {memory}"
    ]


@pytest.mark.parametrize(("fake", "reason"), [*DEATHS, ("dead before boot", "ended with status 7, without a reason")])
def test_deaths_in_a_row_end_the_server(start: type[Server], fake: str, reason: str) -> None:
    server = start({"stage": "gpu", "fake": fake, "deaths": 1}, {"stage": "frontend", "fake": "frontend 1 9"})
    if fake.startswith("when ready"):
        server.wait_line("ready")
    status, lines = server.end()
    assert status == 1
    (failed,) = [line for line in lines if line.startswith("failed")]
    assert failed == f"failed gpu: {reason}; it has died too often, 2 times in a row"
    if fake.startswith("when ready"):
        assert "failed " + server.log.read_text() == failed  # the clients were told
    (first,) = [line for line in lines if "died" in line and line.startswith("note") and "not back" not in line]
    assert reason in first


def test_what_a_stage_says_before_the_server_is_ready_ends_it_at_once(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "at start: user's fault"}, FRONTEND)
    status, lines = server.end()
    assert status == 1
    assert [line for line in lines if line.startswith("failed")] == ["failed gpu: the file is broken"]


def test_a_stopped_stage_is_killed_and_started_again(start: type[Server]) -> None:
    server = start(GPU, FRONTEND)
    server.wait_line("ready")
    stopped = server.pids["stepahead: gpu"]
    os.kill(stopped, signal.SIGSTOP)
    server.wait_line("note gpu died (stopped by a signal), back after ")
    assert not runs(stopped)
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0
    assert [line for line in lines if line.startswith("progress gpu:")] == ["progress gpu: memory of epoch 1"] * 2


def test_a_stage_that_is_stopped_while_it_starts_does_not_hold_up_the_server(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "hang"}, FRONTEND)
    server.wait_line("progress gpu")
    os.kill(server.pids["stepahead: gpu"], signal.SIGSTOP)
    server.wait_line("progress gpu")  # of the next one
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0
    assert "note gpu died (stopped by a signal) and did not come back" in lines


def test_a_stage_that_hangs_when_it_is_started_again_is_started_once_more(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "dies, then: hang", "asleep_seconds": 0.4}, FRONTEND)
    server.wait_line("ready")
    server.wait_line("note gpu died (RuntimeError: boom), and again ")
    assert server.wait_line("note gpu died (hung: asleep without a heartbeat for 0.4 s), back after ").endswith(
        " in epoch 3; 0 requests were queued again"
    )
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


@pytest.mark.parametrize(("then", "memory"), [("at start: killed", 3), ("when ready: killed", 2)])
def test_who_never_served_does_not_make_sound_what_an_error_left(start: type[Server], then: str, memory: int) -> None:
    server = start({"stage": "gpu", "fake": f"dies, then: {then}"}, FRONTEND)
    server.wait_line("ready")
    server.wait_line("note gpu died (killed by SIGKILL (is memory short?)), back after ")
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0
    assert f"progress gpu: memory of epoch {memory}" in lines, "what the third one is told"


def test_a_start_that_finds_no_room_is_tried_again(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "once: when ready: killed"}, FRONTEND, no_room=(3, 4))
    server.wait_line("ready")
    line = server.wait_line("note gpu died (killed by SIGKILL (is memory short?)), back after ")
    assert line.endswith(" in epoch 4; 0 requests were queued again")
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


@pytest.mark.parametrize("no_room", [(2,), tuple(range(3, 20))], ids=["at first", "for ever"])
def test_without_room_for_a_stage_the_server_ends_and_says_so(start: type[Server], no_room: tuple[int, ...]) -> None:
    server = start(
        {"stage": "gpu", "fake": "serve"}, {"stage": "frontend", "fake": "once: when ready: killed"}, no_room=no_room
    )
    status, lines = server.end()
    (failed,) = [line for line in lines if line.startswith("failed")]
    assert status == 1 and failed.startswith("failed frontend: it cannot be started: Resource temporarily unavailable")


def test_a_dead_frontend_is_started_again_too(start: type[Server]) -> None:
    server = start(GPU, {"stage": "frontend", "fake": "once: when ready: killed"})
    server.wait_line("ready")
    line = server.wait_line("note frontend died (killed by SIGKILL (is memory short?)), back after")
    assert "their clients being gone" in line
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_a_frontend_that_cannot_live_has_nobody_to_tell(start: type[Server]) -> None:
    server = start(GPU, {"stage": "frontend", "fake": "when ready: killed", "deaths": 0})
    server.wait_line("ready")
    assert server.end()[0] == 1


def test_a_frontend_that_does_not_end_is_given_its_second_and_no_more(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "when ready: killed", "deaths": 0}, {"stage": "frontend", "fake": "deaf"})
    server.wait_line("ready")
    began = time.monotonic()
    assert server.end()[0] == 1
    assert 0.8 < time.monotonic() - began < 2


def test_a_hung_start_fails_with_its_last_words(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "hang", "ready_seconds": 6}, FRONTEND)
    status, lines = server.end()
    assert status == 1
    assert "progress gpu: counting sheep" in lines
    assert lines[-3] == "failed gpu: not ready after 6 s; the last it said was: counting sheep"


def test_draining_waits_for_open_rows(start: type[Server]) -> None:
    server = start(GPU, {"stage": "frontend", "fake": "frontend 3 0.5"})
    server.wait_line("ready")
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0
    assert 0.5 < time.monotonic() - began < 3
    assert "note finishing 3 open requests, at most 20 s; a second signal ends at once" in lines
    assert not server.log.exists()


def test_draining_too_long_tells_the_clients_and_is_no_failure(start: type[Server]) -> None:
    server = start(GPU, {"stage": "frontend", "fake": "frontend 3 60"}, drain_seconds=0.3)
    server.wait_line("ready")
    server.process.send_signal(signal.SIGINT)
    status, lines = server.end()
    assert status == 0
    assert "note 3 requests were not finished after 0.3 s" in lines
    assert "it was shut down" in server.log.read_text()


def test_a_stage_that_hangs_does_not_draw_out_a_drain_that_failed(start: type[Server]) -> None:
    """Its own time to stop, and that of every stage before it, are not added to the deadline of the drain."""
    server = start(
        {"stage": "gpu", "fake": "deaf", "stop_seconds": 30},
        {"stage": "frontend", "fake": "frontend 3 60"},
        drain_seconds=0.3,
    )
    server.wait_line("ready")
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0
    assert "note 3 requests were not finished after 0.3 s" in lines
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(start: type[Server], second: signal.Signals) -> None:
    server = start(GPU, {"stage": "frontend", "fake": "frontend 3 60"})
    server.wait_line("ready")
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("note finishing")
    time.sleep(0.15)
    began = time.monotonic()
    server.process.send_signal(second)
    status, _ = server.end()
    assert status == 128 + second
    assert time.monotonic() - began < 10, "the frontend would have taken a minute"


def test_two_signals_in_one_breath_are_one(start: type[Server]) -> None:
    server = start(GPU, {"stage": "frontend", "fake": "frontend 3 0.5"})
    server.wait_line("ready")
    server.process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGINT)
    status, lines = server.end()
    assert status == 0
    assert "note SIGINT: ended at once" not in lines


def test_a_death_while_draining_draws_it_out_and_no_more(start: type[Server]) -> None:
    server = start(GPU, {"stage": "frontend", "fake": "frontend 3 1.5"})
    server.wait_line("ready")
    server.process.send_signal(signal.SIGTERM)
    server.wait_line("note finishing")
    os.kill(server.pids["stepahead: gpu"], signal.SIGKILL)
    status, lines = server.end()
    assert status == 0
    assert any(line.startswith("note gpu died (killed by SIGKILL") for line in lines)


def test_a_stage_that_ignores_sigterm_is_killed(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "deaf", "stop_seconds": 0.5}, FRONTEND)
    server.wait_line("ready")
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0
    assert "note gpu did not stop within 0.5 s and was killed" in lines


def test_a_stage_that_stops_badly_is_noted(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "says bad things at the end"}, FRONTEND)
    server.wait_line("ready")
    server.process.send_signal(signal.SIGTERM)
    status, lines = server.end()
    assert status == 0
    assert "note gpu stopped with status 5" in lines


def test_sigterm_during_the_start_stops_it(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "hang"}, FRONTEND)
    server.wait_line("progress gpu")
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert time.monotonic() - began < 2


def test_children_of_children_go_too(start: type[Server]) -> None:
    server = start({"stage": "gpu", "fake": "with a child"}, FRONTEND)
    server.wait_line("ready")
    assert "sleep 60" in server.pids
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_the_death_of_the_supervisor_takes_its_children_along(start: type[Server]) -> None:
    server = start(GPU, {"stage": "scheduler", "fake": "serve"}, FRONTEND)
    server.wait_line("ready")
    assert len(server.pids) == 3
    server.process.kill()
    assert server.end()[0] == -signal.SIGKILL
