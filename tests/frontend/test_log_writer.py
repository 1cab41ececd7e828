"""Who writes to the log never waits and never fails; the lines keep their order, and lost ones are counted."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TextIO

import pytest

from frontend.log_writer import LogFile, LogWriter

ROOT = Path(__file__).resolve().parents[2]
PIPE_BYTES = 4096
LONG_SECONDS = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[IO[bytes], TextIO]]:
    read_fd, write_fd = os.pipe()
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with os.fdopen(read_fd, "rb", buffering=0) as read, os.fdopen(write_fd, "w") as write:
        yield read, write


def fill(stream: TextIO) -> None:
    os.write(stream.fileno(), b"x" * PIPE_BYTES)


def lines_of(read: IO[bytes], number: int) -> list[str]:
    """So many lines, after those of x."""
    told = b""
    while told.count(b"\n") < number:
        told += read.read(PIPE_BYTES)
    return told.decode().lstrip("x").splitlines()


def lost(number: int) -> str:
    return f"stepahead: {number} lines before this one were lost"


def test_the_order_of_two_streams_is_kept(tmp_path: Path) -> None:
    log, path = LogWriter(), tmp_path / "log"
    with path.open("a") as one, path.open("a") as other:
        for number in range(200):
            log.line(one if number % 3 else other, str(number))
        assert log.flush(LONG_SECONDS)
    assert path.read_text().split() == [str(number) for number in range(200)]


def test_nobody_waits_for_a_reader_and_lost_lines_are_counted(pipe: tuple[IO[bytes], TextIO]) -> None:
    read, write = pipe
    log = LogWriter(lines_max=3)
    fill(write)
    log.line(write, "first")
    while log._queue:  # the thread has it in hand, and waits
        pass
    for number in range(10):
        log.line(write, str(number))
    assert not log.flush(0.01)
    assert lines_of(read, 4) == ["first", "0", "1", "2"]
    assert log.flush(LONG_SECONDS)
    log.line(write, "next")
    assert lines_of(read, 2) == [lost(7), "next"]
    log.line(write, "last")
    assert lines_of(read, 1) == ["last"]


def test_a_stream_that_does_not_block_is_waited_for(pipe: tuple[IO[bytes], TextIO]) -> None:
    read, write = pipe
    log = LogWriter()
    os.set_blocking(write.fileno(), False)
    fill(write)
    log.line(write, "line " * 2000)
    assert not log.flush(0.01)
    assert lines_of(read, 1) == ["line " * 2000]


def no_space() -> TextIO:
    return open("/dev/full", "w")


def no_reader() -> TextIO:
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def closed() -> TextIO:
    with open(os.devnull, "w") as stream:
        pass
    return stream


@pytest.mark.parametrize("make", [no_space, no_reader, closed])
def test_a_stream_that_takes_nothing_loses_lines_and_no_more(make: Callable[[], TextIO], tmp_path: Path) -> None:
    log, bad = LogWriter(), make()
    log.line(bad, "a")
    log.line(bad, "b")
    with (tmp_path / "log").open("w") as good:
        log.line(good, "c")
        assert log.flush(LONG_SECONDS)
    bad.close()
    assert (tmp_path / "log").read_text().splitlines() == [lost(2), "c"]


def test_a_line_that_broke_off_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log, write = LogWriter(), os.write
    room = [2, 0]

    def short_write(fd: int, data: memoryview) -> int:
        if room and (size := room.pop(0)) == 0:
            raise OSError("no space")
        return write(fd, data[:size] if room else data)

    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr("frontend.log_writer.os.write", short_write)
        log.line(stream, "abcd")
        log.line(stream, "efgh")
        assert log.flush(LONG_SECONDS)
    assert (tmp_path / "log").read_text().splitlines() == ["ab", lost(1), "efgh"]


def test_any_text_on_any_stream(tmp_path: Path) -> None:
    log, memory = LogWriter(), io.StringIO()
    with (tmp_path / "log").open("w", encoding="ascii") as stream:
        log.line(stream, "caf\u00e9 \ud800")
        log.line(memory, "no file")
        assert log.flush(LONG_SECONDS)
    assert (tmp_path / "log").read_text() == "caf\\xe9 \\ud800\n"
    assert memory.getvalue() == "no file\n"


def test_no_room_for_a_thread_is_no_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def full(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    log = LogWriter()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        log.line(sys.__stderr__, "a")
    log.line(sys.__stderr__, "b")
    assert log.flush(LONG_SECONDS)
    assert capfd.readouterr().err == "a\nb\n"


def test_a_file_that_is_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    log = LogWriter()
    file = LogFile(sys.__stderr__, log)
    assert (file.write("abc"), file.fileno(), file.isatty()) == (3, 2, False)
    assert log.flush(LONG_SECONDS)
    assert capfd.readouterr().err == "abc"


def ended(code: str, redirect: str, **more: int) -> int:
    """The status of a program whose descriptors a shell has redirected."""
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", code]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, cwd=ROOT, env=env, timeout=60, check=False, **more).returncode  # type: ignore[call-overload,no-any-return]


OPEN = "import sys; from frontend.log_writer import *; open_closed_streams(); "
LEAVE = OPEN + "sys.stdout.write('answer'); leave(7)"


@pytest.mark.parametrize("redirect", ["", ">/dev/null", ">/dev/full", ">&-", ">/dev/full 2>&1"])
def test_the_status_stays_whatever_becomes_of_stdout(redirect: str) -> None:
    assert ended(LEAVE, redirect) == 7


def test_the_status_stays_while_a_thread_waits_for_a_reader(pipe: tuple[IO[bytes], TextIO]) -> None:
    _, write = pipe
    fill(write)
    code = "import threading, time; threading.Thread(target=put, args=(sys.stdout, 'y'), daemon=True).start(); "
    assert ended(OPEN + code + "time.sleep(0.2); leave(7)", "", stdout=write.fileno()) == 7


@pytest.mark.parametrize("redirect", ["", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_no_file_gets_the_number_of_a_closed_stream(redirect: str) -> None:
    code = OPEN + "print(1); print(2, file=sys.stderr); leave(open('/dev/null').fileno() > 2)"
    assert ended(code, redirect) == 1
