"""The tool that kills, against a real server with a tiny model: all is as it has to be without kills, and nothing of a
server is left behind when its supervisor dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.e2e.live_server import ROOT, descendants
from tests.model_factory import TinyLlama

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama().write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def chaos(model: Path, folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run the tool; its status, what it printed, and its report."""
    before = set(descendants(os.getpid()))
    files = ["--json", str(folder / "report.json"), "--picture", str(folder / "picture.svg")]
    small = [
        "--streams",
        "6",
        "--requests",
        "15",
        "--tokens",
        "24",
        "--start",
        "--max-len 256 --check-order --threads 1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "frontend.cli", "chaos", "--model", str(model), *small, *files, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(descendants(os.getpid())) <= before, "the tool ends what it started"
    assert (folder / "report.json").exists(), done.stderr
    ElementTree.parse(folder / "picture.svg")
    return done.returncode, done.stdout + done.stderr, json.loads((folder / "report.json").read_text())


def test_without_kills_every_answer_is_the_same_again(model: Path, tmp_path: Path) -> None:
    status, said, report = chaos(model, tmp_path, "--kills", "0", "--seed", "5")
    (row,) = report["rows"]
    assert (status, report["is_clean"], report["faults"]) == (0, True, []), said
    assert row["kills"] == 0 and row["requests"] >= 16, "15, and probes beside them"
    assert row["recovery_ms_p99"] > 0
    assert not any(row["leaks"].values()), "an idle server holds what it held before"


def test_nothing_is_left_behind_a_supervisor(model: Path, tmp_path: Path) -> None:
    status, said, report = chaos(
        model, tmp_path, "--kills", "1", "--stage", "supervisor", "--signal", "KILL", "--apart", "0.1,0.3"
    )
    _, row = report["rows"]
    assert (status, row["recovered"], report["faults"]) == (0, 1, []), said
    assert row["requests"] >= 6, "all streams were cut, and what they had was right"
    assert not any(row["leaks"].values())


@pytest.mark.parametrize("seed", [11])
def test_every_stage_is_killed_in_every_way_and_nobody_notices(model: Path, tmp_path: Path, seed: int) -> None:
    ways = ("--kills", "1", "--stage", "all", "--signal", "KILL,STOP,ABRT,SEGV,exit", "--apart", "0.2,0.6")
    status, said, report = chaos(model, tmp_path, *ways, "--seed", str(seed))
    assert (status, report["is_clean"], report["faults"]) == (0, True, []), said
    _, *rows = report["rows"]
    assert len(rows) == 25 and all(row["kills"] == row["recovered"] == 1 for row in rows)


@pytest.mark.parametrize(
    ("rule", "stage", "kinds"),
    [
        ("scheduler.counts_before_tokens", "scheduler", "different,missing,lost"),
        ("scheduler.takes_old_results", "scheduler", "different,missing,lost"),
        ("gpu.runs_old_steps", "gpu", "different,missing,lost"),
        ("text.ignores_delivered", "detokenizer", "doubled"),
    ],
)
def test_a_rule_that_is_broken_is_found_out(model: Path, tmp_path: Path, rule: str, stage: str, kinds: str) -> None:
    """Or else a run that finds nothing would prove nothing."""
    ways = ("--kills", "4", "--stage", stage, "--signal", "KILL", "--apart", "0.2,0.6", "--bound", "5")
    status, said, _ = chaos(model, tmp_path, *ways, "--plant", rule, "--expect", kinds)
    assert status == 0, said
