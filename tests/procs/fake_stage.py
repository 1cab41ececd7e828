"""A stage for tests of the supervisor: boots as every stage does, then behaves as the variable FAKE says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from shm import child
from shm.child import Child, StartupError
from shm.control import DRAINING, FAILED, READY


def wait_for(c: Child, *states: int) -> None:
    while c.control.state not in states and not c.stopping:
        c.beat()
        c.own_doorbell.wait(lambda: c.control.state in states or c.stopping)


def serve(c: Child) -> None:
    while not c.stopping:
        c.beat()
        c.own_doorbell.wait(lambda: c.stopping)


def frontend(c: Child, rows: int, drain_s: float) -> None:
    """Has `rows` open, finishes them `drain_s` after the drain began; told of a failure, it writes the reason down."""
    stats = c.stats_writer()
    stats.set("open_rows", rows)
    c.ready()
    wait_for(c, DRAINING, FAILED)
    end_s = time.monotonic() + drain_s
    while not c.stopping and c.control.state != FAILED:
        c.beat()
        if time.monotonic() >= end_s:
            stats.set("open_rows", 0)
        c.own_doorbell.wait(lambda: c.stopping or c.control.state == FAILED, timeout_ms=10)
    if c.control.state == FAILED:
        Path(os.environ["FAKE_LOG"]).write_text(c.control.failure)


def misbehave(c: Child, how: str) -> None:
    if how == "exit 0":
        os._exit(0)
    if how == "exit 3":
        sys.exit(3)
    if how == "crash":
        raise RuntimeError("boom")
    if how == "crash in a thread":
        threading.Thread(target=lambda: 1 // 0).start()
        time.sleep(60)
    if how == "sleep in two threads":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if how.startswith("sleep"):
        time.sleep(60)
    if how == "dawdle":
        c.progress("dawdling")
        time.sleep(2)
        return
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "user's fault":
        raise StartupError("the file is broken")
    raise AssertionError(how)


def main() -> None:
    how = os.environ["FAKE"]
    if how == "dead before boot":
        sys.exit(7)
    with child.start() as c:
        if how.startswith("as standby: "):
            if c.is_standby:
                misbehave(c, how.removeprefix("as standby: "))
            how = "serve"
        c.take_over()
        if how.startswith("dies, then: "):
            how = {1: "when ready: crash", 2: how.removeprefix("dies, then: ")}.get(c.epoch, "serve")
        if how.startswith("once: "):
            how = how.removeprefix("once: ") if c.epoch == 1 else "serve"
        if how.startswith("frontend"):
            _, rows, drain_s = how.split()
            frontend(c, int(rows), float(drain_s))
        elif how == "hang":
            c.progress("counting sheep")
            time.sleep(60)
        elif how.startswith("at start: "):
            misbehave(c, how.removeprefix("at start: "))
        else:
            if how == "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if how == "in two threads":
                threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            if how == "with a child":
                subprocess.Popen(["sleep", "60"])
            if not how.startswith("when ready: "):  # it serves; said before it is ready, so that nobody misses it
                c.progress(f"memory of epoch {c.control.memory(c.stage)}")
            c.ready()
            if how == "says bad things at the end":
                sys.exit((serve(c), 5)[-1])
            if how.startswith("when ready: "):
                wait_for(c, READY)
                misbehave(c, how.removeprefix("when ready: "))
            serve(c)


if __name__ == "__main__":
    main()
