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
    small = ["--streams", "6", "--requests", "15", "--tokens", "24", "--start", "--max-len 256 --check-order"]
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
    assert (row["requests"], row["kills"]) == (15, 0)
    assert not any(row["leaks"].values()), "an idle server holds what it held before"


def test_nothing_is_left_behind_a_supervisor(model: Path, tmp_path: Path) -> None:
    status, said, report = chaos(
        model, tmp_path, "--kills", "1", "--stage", "supervisor", "--signal", "KILL", "--apart", "0.1,0.3"
    )
    (row,) = report["rows"]
    assert (status, row["recovered"], report["faults"]) == (0, 1, []), said
    assert row["requests"] >= 6, "all streams were cut, and what they had was right"
    assert not any(row["leaks"].values())
