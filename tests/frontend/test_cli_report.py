"""The moving line on a terminal that has gone, or that takes nothing: the server starts all the same."""

from __future__ import annotations

import os
import sys
import termios
import threading

import pytest

from frontend import cli_report
from frontend.cli_report import StartLine, tell
from frontend.log_writer import LogWriter


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> LogWriter:
    log = LogWriter()
    monkeypatch.setattr(cli_report, "LOG", log)
    monkeypatch.setenv("TERM", "xterm")
    return log


def start() -> None:
    line = StartLine()
    assert line._console.is_terminal
    for number in range(20):
        line.show(f"gpu: {number}")
    line.end()
    tell("gpu: boom")


def test_the_line_moves_and_goes(log: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        start()
        assert log.flush(30)
        told = b""
        while not told.endswith(b"stepahead: gpu: boom\r\n"):  # it comes in pieces
            told += os.read(master, 65536)
        assert b"starting: gpu: " in told
        os.close(master)


def test_a_terminal_that_has_gone(log: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        os.close(master)
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
        start()
        assert log.flush(30)


def test_a_terminal_that_takes_nothing(log: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    terminal = os.fdopen(slave, "w")
    termios.tcflow(slave, termios.TCOOFF)  # as by Ctrl-S
    monkeypatch.setattr(sys, "stderr", terminal)
    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(30)
    assert not starting.is_alive() and not log.flush(0.01)
    os.close(master)
    assert log.flush(30)
    terminal.close()
