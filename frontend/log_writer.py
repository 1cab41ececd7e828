"""Lines for people, written by a thread of its own: whoever has something to say never waits for whoever reads it.

Owns the queue and the thread. The order of lines is kept, over both streams. What cannot be written is lost, and the
next line that gets through says how many; no error of a stream reaches anybody, and none may end a server or change its
status.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self, TextIO

LINES_MAX = 1000  # that wait to be written; those after them are lost
LAST_LINES_SECONDS = 0.5  # for what is left at the end, if nobody reads it


class LogWriter:
    """A queue of texts and the thread that empties it. As a context manager it writes what is left at its end."""

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        self._lines_max = lines_max
        self._changed = threading.Condition()
        self._queue: deque[tuple[TextIO, str] | int] = deque()  # an int: so many were lost here
        self._thread: threading.Thread | None = None
        self._is_writing = False
        self._lost = 0  # since the last line that got through; the thread's own
        self._cut = False  # a line has broken off in its middle; the thread's own

    def line(self, stream: TextIO, text: str) -> None:
        """Have a line written to a stream. Never waits."""
        self.write(stream, text + "\n")

    def write(self, stream: TextIO, text: str) -> None:
        """Have a text written as it is. Never waits."""
        with self._changed:
            if len(self._queue) < self._lines_max:
                self._queue.append((stream, text))
            elif isinstance(last := self._queue[-1], int):
                self._queue[-1] = last + 1
            else:
                self._queue.append(1)
            self._changed.notify_all()
            if self._thread is None:
                self._start()

    def flush(self, seconds: float = LAST_LINES_SECONDS) -> bool:
        """Wait until all is written, or lost, but no longer than this. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_writing, seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def _start(self) -> None:
        # Not before the first line, and no part of the program's end: it may wait for a reader that never comes.
        thread = threading.Thread(target=self._run, name="log", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for a thread: the next line may find some
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue)
                entry = self._queue.popleft()
                self._is_writing = True
            if isinstance(entry, int):
                self._lost += entry
            else:
                self._put(*entry)

    def _put(self, stream: TextIO, text: str) -> None:
        told = f"stepahead: {self._lost} lines before this one were lost\n" if self._lost else ""
        try:
            put(stream, ("\n" if self._cut else "") + told + text, self._note_cut)
            self._lost = 0
        except (OSError, ValueError):  # full, closed, or nobody is left who reads it
            self._lost += 1

    def _note_cut(self, left: int) -> None:
        self._cut = left > 0


def put(stream: TextIO, text: str, left: Callable[[int], None] = lambda _bytes: None) -> None:
    """Write a text, and wait for whoever reads it. left: is told how many bytes are left. Raises OSError, ValueError.

    Not through the stream: that is locked while somebody waits in it, and then the end of the program would wait, too.
    """
    try:
        fd = stream.fileno()
    except OSError:  # a stream that is no file
        stream.write(text)
        stream.flush()
        return
    data = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
    while data:
        try:
            data = data[os.write(fd, data) :]
            left(len(data))
        except BlockingIOError:  # another process has made it so
            select.select([], [fd], [])


LOG = LogWriter()


class LogFile:
    """What the log writes to a stream, as a file for who wants one: it takes everything, and never waits."""

    def __init__(self, stream: TextIO, log: LogWriter) -> None:
        self._stream = stream
        self._log = log
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        self._log.write(self._stream, text)
        return len(text)

    def flush(self) -> None:
        """Nothing: the log never waits."""

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


def open_closed_streams() -> None:
    """Open /dev/null for what of 0, 1 and 2 is closed: else the next file gets the number, and is written to.

    Before anything else of a program is opened.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - to the end of the program


def leave(status: int) -> NoReturn:
    """End the program with this status, whatever becomes of what stdout still holds."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # the interpreter would try again, and end with a status of its own
        os._exit(status)
    sys.exit(status)
