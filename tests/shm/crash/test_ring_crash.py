"""Nothing is lost, doubled or torn, whatever instruction a stage dies at; and the tests would see it if it were."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shm.segment import Segment
from tests.shm.crash.broken import store_in_pieces, store_whole
from tests.shm.crash.pipeline import spawn

ROOT = Path(__file__).resolve().parents[3]
A, B = 0x1111111111111111, 0x2222222222222222


def crash(how: str, *arguments: str) -> dict[str, Any]:
    """Run one crash test in a small process of its own, which it forks much faster than this one; see `main` there."""
    argv = [sys.executable, "-m", "tests.shm.crash.run", how, *arguments]
    result = subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_killed_at_random_instants() -> None:
    found = crash("random", "320", "1")
    assert found["errors"] == {}
    assert found["kills"] >= 320
    assert found["records_after"] >= 200, "the pipeline stood still"
    assert found["epochs"] > 20, "too few stages got anything done between the kills"


@pytest.mark.parametrize("role", ["Source", "Stage"])
def test_killed_at_every_bytecode(role: str) -> None:
    found = crash("bytecodes", role, "1")
    assert found["errors"] == {}
    assert found["kills"] > 300
    assert found["records"] > 20, "no victim came as far as its publish"


@pytest.mark.parametrize(
    ("role", "finding"),
    [("HeadFirstSource", "torn"), ("ReleaseFirstStage", "lost"), ("InputCursorStage", "doubled")],
)
def test_a_broken_rule_is_found(role: str, finding: str) -> None:
    found = crash("bytecodes", role, "5")  # the window of each fault is wider than this
    assert finding in found["errors"], found


def torn_reads(store: Callable[[memoryview, int], None], seconds: float) -> tuple[int, int]:
    """Return (reads that saw neither of the values that another process stores in turn, all reads)."""
    segment = Segment.create("words", 4096)
    words = segment.words
    words[1] = A

    class Storer:
        def __init__(self, _pipe: object) -> None:
            return

        def step(self) -> None:
            for _ in range(1000):
                store(words, A)
                store(words, B)

    pid = spawn(Storer, None)  # type: ignore[arg-type]
    torn = reads = 0
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and not (torn and reads > 10_000):
            for _ in range(1000):
                value = words[1]
                torn += value not in (A, B)
            reads += 1000
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        segment.close()
    return torn, reads


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="reader and writer must run at the same time")
def test_a_cursor_stored_in_pieces_is_found_and_a_whole_one_is_not() -> None:
    torn, reads = torn_reads(store_in_pieces, seconds=10)
    assert torn, reads
    torn, reads = torn_reads(store_whole, seconds=1)
    assert reads > 10_000
    assert not torn
