"""When a stage that has died is started again, whether one that gives no sign of life has died, and what is said of it.

Owns the counting of deaths, what is known of a process from outside, and the line that the log gets for each death.
Decides over times and states that it is told, but for `look_at`, which reads them; it starts, kills, reaps nothing.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from procs.child_specs import ChildSpec

LOOK_SECONDS = 0.04  # between two looks; a heartbeat comes at least every 0.05 s
STOPPED_SECONDS = 0.04  # without a heartbeat, of a process that was stopped: it will not go on by itself
ASLEEP_SECONDS = 1.0  # asleep, without a heartbeat or a tick of processor time: it waits for what will not come
FROZEN_SECONDS = 0.5  # without a look: whoever looks was stopped itself, perhaps with all the others,
GRACE_SECONDS = 1.0  # and those may go on a little later
SILENT_SECONDS = 30.0  # at work without a heartbeat: in a loop without an end, or on a machine that has no time for it
STOPPED_BY_SIGNAL = "stopped by a signal"
STOPPED, TRACED, ASLEEP = "T", "t", "S"  # letters of /proc/PID/stat

TOLD_SECONDS = 0.3  # from a stage's return to the line about its death, for the others to have gone on with their work
LATE_SECONDS = 5.0  # whoever is not back by then gets a line before


@dataclass
class Deaths:
    """One stage's deaths, and whether it may be started again.

    In a row are those between which it never served for as long as its spec asks for, and no request was given up: what
    those before it died of is gone then. They do not count for the minute either: a client that tries the same again
    must not end the server, however often.
    """

    spec: ChildSpec
    in_a_row: int = 0
    _minute_s: deque[float] = field(default_factory=deque)  # when those of the last minute were
    _given_up: int = 0

    def died(self, now_s: float, served_s: float, given_up: int = 0) -> float | None:
        """Count a death; returns the seconds to wait before the next start, or None when it was one too many.
        given_up: requests that were, so far, because stages die of them.
        """
        spec = self.spec
        begins = served_s >= spec.stable_seconds or given_up > self._given_up
        if given_up > self._given_up:
            for _ in range(min(self.in_a_row, len(self._minute_s))):
                self._minute_s.pop()
        self._given_up = given_up
        self.in_a_row = 1 if begins else self.in_a_row + 1
        self._minute_s.append(now_s)
        while self._minute_s[0] < now_s - 60:
            self._minute_s.popleft()
        if self.in_a_row > spec.deaths_in_a_row_max or len(self._minute_s) > spec.deaths_a_minute_max:
            return None
        return spec.backoff_seconds[min(self.in_a_row, len(spec.backoff_seconds)) - 1]

    @property
    def told(self) -> str:
        """What was too many."""
        if self.in_a_row > self.spec.deaths_in_a_row_max:
            return f"{self.in_a_row} times in a row"
        return f"{len(self._minute_s)} times within a minute"


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
    """Decides whether one process hangs, by looks at its heartbeat.

    Time counts only from look to look, and each for little: whoever looks may have been stopped for a while itself,
    together with whom it looks at.
    """

    def __init__(self, look: Callable[[], Look | None], asleep_s: float = math.inf) -> None:
        """asleep_s: for how long it may sleep before it has given any sign."""
        self._look = look
        self._asleep_s = asleep_s
        self._looked_s = 0.0
        self._grace_until_s = 0.0
        self._beat_ns = 0
        self._ticks = -1
        self._silent_s = 0.0  # since the last heartbeat
        self._still_s = 0.0  # since the last heartbeat or tick

    def hangs(self, now_s: float, beat_ns: int) -> str | None:
        """Why the process is taken for dead, or None. beat_ns: of its last heartbeat, 0 = it gives none yet."""
        gap_s = now_s - self._looked_s if self._looked_s else 0.0
        passed_s = min(gap_s, 2 * LOOK_SECONDS)
        self._looked_s = now_s
        if gap_s > FROZEN_SECONDS:
            self._grace_until_s = now_s + GRACE_SECONDS
        if beat_ns != self._beat_ns:
            self._beat_ns, self._silent_s, self._still_s = beat_ns, 0.0, 0.0
            return None
        look = self._look()
        if look is None or look.state == TRACED:  # gone, which is noticed elsewhere; or in a debugger
            return None
        self._silent_s += passed_s
        self._still_s = self._still_s + passed_s if (look.ticks, look.state) == (self._ticks, ASLEEP) else 0.0
        self._ticks = look.ticks
        return None if now_s < self._grace_until_s else self._verdict(look, beat_ns)

    def _verdict(self, look: Look, beat_ns: int) -> str | None:
        if look.state == STOPPED and self._silent_s >= STOPPED_SECONDS:
            return STOPPED_BY_SIGNAL
        if self._still_s >= (ASLEEP_SECONDS if beat_ns else self._asleep_s):
            return f"hung: asleep without a heartbeat for {self._still_s:.1f} s"
        if beat_ns and self._silent_s >= SILENT_SECONDS:
            return f"hung: no heartbeat for {self._silent_s:.0f} s"
        return None


def is_sound(stage: str, device: str, status: int | None, error: str, hung: str) -> bool:
    """Whether the memory that outlives a dead process of `stage` holds what it should, so that its successor may go on.

    status: negative, the signal that ended it; None if nobody knows. error: its own last words. hung: why it was killed
    here, if it was.

    A process that was killed from outside has done nothing wrong up to its last instruction. The gpu process is native
    code: one that went wrong, or did not come back, may have written anywhere before. The scheduler is none, and its
    tables are looked at before they are believed; but an error of its own may be an error in them.
    """
    if error or status is None:
        return False
    if stage == "gpu":
        killed = status in (-signal.SIGKILL, -signal.SIGTERM) and hung in ("", STOPPED_BY_SIGNAL)
        return device == "host" and killed  # elsewhere the caches end with the process
    return True


# Whose counter says what was done again after a death, and what it counts.
RETRIED = {
    "frontend": ("frontend", "adopted_total", "requests were ended, their clients being gone"),
    "tokenizer": ("frontend", "resent_total", "requests were sent again"),
    "scheduler": ("scheduler", "requeued_total", "requests were queued again"),
    "gpu": ("scheduler", "rerun_total", "requests were queued again"),
    "detokenizer": ("detokenizer", "rebuilt_total", "texts were made again"),
}


@dataclass
class _Death:
    stage: str
    reason: str
    died_s: float
    counted: int  # what had been done again before
    back_s: float = 0.0  # 0 = not yet
    epoch: int = 0
    is_late: bool = False


class Obituaries:
    """One line for each death: what died, why, for how long it was gone, and what was done again."""

    def __init__(self, count: Callable[[str, str], int]) -> None:
        """count(stage, name): the value of a counter now."""
        self._count = count
        self._open: dict[str, _Death] = {}

    def died(self, stage: str, reason: str, now_s: float) -> Iterator[str]:
        """Take a death down; lines that are due."""
        before = self._open.pop(stage, None)
        if before is not None:
            yield (
                self._line(before)
                if before.back_s
                else (f"{stage} died ({before.reason}), and again {now_s - before.died_s:.2f} s later while it started")
            )
        owner, name, _ = RETRIED[stage]
        self._open[stage] = _Death(stage, reason, now_s, self._count(owner, name))

    def is_back(self, stage: str, epoch: int, now_s: float) -> None:
        """The stage serves, perhaps for the first time."""
        if stage in self._open:
            self._open[stage].back_s, self._open[stage].epoch = now_s, epoch

    def due(self, now_s: float) -> Iterator[str]:
        """Lines that are due."""
        for stage, death in list(self._open.items()):
            if death.back_s and now_s >= death.back_s + TOLD_SECONDS:
                del self._open[stage]
                yield self._line(death)
            elif not death.back_s and not death.is_late and now_s >= death.died_s + LATE_SECONDS:
                death.is_late = True
                yield f"{stage} died ({death.reason}); it is not back after {LATE_SECONDS:g} s, requests wait for it"

    def rest(self) -> Iterator[str]:
        """The lines that are left at the end of the server."""
        for death in self._open.values():
            yield self._line(death) if death.back_s else f"{death.stage} died ({death.reason}) and did not come back"
        self._open.clear()

    def _line(self, death: _Death) -> str:
        owner, name, what = RETRIED[death.stage]
        again = self._count(owner, name) - death.counted
        gone_s = death.back_s - death.died_s
        return f"{death.stage} died ({death.reason}), back after {gone_s:.2f} s in epoch {death.epoch}; {again} {what}"
