"""What a server holds is counted from outside, and a leak is what it holds more than before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import chaos_processes
from tools.chaos_processes import (
    Holdings,
    Leaks,
    below,
    holdings_of,
    is_complete,
    is_idle,
    leaks_between,
    restarts_of,
    samples,
    stages_below,
)

EXPOSITION = """# HELP stepahead_pages Pages
stepahead_pages 100.0
stepahead_pages_free 60.0
stepahead_pages_cached 33.0
stepahead_open_rows 2.0
stepahead_stage_restarts_total{stage="gpu"} 3.0
"""
# A parent and three children: a stage, its standby, and a zombie. A memfd of 8 KiB is open in all that live.
FAMILY = """
import os, sys, time
from setproctitle import setproctitle
fd = os.memfd_create("stepahead-test", 0)
os.truncate(fd, 8192)
dead = os.fork()
if not dead:
    os._exit(0)
os.waitid(os.P_PID, dead, os.WEXITED | os.WNOWAIT)
here, there = os.pipe()
if not os.fork():
    setproctitle("stepahead: gpu")
    os.write(there, b"x")
    time.sleep(600)
if not os.fork():
    setproctitle("stepahead: gpu (standby)")
    os.write(there, b"x")
    time.sleep(600)
os.read(here, 1)
os.read(here, 1)
setproctitle("stepahead: supervisor")
print(flush=True)
time.sleep(600)
"""


def test_samples_are_read_with_their_labels() -> None:
    metrics = samples(EXPOSITION)
    assert metrics["stepahead_pages"] == 100
    assert restarts_of(metrics)["gpu"] == 3 and restarts_of(metrics)["scheduler"] == 0
    assert not is_idle(metrics) and is_idle({**metrics, "stepahead_open_rows": 0})


def test_a_server_is_complete_once_its_standbys_are_prepared() -> None:
    assert is_complete({}), "there are servers without"
    assert not is_complete({"stepahead_standbys": 1, "stepahead_standbys_wanted": 5})
    assert is_complete({"stepahead_standbys": 5, "stepahead_standbys_wanted": 5})


def test_a_leak_is_what_is_held_more() -> None:
    before = Holdings(6, {"gpu": 10, "scheduler": 8}, 4096, 0, 0, 0)
    assert not leaks_between(before, before)
    after = Holdings(7, {"gpu": 7, "scheduler": 11}, 8192, 1, 5, 2)
    leaks = leaks_between(before, after)
    assert leaks == Leaks(processes=1, fds=3, memfd_bytes=4096, pages=5, zombies=1, rows=2)
    assert leaks, "what one stage has less does not make up for another"
    assert not leaks_between(after, before) or leaks_between(after, before).fds == 3
    total = Leaks(fds=1)
    total += leaks
    assert (total.fds, total.pages) == (4, 5)


@pytest.mark.parametrize("lists", [True, False], ids=["kernel's list of children", "all processes"])
def test_a_servers_processes_are_found_and_counted(lists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not lists:
        monkeypatch.setattr(chaos_processes, "_children", below)
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == b"\n"
        found = stages_below(parent.pid)
        assert sorted(found) == ["gpu", "supervisor"] and found["supervisor"] == parent.pid
        holdings = holdings_of(parent.pid, samples(EXPOSITION))
        assert (holdings.processes, holdings.zombies, holdings.memfd_bytes) == (2, 1, 8192)
        assert (holdings.pages, holdings.rows) == (7, 2)
        assert holdings.fds["gpu"] == len(list(Path(f"/proc/{found['gpu']}/fd").iterdir()))
        for child in below(parent.pid):
            os.kill(child, 9)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


@pytest.mark.parametrize(("words", "stage"), [([], "gpu"), (["--standby"], None)])
def test_a_stage_is_known_before_it_has_a_title(words: list[str], stage: str | None) -> None:
    code = ["-c", "print(flush=True); import time; time.sleep(600)", "-m", "procs.executor", "--boot-fd", "3", *words]
    with subprocess.Popen([sys.executable, *code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        assert chaos_processes.stage_of(process.pid) == stage
        process.kill()
    assert chaos_processes.stage_of(process.pid) is None
