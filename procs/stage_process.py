"""One child process as its parent sees it: a pidfd that becomes readable when it ends, and a pipe on which it speaks.

Owns the spawn, the end and the reaping of one child, and the word that makes a standby the stage. It decides nothing:
the supervisor does. Only what takes a number of seconds waits here, and no longer than so.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import orjson

from procs.child_specs import ChildSpec, command
from procs.server_memory import ServerMemory
from shm.child import WORD_BYTES

LAST_WORDS_SECONDS = 0.5  # from an error line to the end of who wrote it
POLL_SECONDS = 0.005  # between two looks at a dead one that a tracer holds
REAP_SECONDS = 10.0  # from a kill to the end of a process that the kernel lets go, however busy the machine is


class Said(NamedTuple):
    """One line of the ready pipe."""

    event: str  # "progress", "prepared", "ready" or "error"
    text: str


class StageProcess:
    """A running (or dead, and not yet collected) child of this process."""

    def __init__(
        self,
        spec: ChildSpec,
        memory: ServerMemory,
        env: Mapping[str, str],
        listen_fd: int | None,
        standby: bool = False,
    ) -> None:
        """Start the child. standby: it only prepares itself, until `take_over`.

        Raises OSError if the system has no room for another process.
        """
        self.spec = spec
        self.stage = spec.stage
        self.is_prepared = False  # a standby: nothing is left to be done without the word
        self.prepared_s = 0.0  # since when
        self.is_ready = False
        self.ready_s = 0.0  # since when
        self.last_words = ""
        self.error = ""
        self.error_s = 0.0  # since when
        self.verdict = ""  # why it was killed, if it was
        self.killed_s = 0.0  # since when
        self.exited = False  # all of its threads are gone: it stores nothing any more
        self.silent = False  # the pipe is at its end: the child is dead, or about to be
        self.started_s = time.monotonic()
        self._unread = b""
        self.ready_fd, child_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.ready_fd, False)
        boot_fd = word_end = self._word_fd = self.pidfd = -1
        try:
            if standby:
                word_end, self._word_fd = os.pipe2(os.O_CLOEXEC)
            word = word_end if standby else None
            record = memory.boot_record(spec.stage, child_end, listen_fd if spec.listens else None, word)
            boot_fd = record.to_memfd()
            # A process group of its own: Ctrl-C in a terminal reaches the supervisor alone, which decides.
            self._process = subprocess.Popen(
                command(spec, boot_fd, standby),
                stdin=subprocess.DEVNULL,
                pass_fds=[*record.fds, boot_fd],
                env=env,
                process_group=0,
            )
            self.pid = self._process.pid
            self.pidfd = self._open_pidfd()
        except BaseException:
            self.close()
            raise
        finally:
            for fd in (child_end, boot_fd, word_end):
                if fd >= 0:
                    os.close(fd)

    def _open_pidfd(self) -> int:
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # no descriptor is left: a child that nobody can watch is none
            self._process.kill()  # with its first instructions still before it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LAST_WORDS_SECONDS)
            raise

    def watch(self, selector: selectors.BaseSelector, heard: Callable[[], None], died: Callable[[], None]) -> None:
        """Have `heard` called whenever the child has said something, and `died` at its end."""
        selector.register(self.ready_fd, selectors.EVENT_READ, heard)
        selector.register(self.pidfd, selectors.EVENT_READ, died)

    def unwatch(self, selector: selectors.BaseSelector) -> None:
        """Call neither any more; before it is reaped, since its descriptors' numbers are others' then."""
        for fd in (self.ready_fd, self.pidfd):
            if fd >= 0 and fd in selector.get_map():
                selector.unregister(fd)

    def take_over(self, epoch: int) -> None:
        """Tell a standby to be the stage, in this epoch, as soon as it is prepared. Never waits."""
        self.started_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it has just died: the pidfd tells
            os.write(self._word_fd, epoch.to_bytes(WORD_BYTES, "little"))
        self._close_word()

    def _close_word(self) -> None:
        if self._word_fd >= 0:
            os.close(self._word_fd)
            self._word_fd = -1

    def close(self) -> None:
        """Give up what it is watched and told by, if that has not happened yet."""
        self._close_word()
        for fd in (self.pidfd, self.ready_fd):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.ready_fd = -1

    def listen(self) -> list[Said]:
        """Return what the child has said since the last call. Never waits."""
        while True:
            try:
                piece = os.read(self.ready_fd, 65536)
            except BlockingIOError:
                break
            if not piece:
                self.silent = True
                break
            self._unread += piece
        *lines, self._unread = self._unread.split(b"\n")
        said = [Said(**orjson.loads(line)) for line in lines]
        for event, text in said:
            if event == "prepared":
                self.is_prepared, self.prepared_s = True, time.monotonic()
            if event == "ready":
                self.is_ready, self.ready_s = True, time.monotonic()
            self.last_words = text or self.last_words
            if event == "error" and not self.error:
                self.error, self.error_s = text, time.monotonic()
        return said

    def wait_exit(self, seconds: float) -> bool:
        """Wait for the end of the child; return whether it came. It is not reaped yet."""
        if not self.exited:
            poller = select.poll()
            poller.register(self.pidfd, select.POLLIN)
            self.exited = bool(poller.poll(max(0.0, seconds) * 1000))
        return self.exited

    def terminate(self) -> None:
        """Ask the child to end."""
        if not self.exited:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the child's process group, whatever of it is left."""
        # Before the wait only: until then the kernel gives the number of the group to nobody else.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def condemn(self, reason: str) -> None:
        """Kill it, and remember why. It may store something until `exited`."""
        self.verdict, self.killed_s = reason, time.monotonic()
        self.kill()

    @property
    def lives(self) -> bool:
        """Whether it has neither ended nor been condemned, as far as has been looked."""
        return not self.exited and not self.verdict

    @property
    def status(self) -> int | None:
        """Of one that was collected; negative: the signal that ended it."""
        return self._process.returncode

    def collect(self) -> bool:
        """Kill what is left of the child, and collect it if it can be; return whether it has been. Never waits.

        A dead one cannot be while a tracer holds it, who is told of its end first.
        """
        if self._process.returncode is None:
            self.kill()
            if self._process.poll() is None:
                return False
            self.exited = True
            self.close()
        return True

    def reap(self, seconds: float = REAP_SECONDS) -> int | None:
        """Kill the child and wait until it is collected, at most for so long. Returns its status, None if it is not."""
        deadline_s = time.monotonic() + seconds
        self.kill()
        if self.pidfd >= 0:
            self.wait_exit(seconds)
        while not self.collect() and time.monotonic() < deadline_s:
            time.sleep(POLL_SECONDS)
        return self.status

    def how_it_ended(self) -> str:
        """Collect the dead child if it can be, and say why it ended, in its own words if it had any."""
        assert self.exited
        self.listen()
        self.collect()
        status = self.status
        if self.verdict or self.error:
            return self.verdict or self.error
        if status is None:
            return "ended under a tracer, nobody knows how"
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
            return f"killed by {name}" + (" (is memory short?)" if -status == signal.SIGKILL else "")
        return f"ended with status {status}, without a reason"
