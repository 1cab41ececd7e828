"""Whoever reads what a server prints may leave, or stop reading: a line may be lost, and nothing else may happen."""

from __future__ import annotations

import fcntl
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.live_server import ROOT, LiveServer, process_titles, spawn, wait_ready
from tests.e2e.stories import health, kill, wait_for, wait_whole
from tests.model_factory import TinyLlama

pytestmark = pytest.mark.model
PIPE_BYTES = 4096
WRITE = 1 if platform.machine() == "x86_64" else 64  # the number of the call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyLlama().write_hf(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def started() -> Iterator[list[LiveServer]]:
    servers: list[LiveServer] = []
    yield servers
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def full_pipe() -> tuple[int, int]:
    """Both ends of a pipe that takes nothing more."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(write, b"x" * PIPE_BYTES)
    return read, write


def lives_through_a_death(server: LiveServer) -> None:
    """It has something to say, and then goes on, and ends, as if it had been heard."""
    for stage in ("scheduler", "tokenizer"):
        before = health(server)[stage]["restarts"]
        kill(server, stage)
        wait_for(lambda stage=stage, before=before: health(server)[stage]["restarts"] > before, "restart", 60)  # type: ignore[misc]
        wait_whole(server)
    assert server.stop() == 0, server.text()


@pytest.mark.parametrize(
    "redirect", ["2>/dev/full", ">/dev/full 2>&1", "2>&-", ">&-", "<&- >&- 2>&-"], ids=lambda text: text or "none"
)
def test_no_place_for_what_it_says(model: str, started: list[LiveServer], redirect: str) -> None:
    started.append(server := spawn(model, "--log-seconds", "1", redirect=redirect))
    lives_through_a_death(wait_ready(server))


def test_a_reader_that_leaves(model: str, started: list[LiveServer]) -> None:
    read, write = os.pipe()
    started.append(server := spawn(model, "--log-seconds", "1", stderr=write))
    os.close(write)
    wait_ready(server)
    os.close(read)
    lives_through_a_death(server)


@pytest.mark.parametrize("both", [False, True])
def test_a_reader_that_does_not_read(model: str, started: list[LiveServer], both: bool) -> None:
    read, write = full_pipe()
    started.append(server := spawn(model, stderr=write, redirect=">&2" if both else ""))
    os.close(write)
    wait_ready(server)
    lives_through_a_death(server)
    os.close(read)


def test_a_reader_that_reads_in_the_end_is_told_all(model: str, started: list[LiveServer]) -> None:
    read, write = full_pipe()
    started.append(server := spawn(model, stderr=write))
    os.close(write)
    wait_ready(server)
    kill(server, "scheduler")
    wait_for(lambda: health(server)["scheduler"]["restarts"] > 0, "restart", 60)
    wait_whole(server)
    with open(read, "rb") as told:
        told.read(PIPE_BYTES)
        assert told.readline().startswith(b"stepahead: scheduler died (killed by SIGKILL")
        assert server.stop() == 0
        assert told.read() == b""


def test_an_answer_that_nobody_reads(model: str) -> None:
    """Ctrl-C ends `generate` with its own status while the answer waits for whoever reads it."""
    read, write = full_pipe()
    command = [sys.executable, "-m", "frontend.cli", "generate", "hello", "--model", model, "--max-tokens", "100"]
    asking = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    wait_for(lambda: waits_in_a_pipe(asking.pid), "answer", 120)
    asking.send_signal(signal.SIGINT)
    _, told = asking.communicate(timeout=30)
    assert (asking.returncode, told) == (130, b"")
    os.close(read)


def waits_in_a_pipe(pid: int) -> bool:
    """Whether a thread waits in write(1, ...)."""
    if "frontend" not in process_titles(pid):
        return False
    calls = [(task / "syscall").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return any(call[:2] == [str(WRITE), "0x1"] for call in calls)
