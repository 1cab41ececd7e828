"""When a stage that has died is started again, and whether a stage that gives no sign of life has died.

Owns the counting of deaths and what is known of a process from outside. Pure decisions over times and states that it
is told, but for `look_at`, which reads them; it starts, kills and reaps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from procs.child_specs import ChildSpec

STOPPED_S = 0.1  # two heartbeats: a stopped process will not go on by itself
ASLEEP_S = 2.0  # asleep without a heartbeat and without a tick of processor time: it waits for what will not come
RUNNING_S = 30.0  # at work without a heartbeat: a loop without an end, or a machine that has no time for it

STOPPED_STATES = ("T", "t")


@dataclass
class Deaths:
    """One stage's deaths in a row: those between which it never served for as long as its spec asks for."""

    spec: ChildSpec
    in_a_row: int = 0
    total: int = 0
    reasons: list[str] = field(default_factory=list)  # of the deaths in a row

    def died(self, reason: str, served_s: float) -> float | None:
        """Count a death; returns the seconds to wait before the next start, or None when it was one too many."""
        if served_s >= self.spec.stable_seconds:
            self.in_a_row, self.reasons = 0, []
        self.in_a_row += 1
        self.total += 1
        self.reasons.append(reason)
        if self.in_a_row > self.spec.deaths_in_a_row_max:
            return None
        backoff = self.spec.backoff_seconds
        return backoff[min(self.in_a_row, len(backoff)) - 1]


class Look(NamedTuple):
    """A process from outside: the letter of its state, and the processor time that it has had, in ticks."""

    state: str
    ticks: int


def look_at(pid: int) -> Look | None:
    """Read it; None for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return Look(fields[0], int(fields[11]) + int(fields[12]))


class Pulse:
    """Decides whether one process hangs, by looks at its heartbeat."""

    def __init__(self) -> None:
        self._beat_ns = -1
        self._ticks = -1
        self._still_since_s = 0.0  # neither a beat nor a tick

    def hangs(self, beat_ns: int, now_s: float, look: Look | None) -> str | None:
        """Why the process is taken for dead, or None. beat_ns, now_s: CLOCK_MONOTONIC."""
        if look is None or not beat_ns:
            return None
        silent_s = now_s - beat_ns / 1e9
        if beat_ns != self._beat_ns or look.ticks != self._ticks:
            self._beat_ns, self._ticks, self._still_since_s = beat_ns, look.ticks, now_s
        if look.state in STOPPED_STATES and silent_s > STOPPED_S:
            return f"stopped, silent for {silent_s:.2f} s"
        if look.state not in ("R", *STOPPED_STATES) and min(silent_s, now_s - self._still_since_s) > ASLEEP_S:
            return f"hanging, silent for {silent_s:.1f} s"
        if silent_s > RUNNING_S:
            return f"busy with nothing, silent for {silent_s:.1f} s"
        return None
