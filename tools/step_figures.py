"""What a server's steps cost and how long its device waited between them, from the spans of its trace.

Owns the joining of spans by the number of their step, and the figures of a run. Pure functions over arrays: no clock,
no process, no printing. A span is (what, step, begin ns, end ns), see `shm.trace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shm.trace import What

Spans = NDArray[np.uint64]  # u64[n, 4]
Column = NDArray[np.int64]


@dataclass(frozen=True)
class StepFigures:
    """One run. Times in microseconds, medians unless said; shares 0..1. The parts of the CPU's work are wall time of
    the thread that does it, as in the article.

    gap: from the end of a step to the begin of the next, where there was something to do. starved: the part of a gap
    in which the next step was not yet queued on the device; starved_steps: how many steps had such a part.
    """

    steps: int
    step_us: float
    period_us: float  # from the end of a step to the end of the next
    gap_us_p50: float
    gap_us_p99: float
    gap_us_mean: float
    starved_us_mean: float
    starved_time: float  # of the time from the first step to the last
    starved_steps: float
    prepare_us: float
    launch_us: float
    process_us: float


def joined(spans: Spans, what: What) -> tuple[Column, Column, Column]:
    """Steps, begins and ends of the spans of one kind, ascending by step."""
    rows = spans[spans[:, 0] == int(what)].astype(np.int64)
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    return rows[:, 1], rows[:, 2], rows[:, 3]


def starved_ns(spans: Spans) -> tuple[Column, Column, Column]:
    """For each gap: the step behind it, how long it was, and how much of that passed before the step was queued."""
    steps, begins, ends = joined(spans, What.GAP)
    queued_steps, _, queued = joined(spans, What.LAUNCH)
    if not len(steps) or not len(queued_steps):
        return steps, ends - begins, np.zeros(len(steps), np.int64)
    place = np.minimum(np.searchsorted(queued_steps, steps), len(queued_steps) - 1)
    known = queued_steps[place] == steps
    late = np.clip(queued[place] - begins, 0, ends - begins)
    return steps, ends - begins, np.where(known, late, 0)


def figures(spans: Spans) -> StepFigures | None:
    """Sums up the spans of one run, those of the scheduler and of the gpu process; None for fewer than two steps."""
    _, begins, ends = joined(spans, What.STEP)
    gap_steps, gaps, starved = starved_ns(spans)
    if len(begins) < 2 or not len(gaps):
        return None
    # Between two steps that follow on each other; a gap that is none ends with a request's begin.
    follows = np.isin(joined(spans, What.STEP)[0][1:], gap_steps)
    return StepFigures(
        steps=len(begins),
        step_us=_median(ends - begins),
        period_us=_median(np.diff(ends)[follows]),
        gap_us_p50=_median(gaps),
        gap_us_p99=float(np.percentile(gaps, 99)) / 1e3,
        gap_us_mean=float(gaps.mean()) / 1e3,
        starved_us_mean=float(starved.mean()) / 1e3,
        starved_time=float(starved.sum() / max(1, ends[-1] - begins[0])),
        starved_steps=float((starved > 0).mean()),
        prepare_us=_median(_prepared(spans)),
        launch_us=_median(_took(spans, What.LAUNCH)),
        process_us=_median(_took(spans, What.PROCESS)),
    )


def _took(spans: Spans, what: What) -> Column:
    _, begins, ends = joined(spans, what)
    return ends - begins


def _prepared(spans: Spans) -> Column:
    """What it took to plan each step and to push it."""
    plan_steps, begins, ends = joined(spans, What.PLAN)
    push_steps, push_begins, push_ends = joined(spans, What.PUSH)
    _, plan, push = np.intersect1d(plan_steps, push_steps, return_indices=True)
    return (ends - begins)[plan] + (push_ends - push_begins)[push]


def within(spans: Spans, begin_ns: int, end_ns: int) -> Spans:
    """The spans that lie between two moments, as a whole."""
    kept: Spans = spans[(spans[:, 2] >= begin_ns) & (spans[:, 3] <= end_ns)]
    return kept


def _median(ns: Column) -> float:
    return float(np.median(ns)) / 1e3 if len(ns) else 0.0


def typical(spans: Spans, count: int = 3) -> Mapping[str, list[tuple[float, float]]]:
    """The most usual `count` consecutive steps: what was when, in microseconds from the begin of the first.

    Keys are the names of spans; "step" has `count` of them, the others whatever begins or ends meanwhile.
    """
    steps, begins, ends = joined(spans, What.STEP)
    gap_steps, _, _ = starved_ns(spans)
    follows = np.isin(steps, gap_steps)
    last = np.arange(count - 1, len(steps))
    whole = np.array([follows[i - count + 2 : i + 1].all() for i in last], bool)
    if not whole.any():
        return {}
    took = (ends[last] - begins[last - count + 1])[whole]
    chosen = last[whole][np.argsort(took, kind="stable")[len(took) // 2]]
    first_ns, last_ns = int(begins[chosen - count + 1]), int(ends[chosen])
    before_ns = (last_ns - first_ns) // (2 * count)
    drawn: dict[str, list[tuple[float, float]]] = {}
    for what in (What.STEP, What.PLAN, What.PUSH, What.LAUNCH, What.PROCESS):
        _, starts, stops = joined(spans, what)
        inside = (stops > first_ns - before_ns) & (starts < last_ns)
        if what == What.STEP:
            inside = (starts >= first_ns) & (stops <= last_ns)
        pairs = np.stack((starts[inside] - first_ns, stops[inside] - first_ns), axis=1) / 1e3
        drawn[what.name.lower()] = [(float(begin), float(end)) for begin, end in pairs]
    return drawn
