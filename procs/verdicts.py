"""Which stage that lives has to be killed, and why: it starts for too long, has said its last words, or hangs.

Owns what is known of each one's pulse. It decides; the supervisor kills, and waits for nobody's end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from procs.restarts import Pulse, look_at
from procs.stage_process import LAST_WORDS_SECONDS, StageProcess


class Verdict(NamedTuple):
    """Why a process is to be killed, and whether because it hangs."""

    reason: str
    hangs: bool


class Verdicts:
    """Calls come from the supervisor's thread, `of` once per look."""

    def __init__(self, heartbeat_ns: Callable[[str], int]) -> None:
        """heartbeat_ns(stage): see `Control.heartbeat_ns`."""
        self._heartbeat_ns = heartbeat_ns
        self._pulses: dict[str, Pulse] = {}

    def watch(self, child: StageProcess, asleep_s: float) -> None:
        """It is the stage from now on. asleep_s: see `Pulse`."""
        self._pulses[child.stage] = Pulse(partial(look_at, child.pid), asleep_s)

    def of(self, child: StageProcess, now_s: float) -> Verdict | None:
        """What there is against the stage, if it lives."""
        if not child.lives:
            return None
        if not child.is_ready and now_s - child.started_s > child.spec.ready_seconds:
            busy = f"; the last it said was: {child.last_words}" if child.last_words else ""
            return Verdict(f"not ready after {child.spec.ready_seconds:g} s{busy}", hangs=False)
        if child.error and now_s - child.error_s > LAST_WORDS_SECONDS:  # it had its time to print where it happened
            return Verdict(child.error, hangs=False)
        beat_ns = self._heartbeat_ns(child.stage) if child.is_ready else 0  # it may be its predecessor's
        reason = self._pulses[child.stage].hangs(now_s, beat_ns)
        return None if reason is None else Verdict(reason, hangs=True)
