"""Who is killed is the seed's choice, and a process is killed, watched and made to exit from outside."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tools.chaos_exit import exit_now
from tools.chaos_kill import Cell, Death, Kill, KillError, Strike, Victim, cells_of, plan
from tools.chaos_processes import STAGES, stat_of

ON_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="writes registers of x86-64")
SLEEP = "import time; print(flush=True); time.sleep(600)"
LOOP = "print(flush=True)\nwhile True: pass"
THREADS = (
    "import threading, time; [threading.Thread(target=time.sleep, args=(600,)).start() for _ in range(4)]; "
    "print(flush=True); time.sleep(600)"
)


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_all_means_every_stage_but_the_supervisor() -> None:
    assert cells_of("all", "KILL,exit") == [Cell(stage, how) for stage in STAGES for how in ("KILL", "exit")]
    assert cells_of("gpu+scheduler,supervisor", "STOP") == [Cell("gpu+scheduler", "STOP"), Cell("supervisor", "STOP")]
    assert cells_of("gpu+gpu", "KILL")[0].stages == ("gpu", "gpu")


@pytest.mark.parametrize(
    ("stages", "hows"), [("gpus", "KILL"), ("gpu", "kill"), ("gpu+supervisor", "KILL"), ("gpu+all", "KILL")]
)
def test_what_is_unknown_is_told(stages: str, hows: str) -> None:
    with pytest.raises(KillError, match="is none of"):
        cells_of(stages, hows)


def test_the_plan_is_the_seeds() -> None:
    cells = cells_of("gpu,gpu+tokenizer", "KILL,STOP")

    def planned(seed: int, kills: int = 60) -> list[list[Kill]]:
        return list(plan(seed, cells, kills, (0.5, 1.5)))

    assert planned(1) == planned(1) != planned(2)
    phases = planned(1)
    assert [len(kills) for kills in phases] == [100, 100, 40]
    for kills in phases:
        assert [kill.cell for kill in kills] != sorted((kill.cell for kill in kills), key=cells.index), "in any order"
        assert {[kill.cell for kill in kills].count(cell) for cell in cells} == {len(kills) // 4}
    kills = [kill for phase in phases for kill in phase]
    assert all(0.5 <= kill.wait_s <= 1.5 for kill in kills)
    assert len({kill.wait_s for kill in kills}) == len(kills), "another instant each time"
    apart = [kill.apart_s for kill in kills if kill.cell.target == "gpu+tokenizer"]
    assert {len(one) for one in apart} == {2} and all(one[0] == 0 for one in apart)
    assert {one[1] == 0 for one in apart} == {True, False}, "both at once, and one after the other"


def test_a_server_whose_supervisor_dies_has_one_kill() -> None:
    phases = list(plan(3, cells_of("supervisor,gpu", "KILL"), 3, (0, 1)))
    assert [[kill.cell.target for kill in kills] for kills in phases] == [["gpu"] * 3, *[["supervisor"]] * 3]
    assert not list(plan(3, cells_of("gpu", "KILL"), 0, (0, 1)))


@ON_X86
@pytest.mark.parametrize("code", [SLEEP, LOOP, THREADS])
@pytest.mark.parametrize("status", [0, 7])
def test_a_process_is_made_to_exit(code: str, status: int) -> None:
    with running(code) as process:
        exit_now(process.pid, status)
        assert process.wait(60) == status


def test_a_process_that_is_gone_cannot_be_made_to_exit() -> None:
    with running(SLEEP) as process:
        process.kill()
        process.wait()
        with pytest.raises(OSError):
            exit_now(process.pid)


@pytest.mark.parametrize("how", ["KILL", "ABRT", "SEGV", pytest.param("exit", marks=ON_X86)])
def test_a_death_is_watched_to_the_end(how: str) -> None:
    with running(SLEEP) as process, contextlib.closing(Victim("gpu", process.pid)) as victim:
        death = Death("gpu", how, process.pid)
        victim.strike(death)
        collector = threading.Thread(target=process.wait)
        collector.start()
        victim.watch(death, 60)
        collector.join()
        assert 0 < death.struck_ns <= death.dead_ns <= death.collected_ns
        assert death.detection_ms == (death.collected_ns - death.struck_ns) / 1e6
        assert process.returncode == (0 if how == "exit" else -getattr(signal, f"SIG{how}"))


def test_a_stop_that_nobody_notices_is_seen_as_that() -> None:
    with running(SLEEP) as process, contextlib.closing(Victim("gpu", process.pid)) as victim:
        death = Death("gpu", "STOP", process.pid)
        victim.strike(death)
        victim.watch(death, 0.05)
        assert death.dead_ns == 0 and death.detection_ms is None, "nobody has noticed"
        process.kill()
        collector = threading.Thread(target=process.wait)
        collector.start()
        victim.watch(death, 60)
        collector.join()
        assert death.detection_ms == (death.collected_ns - death.struck_ns) / 1e6


def test_a_death_that_nobody_collects_is_seen_as_that() -> None:
    with running(SLEEP) as process, contextlib.closing(Victim("gpu", process.pid)) as victim:
        death = Death("gpu", "KILL", process.pid)
        victim.strike(death)
        victim.watch(death, 0.1)
        stat = stat_of(process.pid)
        assert stat is not None and stat.state == "Z" and stat.parent == os.getpid()
        assert death.dead_ns and not death.collected_ns and death.detection_ms is None


def test_recovery_counts_from_the_last_of_several_deaths() -> None:
    deaths = [Death("gpu", "KILL", 1, 1_000_000), Death("scheduler", "KILL", 2, 3_000_000)]
    strike = Strike(Kill(Cell("gpu+scheduler", "KILL"), 0.0, (0.0, 0.002)), deaths)
    assert (strike.at_ns, strike.recovery_ms) == (1_000_000, None)
    strike.recovered_ns = 8_000_000
    assert strike.recovery_ms == 5.0
