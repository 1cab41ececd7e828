"""Hogs compute, and are gone afterwards, however their parent ends."""

import subprocess
import sys
import time

import pytest

from tools.chaos_processes import stat_of
from tools.hogs import hogs


def test_they_compute_until_they_are_ended() -> None:
    with hogs(2) as pids:
        deadline = time.monotonic() + 30
        while not all(ticks(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert not any(stat_of(pid) for pid in pids)


def test_they_end_with_their_parent() -> None:
    code = (
        "import os\nfrom tools.hogs import hogs\nwith hogs(1) as pids:\n    print(*pids, flush=True)\n    os._exit(0)"
    )
    (pid,) = map(int, subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split())
    deadline = time.monotonic() + 30
    while (stat := stat_of(pid)) is not None and stat.state != "Z":
        if time.monotonic() > deadline:
            pytest.fail("it goes on")
        time.sleep(0.01)


def ticks(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[11])
