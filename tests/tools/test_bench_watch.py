"""Looking into a server from beside it: spans, counters and processor time of one run, and what was missed."""

import os
import subprocess

import pytest

from shm.limits import TRACE_SPANS
from shm.segment import Segment
from shm.stats import Stats
from shm.trace import Trace, What
from tools import bench_watch
from tools.bench_watch import Watch, WatchError, core_wait_ns_of, cpu_ns_of


class Fake:
    """The memory of a server whose stages are this process."""

    def __init__(self) -> None:
        self.trace = Trace(Segment.create("trace", Trace.size()))
        self.stats = Stats(Segment.create("stats", Stats.size()))
        self.watch = Watch(self.trace, self.stats, lambda: {"gpu": os.getpid()})


def test_what_happens_inside_a_run_is_seen_and_nothing_else() -> None:
    fake = Fake()
    steps, plans, stats = fake.trace.writer("gpu", 1), fake.trace.writer("scheduler"), fake.stats.writer("gpu")
    steps.span(What.STEP, 1, 10, 20)
    stats.add("steps_total", 7)
    with fake.watch.run() as seen:
        steps.span(What.STEP, 2, 30, 40)
        plans.span(What.PLAN, 2, 22, 23)
        stats.add("steps_total", 5)
        stats.observe("step_s", 0.25)
        fake.stats.writer("scheduler").set("running", 3)
    steps.span(What.STEP, 3, 50, 60)
    assert sorted(seen.spans.tolist()) == [[What.PLAN, 2, 22, 23], [What.STEP, 2, 30, 40]]
    assert (seen.missed, seen.counted("gpu", "steps_total"), seen.mean_s("gpu", "step_s")) == (0, 5, 0.25)
    assert seen.mean_s("frontend", "ttft_s") is None
    assert seen.cpu_ns["gpu"] > 0 and seen.core_wait_ns["gpu"] >= 0
    begin_ns, end_ns = seen.full_ns(3)
    assert 0 < begin_ns <= end_ns and seen.full_ns(4) == (0, 0)


def test_spans_that_were_overwritten_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_watch, "LOOK_S", 60.0)
    fake = Fake()
    writer = fake.trace.writer("gpu", 1)
    with fake.watch.run() as seen:
        for number in range(TRACE_SPANS + 100):
            writer.span(What.STEP, number, number, number + 1)
    assert seen.missed >= 100 and len(seen.spans) + seen.missed == TRACE_SPANS + 100


def test_a_run_that_fails_ends_the_look() -> None:
    fake = Fake()
    with pytest.raises(KeyError), fake.watch.run() as seen:
        raise KeyError
    assert "gpu" in seen.counters


def test_a_process_without_such_memory_is_told() -> None:
    # Another one: this process may hold what tests before this have left.
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as other,
        pytest.raises(WatchError, match="no segment trace"),
    ):
        Watch.below(other.pid)
    with pytest.raises(WatchError, match="cannot be read"):
        Watch.below(2**22 - 1)


def test_a_process_that_is_gone_has_taken_nothing() -> None:
    assert cpu_ns_of(2**22 - 1) == core_wait_ns_of(2**22 - 1) == 0
    assert cpu_ns_of(os.getpid()) > 0
