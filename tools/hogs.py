"""Processes that do nothing but compute, so that a machine is busy beside what is measured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# It ends by itself once who started it is not its parent any more.
_HOG = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(1_000_000))"


@contextmanager
def hogs(count: int) -> Iterator[list[int]]:
    """Run `count` of them meanwhile; gives their pids."""
    command = [sys.executable, "-S", "-c", _HOG, str(os.getpid())]
    running = [subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield [one.pid for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
