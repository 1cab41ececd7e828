"""Standbys: for each stage one process that has been started already and waits for the word to take its place.

Owns the standbys until they are taken, and the choice of which is started when: only while all is calm, so that no
recovery and no start is slowed down, and one at a time. A standby that dies is nobody's loss: it is buried, noted and
started again later, and after too many deaths in a row never. It may never write a word that a stage reads.
"""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from procs.burials import Burials
from procs.child_specs import ChildSpec
from procs.restarts import Deaths
from procs.stage_process import LAST_WORDS_SECONDS, StageProcess
from shm.stats import StatsWriter


class Plan:
    """Which standby is started next, and when. Decides over times and states that it is told."""

    def __init__(self, specs: Sequence[ChildSpec]) -> None:
        self._deaths = {spec.stage: Deaths(_as_standby(spec)) for spec in specs}
        self._calm_seconds = {spec.stage: spec.standby_after_seconds for spec in specs}
        self._not_before_s = {spec.stage: 0.0 for spec in specs}

    @property
    def wanted(self) -> int:
        """How many there will be if all goes well."""
        return sum(due_s < math.inf for due_s in self._not_before_s.values())

    def next(self, now_s: float, calm_since_s: float | None, there: Mapping[str, bool]) -> str | None:
        """The stage whose standby is to be started now, if one is.

        calm_since_s: since when every stage serves, None while one does not. there: the stages that have a standby, and
        whether it is prepared.
        """
        if calm_since_s is None or not all(there.values()):
            return None
        for stage, due_s in self._not_before_s.items():
            if stage not in there and now_s >= max(due_s, calm_since_s + self._calm_seconds[stage]):
                return stage
        return None

    def died(self, stage: str, now_s: float, stood_s: float) -> float | None:
        """Count the death of a standby that had stood by for `stood_s`. Returns the seconds to its next start, None for
        never.
        """
        delay_s = self._deaths[stage].died(now_s, stood_s)
        self._not_before_s[stage] = math.inf if delay_s is None else now_s + delay_s
        return delay_s


def _as_standby(spec: ChildSpec) -> ChildSpec:
    return replace(
        spec, backoff_seconds=spec.standby_backoff_seconds, deaths_in_a_row_max=spec.standby_deaths_in_a_row_max
    )


class Standbys:
    """The standbys of a server. Calls come from the supervisor's thread; nobody waits for a standby that lives."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        spawn: Callable[[ChildSpec], StageProcess],
        stats: StatsWriter,
        note: Callable[[str], None],
        burials: Burials,
    ) -> None:
        """specs: of the stages that get one. spawn: starts one; raises OSError if there is no room for a process.
        stats: the supervisor's. note: is told of deaths, a line each. burials: gets those that die or are given up.
        """
        self._specs = {spec.stage: spec for spec in specs}
        self._plan = Plan(specs)
        self._spawn = spawn
        self._stats = stats
        self._note = note
        self._burials = burials
        self._there: dict[str, StageProcess] = {}
        self._count()

    def watch_with(self, selector: selectors.BaseSelector) -> None:
        """Have `selector` call, from now on, when a standby says something or ends."""
        self._selector = selector

    def look(self, now_s: float, calm_since_s: float | None) -> None:
        """Start what is due; calm_since_s as in `Plan.next`. Give up who does not get on."""
        for standby in list(self._there.values()):
            if not standby.is_prepared and now_s - standby.started_s > standby.spec.ready_seconds:
                self._lost(standby, f"not prepared after {standby.spec.ready_seconds:g} s")
            elif standby.error and now_s - standby.error_s > LAST_WORDS_SECONDS:  # it may print where it happened
                self._lost(standby, standby.error)
        stage = self._plan.next(now_s, calm_since_s, {name: one.is_prepared for name, one in self._there.items()})
        if stage is None:
            return
        try:
            standby = self._there[stage] = self._spawn(self._specs[stage])
        except OSError as error:
            self._bemoan(stage, f"it cannot be started: {error.strerror}", 0.0)
            return
        standby.watch(self._selector, partial(self._hear, standby), partial(self._died, standby))

    def take(self, stage: str) -> StageProcess | None:
        """Hand over the standby of `stage`, which is the caller's from now on: prepared or not, watched by nobody. None
        if there is none that lives.
        """
        standby = self._there.get(stage)
        if standby is None:
            return None
        if standby.wait_exit(0):  # nobody has looked since
            self._died(standby)
            return None
        if standby.error:  # it is about to end
            self._lost(standby, standby.error)
            return None
        self._leave(standby)
        return standby

    def bury(self) -> None:
        """End all of them."""
        for standby in list(self._there.values()):
            self._leave(standby)
            self._burials.take(standby)

    def _hear(self, standby: StageProcess) -> None:
        standby.listen()
        if standby.silent:
            self._selector.unregister(standby.ready_fd)
        self._count()

    def _died(self, standby: StageProcess) -> None:
        assert standby.wait_exit(0)
        standby.unwatch(self._selector)
        self._lost(standby, standby.how_it_ended())

    def _lost(self, standby: StageProcess, reason: str) -> None:
        """It is dead, or has to be; it touches nothing that another one would, so nobody needs to see its end."""
        self._leave(standby)
        self._burials.take(standby)
        self._bemoan(standby.stage, reason, time.monotonic() - standby.prepared_s if standby.is_prepared else 0.0)

    def _leave(self, standby: StageProcess) -> None:
        standby.unwatch(self._selector)
        del self._there[standby.stage]
        self._count()

    def _bemoan(self, stage: str, reason: str, stood_s: float) -> None:
        delay_s = self._plan.died(stage, time.monotonic(), stood_s)
        then = "there will be no other one" if delay_s is None else f"another one is started in {delay_s:g} s"
        self._note(f"the standby of {stage} died ({reason}); {then}")
        self._count()

    def _count(self) -> None:
        self._stats.set("standbys", sum(standby.is_prepared for standby in self._there.values()))
        self._stats.set("standbys_wanted", self._plan.wanted)
