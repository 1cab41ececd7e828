"""Quarantine: which request it is that a stage dies of.

Owns the counts of deaths in the ledger's planes `scheduler_deaths` and `gpu_deaths`, and the set of suspects. A death
proves nothing, so whoever was in the running step goes on as before. Who was in it at two deaths of one stage without
getting on is suspect and runs alone, first of all; who is then still the end of the stage, and was alone with it, is
poison. Getting on means results of two steps, a prefill and a decode step in most cases: one would be had by whoever
breaks the decode step. Decides nothing about any other row, and never touches the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procs.batch_state import Ints
from shm.ledger import Ledger

DEATHS_MAX = 2
RESULTS_OF_PROGRESS = 2


class Quarantine:
    """The rows of one scheduler. All rows here are numbers of ledger rows that are live."""

    def __init__(self, ledger: Ledger) -> None:
        self.suspects: set[int] = set()
        self._ledger = ledger
        self._results: dict[int, int] = {}  # of rows with a death to their account: results since they were admitted

    def remember(self, rows: Ints) -> None:
        """Go on with what an earlier scheduler knew of `rows`."""
        ledger = self._ledger
        worst = np.maximum(ledger.scheduler_deaths[rows], ledger.gpu_deaths[rows])
        self._results = dict.fromkeys(rows[worst > 0].tolist(), 0)
        self.suspects = set(rows[worst >= DEATHS_MAX].tolist())

    def blame(self, deaths: NDArray[np.int32], rows: Ints) -> list[int]:
        """A stage died while `rows` were in its running step; `deaths` is its plane. Return the rows that are poison:
        the only one, or none.
        """
        deaths[rows] += 1
        worst = deaths[rows] >= DEATHS_MAX
        self.suspects |= set(rows[worst].tolist())
        self._results |= dict.fromkeys(rows.tolist(), 0)
        return rows.tolist() if len(rows) == 1 and worst[0] else []

    def admitted(self, row: int) -> None:
        """The row begins anew."""
        if row in self._results:
            self._results[row] = 0

    def gained(self, rows: Ints) -> list[int]:
        """`rows` have had another result. Return those that are suspects no longer."""
        if not self._results:
            return []
        cleared = []
        for row in self._results.keys() & set(rows.tolist()):
            self._results[row] += 1
            if self._results[row] >= RESULTS_OF_PROGRESS:
                if row in self.suspects:
                    cleared.append(row)
                self._ledger.gpu_deaths[row] = self._ledger.scheduler_deaths[row] = 0
                self.forget(row)
        return cleared

    def forget(self, row: int) -> None:
        """The row is over, or above suspicion."""
        self._results.pop(row, None)
        self.suspects.discard(row)
