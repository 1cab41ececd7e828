"""Looks into a running server while a load runs: the spans of its trace, its counters, its stages' processor time.

Owns the reading, from beside the server: through the descriptors of its supervisor in /proc, so that nothing of the
server works for it. It changes nothing. The trace keeps the newest spans alone, so a thread copies them several times a
second; what was overwritten before it came is counted as missed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shm.segment import Segment
from shm.stats import Histogram, Stats
from shm.trace import Trace
from tools.chaos_processes import PROC, stages_below
from tools.step_figures import Spans

LANES = (("scheduler", 0), ("gpu", 0), ("gpu", 1))
LOOK_S = 0.05  # between two looks: the lane with most spans holds those of a thousand steps


class WatchError(Exception):
    """The server's memory cannot be read; the text says why."""


@dataclass
class Seen:
    """What came of one run. cpu_ns, core_wait_ns and counters: by how much they grew, stage by stage.

    core_wait_ns: how long threads that could run waited for a core, which is what other load on the machine costs.
    """

    spans: Spans = field(default_factory=lambda: np.empty((0, 4), np.uint64))
    missed: int = 0
    cpu_ns: dict[str, int] = field(default_factory=dict)
    core_wait_ns: dict[str, int] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    running: list[tuple[int, int]] = field(default_factory=list)  # look by look: CLOCK_MONOTONIC ns, running requests

    def full_ns(self, at_once: int) -> tuple[int, int]:
        """From the first to the last look at which so many requests ran; (0, 0) if there was none."""
        found = [at_ns for at_ns, running in self.running if running == at_once]
        return (found[0], found[-1]) if found else (0, 0)

    def counted(self, stage: str, name: str) -> float:
        """How much a counter grew."""
        return self.counters[stage][name]

    def mean_s(self, stage: str, name: str) -> float | None:
        """Mean of what a histogram observed, in seconds; None where it observed nothing."""
        number = self.counters[stage][f"{name} count"]
        return self.counters[stage][f"{name} sum"] / number if number else None


class Watch:
    """Of one server."""

    def __init__(self, trace: Trace, stats: Stats, pids: Callable[[], Mapping[str, int]]) -> None:
        """pids: process ids of its stages, as they are now."""
        self._trace, self._stats, self._pids = trace, stats, pids

    @classmethod
    def below(cls, supervisor: int) -> Watch:
        """Of the server with that supervisor. Raises WatchError if it has no such memory."""
        trace, stats = (_segment(supervisor, name) for name in ("trace", "stats"))
        return cls(Trace(trace), Stats(stats), lambda: stages_below(supervisor))

    @contextmanager
    def run(self) -> Iterator[Seen]:
        """Look for as long as the block takes; what it yields is filled in when it ends."""
        seen = Seen()
        heads = {lane: self._trace.read_lane(*lane)[1] for lane in LANES}
        parts: list[Spans] = []
        ended = threading.Event()

        def look() -> None:
            seen.running.append((time.monotonic_ns(), int(self._stats.read_stage("scheduler")["running"])))  # type: ignore[arg-type]
            for lane in LANES:
                spans, head = self._trace.read_lane(*lane, heads[lane])
                seen.missed += head - heads[lane] - len(spans)
                heads[lane] = head
                parts.append(spans)

        def follow() -> None:
            while not ended.wait(LOOK_S):
                look()

        before, times = self._numbers(), self._times()
        thread = threading.Thread(target=follow, name="watch", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            ended.set()
            thread.join()
            look()
            after = self._numbers()
            seen.spans = np.concatenate(parts)
            for stage, (cpu_ns, wait_ns) in self._times().items():
                cpu_before, wait_before = times.get(stage, (0, 0))
                seen.cpu_ns[stage], seen.core_wait_ns[stage] = cpu_ns - cpu_before, wait_ns - wait_before
            seen.counters = {
                stage: {name: value - before[stage][name] for name, value in block.items()}
                for stage, block in after.items()
            }

    def _numbers(self) -> dict[str, dict[str, float]]:
        return {stage: _flat(block) for stage, block in self._stats.read().items()}

    def _times(self) -> dict[str, tuple[int, int]]:
        """Processor time of each stage so far, and time that it waited for a core, all of its threads."""
        return {stage: (cpu_ns_of(pid), core_wait_ns_of(pid)) for stage, pid in self._pids().items()}


def _segment(supervisor: int, name: str) -> Segment:
    """A segment by the descriptor that its supervisor holds."""
    try:
        entries = list((PROC / str(supervisor) / "fd").iterdir())
    except OSError as error:
        raise WatchError(f"the memory of process {supervisor} cannot be read: {error.strerror}") from error
    for entry in entries:
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()).startswith(f"/memfd:stepahead-{name}"):
                return Segment.attach(os.open(entry, os.O_RDWR), entry.stat().st_size, name)
    raise WatchError(f"process {supervisor} has no segment {name}")


def cpu_ns_of(pid: int) -> int:
    """Processor time of a process that lives, all threads that it ever had; 0 for one that is gone."""
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        return 0
    try:
        return time.clock_gettime_ns(clock.value)
    except OSError:
        return 0


def core_wait_ns_of(pid: int) -> int:
    """How long the threads of a process have waited for a core, those that live."""
    total = 0
    for path in (PROC / str(pid) / "task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            total += int(path.read_text().split()[1])
    return total


def _flat(block: Mapping[str, Any]) -> dict[str, float]:
    """Counters and gauges as they are, histograms as their count and sum."""
    flat: dict[str, float] = {}
    for name, value in block.items():
        if isinstance(value, Histogram):
            flat |= {f"{name} count": value.count, f"{name} sum": value.sum}
        else:
            flat[name] = value
    return flat
