"""Quarantine: which request it is that a stage dies of.

Owns the counts of deaths of the scheduler and of the gpu process in the ledger, and the set of suspects. A death
proves nothing, so whoever was in the running step goes on as before. Who was in it at two deaths of one stage without
getting on is suspect and runs alone, first of all; who is then still the end of the stage, and was alone with it, is
poison. Getting on means results of two steps, a prefill and a decode step in most cases: one would be had by whoever
breaks the decode step. Who gets on between deaths that are in a row is suspect after more of them, since the server
ends with too many. It stays suspect until the stage has served with it alone for as long as ends a streak of deaths.
Decides nothing about any other row, and never touches the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procs.batch_state import Ints
from shm.ledger import Ledger
from shm.limits import DEATHS_IN_A_ROW, STABLE_SECONDS

DEATHS_MAX = 2
RESULTS_OF_PROGRESS = 2

Stage = Literal["scheduler", "gpu"]


class _Counts(NamedTuple):
    """The planes of one stage."""

    deaths: NDArray[np.int32]
    in_a_row: NDArray[np.int32]
    streak: NDArray[np.int64]


@dataclass(slots=True)
class _Life:
    """What a row with a death to its account has had since it was admitted."""

    results: int = 0
    since_s: float = 0.0  # of the first result


class Quarantine:
    """The rows of one scheduler. All rows here are numbers of ledger rows that are live."""

    def __init__(self, ledger: Ledger, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.suspects: set[int] = set()
        self._clock_s = clock_s
        self._counts: dict[Stage, _Counts] = {
            "scheduler": _Counts(ledger.scheduler_deaths, ledger.scheduler_in_a_row, ledger.scheduler_streak),
            "gpu": _Counts(ledger.gpu_deaths, ledger.gpu_in_a_row, ledger.gpu_streak),
        }
        self._lives: dict[int, _Life] = {}

    def remember(self, rows: Ints) -> None:
        """Go on with what an earlier scheduler knew of `rows`."""
        for deaths, in_a_row, _ in self._counts.values():
            stubborn = in_a_row[rows] >= DEATHS_IN_A_ROW
            self.suspects |= set(rows[stubborn | (deaths[rows] >= DEATHS_MAX)].tolist())
            self._lives |= {row: _Life() for row in rows[stubborn | (deaths[rows] > 0)].tolist()}

    def blame(self, stage: Stage, streak: int, rows: Ints) -> list[int]:
        """`stage` died while `rows` were in its running step. streak: of this death, see `Control.streak`. Return the
        rows that are poison: the only one, or none.
        """
        deaths, in_a_row, streaks = self._counts[stage]
        goes_on = (streaks[rows] == streak) | (in_a_row[rows] >= DEATHS_IN_A_ROW)
        in_a_row[rows] = np.where(goes_on, in_a_row[rows] + 1, 1)
        streaks[rows] = streak  # behind the count: a death in between is one that is not counted
        deaths[rows] += 1
        suspect = (deaths[rows] >= DEATHS_MAX) | (in_a_row[rows] >= DEATHS_IN_A_ROW)
        self.suspects |= set(rows[suspect].tolist())
        self._lives |= {row: _Life() for row in rows.tolist()}
        # Alone at a death in a row says little, as long as it gets on: once more when it is suspect.
        poison = (deaths[rows] >= DEATHS_MAX) | (in_a_row[rows] > DEATHS_IN_A_ROW)
        return rows.tolist() if len(rows) == 1 and poison[0] else []

    def admitted(self, row: int) -> None:
        """The row begins anew."""
        if row in self._lives:
            self._lives[row] = _Life()

    def gained(self, rows: Ints) -> list[int]:
        """`rows` have had another result. Return those that are suspects no longer."""
        if not self._lives:
            return []
        now_s, cleared = self._clock_s(), []
        for row in self._lives.keys() & set(rows.tolist()):
            life = self._lives[row]
            life.since_s = life.since_s or now_s
            life.results += 1
            stubborn = any(counts.in_a_row[row] >= DEATHS_IN_A_ROW for counts in self._counts.values())
            if life.results < RESULTS_OF_PROGRESS or (stubborn and now_s - life.since_s < STABLE_SECONDS):
                continue
            if row in self.suspects:
                cleared.append(row)
            for deaths, in_a_row, _ in self._counts.values():
                deaths[row] = 0
                if stubborn:
                    in_a_row[row] = 0
            self.forget(row)
        return cleared

    def forget(self, row: int) -> None:
        """The row is over, or above suspicion."""
        self._lives.pop(row, None)
        self.suspects.discard(row)
