"""The figures of `stepahead bench floor`: what one run has shown, and the search for the shortest step.

Pure functions over values, and over a function that measures: no clock, no process, no printing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shm.trace import What
from tools.bench_figures import aligned
from tools.bench_watch import Seen
from tools.overlap_figures import core_wait_us
from tools.step_figures import joined, starved_ns, within

FACTOR = 0.8  # from one step time to the next shorter one
HALVINGS = 2  # between the last that was long enough and the first that was not


@dataclass(frozen=True)
class Probe:
    """One run while all of its requests ran. Times in microseconds, shares of the time."""

    at_once: int
    pass_us: float  # what a pass was told to take
    steps: int
    step_us: float  # what a step took, median
    period_us: float  # from step to step, mean
    gap_us_p50: float
    gap_us_p99: float
    starved: float
    idle: float
    scheduler_us: float  # wall time of planning, pushing and processing a step, median
    launch_us: float
    core_wait_us: float  # a step, see `overlap_figures.core_wait_us`
    missed: int  # spans that were overwritten before anybody saw them


@dataclass(frozen=True)
class Floor:
    """The shortest step that was long enough; None: not even the longest one was. Everything that was tried."""

    at_once: int
    found: Probe | None
    tried: list[Probe] = field(default_factory=list)


def probe_of(at_once: int, pass_us: float, seen: Seen) -> Probe:
    """Sums up a run; starved all of the time if no steps were seen."""
    begin_ns, end_ns = seen.full_ns(at_once)
    spans = within(seen.spans, begin_ns, end_ns)
    _, begins, ends = joined(spans, What.STEP)
    _, gaps, starved = starved_ns(spans)
    if len(ends) < 2 or not len(gaps):
        return Probe(at_once, pass_us, len(ends), 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, seen.missed)
    whole = max(1, int(ends[-1] - begins[0]))
    parts = {what: _median(spans, what) for what in (What.PLAN, What.PUSH, What.PROCESS, What.LAUNCH)}
    return Probe(
        at_once=at_once,
        pass_us=pass_us,
        steps=len(ends),
        step_us=float(np.median(ends - begins)) / 1e3,
        period_us=whole / len(ends) / 1e3,
        gap_us_p50=float(np.median(gaps)) / 1e3,
        gap_us_p99=float(np.percentile(gaps, 99)) / 1e3,
        starved=float(starved.sum()) / whole,
        idle=float(gaps.sum()) / whole,
        scheduler_us=parts[What.PLAN] + parts[What.PUSH] + parts[What.PROCESS],
        launch_us=parts[What.LAUNCH],
        core_wait_us=core_wait_us(seen),
        missed=seen.missed,
    )


def _median(spans: np.ndarray, what: What) -> float:
    _, begins, ends = joined(spans, what)
    return float(np.median(ends - begins)) / 1e3 if len(ends) else 0.0


def search(measure: Callable[[float], Probe], span: tuple[float, float], starved_most: float, tries: int = 2) -> Floor:
    """Shorten the step from the first of `span` down to the second, then close in on the floor.

    A step that is too short shows by chance too, on a machine that has other work: it gets so many tries, and one that
    is good enough is enough.
    """
    longest, shortest = span
    tried: list[Probe] = []
    found: Probe | None = None

    def is_enough(step_us: float) -> Probe | None:
        for _ in range(tries):
            probe = measure(step_us)
            tried.append(probe)
            if probe.starved <= starved_most:
                return probe
        return None

    step_us, too_short = longest, 0.0
    while step_us >= shortest:
        good = is_enough(step_us)
        if good is None:
            too_short = step_us
            break
        found = good
        step_us *= FACTOR
    if found is not None and too_short:
        for _ in range(HALVINGS):
            middle = (found.pass_us * too_short) ** 0.5
            good = is_enough(middle)
            if good is None:
                too_short = middle
            else:
                found = good
    return Floor(tried[0].at_once, found, tried)


HEADINGS = (
    *("at once", "passes", "step", "period", "gap p50", "p99", "starved", "idle", "scheduler", "launch"),
    *("core wait", "steps", "runs"),
)


def table_text(floors: Sequence[Floor], starved_most: float) -> str:
    """A row for each number of requests at once."""
    lines: list[Sequence[str]] = [HEADINGS]
    for floor in floors:
        best = floor.found
        if best is None:
            last = floor.tried[-1]
            told = [
                f"> {last.pass_us:.0f}",
                *("-",) * 4,
                f"{last.starved:.1%}",
                *("-",) * 3,
                f"{last.core_wait_us:.0f}",
                "-",
            ]
        else:
            us = (best.pass_us, best.step_us, best.period_us, best.gap_us_p50, best.gap_us_p99)
            told = [*(f"{one:.0f}" for one in us), f"{best.starved:.2%}", f"{best.idle:.1%}"]
            told += [f"{best.scheduler_us:.0f}", f"{best.launch_us:.0f}", f"{best.core_wait_us:.0f}", str(best.steps)]
        lines.append((str(floor.at_once), *told, str(len(floor.tried))))
    legend = (
        f"us; the shortest passes with which the device is starved at most {starved_most:.0%} of the time\n"
        "step: what the device took for them, its own launches included; scheduler, launch: wall time for a step\n"
        "core wait: a step, that the two processes could have run but had no core: other work on the machine"
    )
    return "\n".join([*aligned(lines), legend])
