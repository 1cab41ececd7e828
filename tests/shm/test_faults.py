"""Fault points: off unless asked for, exact when asked for, and the same names in code and documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shm import faults
from shm.faults import NAMES, WRONGS, Fault, Faults, parse

ROOT = Path(__file__).resolve().parents[2]
WRONG = re.compile(r'\bwrong\("([\w.]+)"\)')
CALL = re.compile(r'\bfault\(\s*"([\w.]+)"')
ROW = re.compile(r"^\| `([\w.]+)` \| .+ \| .+ \|$", re.MULTILINE)


def test_code_list_and_table_name_the_same_points() -> None:
    called: list[str] = []
    for folder in ("shm", "gpu", "procs", "frontend"):
        for path in (ROOT / folder).rglob("*.py"):
            called += CALL.findall(path.read_text()) if path.name != "faults.py" else []
    assert sorted(called) == sorted(NAMES), "each point is in the code once"
    assert sorted(ROW.findall((ROOT / "ARCHITECTURE.md").read_text())) == sorted(NAMES)


def test_off_is_an_empty_function() -> None:
    assert faults.VARIABLE not in os.environ
    assert faults.fault is faults._off and faults.wrong is faults._right
    assert not any(map(faults.wrong, WRONGS))


def test_every_rule_that_can_be_broken_is_asked_for_somewhere_and_only_those_named_are_broken() -> None:
    asked = {
        name
        for folder in ("gpu", "procs", "frontend")
        for path in (ROOT / folder).rglob("*.py")
        for name in WRONG.findall(path.read_text())
    }
    assert asked == set(WRONGS)
    broken = Faults(f"{WRONGS[0]} gpu.step_seen=raise@2")
    assert [broken.does_wrong(name) for name in WRONGS] == [True, False, False, False]
    broken.point("gpu.step_seen")
    with pytest.raises(Fault):
        broken.point("gpu.step_seen")
    with pytest.raises(AssertionError, match="nowhere"):
        broken.point("gpu.nowhere")


def test_whoever_plants_them_is_told_their_names() -> None:
    for page in ("README.md", "ARCHITECTURE.md"):
        assert all(f"`{name}`" in (ROOT / page).read_text() for name in WRONGS), page


@pytest.mark.parametrize("text", ["gpu.nowhere=crash", "gpu.step_seen", "gpu.step_seen=burn", "gpu.step_seen=crash@x"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no fault"):
        parse(text)


def passes(text: str, epoch: int = 1, value: int = 0) -> list[int]:
    """At which of ten passes through gpu.step_seen the fault happens."""
    points, found = Faults(text), []
    points.epoch = epoch
    for number in range(1, 11):
        try:
            points.point("gpu.step_seen", lambda: (value,))
            points.point("gpu.step_launched")
        except Fault:
            found.append(number)
    return found


def test_it_happens_at_the_pass_in_the_epoch_and_with_the_value_that_is_said() -> None:
    assert passes("gpu.step_seen=raise") == [1]
    assert passes("gpu.step_seen=raise@3 gpu.step_seen=raise@7") == [3, 7]
    assert passes("gpu.step_seen=raise@3", epoch=2) == []
    assert passes("gpu.step_seen=raise@3#2", epoch=2) == passes("gpu.step_seen=raise@3#*", epoch=9) == [3]
    assert passes("gpu.step_seen=raise?7", value=7) == [1]
    assert passes("gpu.step_seen=raise?7") == passes("gpu.step_launched=raise?0") == []
    assert passes("gpu.step_seen=delay:0.001@2") == []
    assert passes("gpu.step_seen=raise+30#*") == passes("gpu.step_seen=raise@2+0.5#1") == []
    assert passes("gpu.step_seen=delay:0.01 gpu.step_seen=raise@2+0.005")[0] > 2


@pytest.mark.parametrize(("action", "status"), [("crash", -9), ("abort", -6), ("segv", -11), ("exit", 0), ("raise", 1)])
def test_actions(action: str, status: int) -> None:
    program = "from shm.faults import fault; fault('gpu.step_seen'); import time; time.sleep(60)"
    env = {**os.environ, faults.VARIABLE: f"gpu.step_seen={action}"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, timeout=30, check=False
    )
    assert done.returncode == status


def test_who_hangs_does_so_in_one_thread_and_for_ever() -> None:
    program = (
        "import threading, time; from shm.faults import fault; "
        "threads = [threading.Thread(target=fault, args=('gpu.step_seen',), daemon=True) for _ in range(2)]; "
        "[thread.start() for thread in threads]; time.sleep(0.2); print([thread.is_alive() for thread in threads])"
    )
    env = {**os.environ, faults.VARIABLE: "gpu.step_seen=hang"}
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert said.stdout.strip() == "[True, False]"
