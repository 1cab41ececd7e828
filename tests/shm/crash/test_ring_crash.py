"""Nothing is lost, doubled or torn, whatever instruction a stage dies at; and the tests would see it if it were."""

import os
import signal
import time
from collections.abc import Callable

import pytest

from shm.segment import Segment
from tests.shm.crash.broken import (
    HeadFirstSource,
    InputCursorStage,
    ReleaseFirstStage,
    store_in_pieces,
    store_whole,
)
from tests.shm.crash.pipeline import Role, Source, Stage, kill_at_every_bytecode, kill_at_random, spawn

A, B = 0x1111111111111111, 0x2222222222222222


def test_killed_at_random_instants() -> None:
    checker, after = kill_at_random(kills=320, seed=1)
    assert not checker.errors
    assert after >= 200, "the pipeline stood still"
    assert len(checker.epochs) > 20, "too few stages got anything done between the kills"


@pytest.mark.parametrize("role", [Source, Stage])
def test_killed_at_every_bytecode(role: Role) -> None:
    checker, kills = kill_at_every_bytecode(role)
    assert not checker.errors
    assert kills > 300
    assert checker.records > 20, "no victim came as far as its publish"


@pytest.mark.parametrize(
    ("role", "finding"),
    [(HeadFirstSource, "torn"), (ReleaseFirstStage, "lost"), (InputCursorStage, "doubled")],
)
def test_a_broken_rule_is_found(role: Role, finding: str) -> None:
    checker, kills = kill_at_every_bytecode(role, stride=5)  # the window of each fault is wider than this
    assert checker.errors[finding], (kills, checker.errors)


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
