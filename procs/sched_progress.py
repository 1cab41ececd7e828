"""Progress out: what the detokenizer is told of rows that gained or ended, without ever waiting for it.

Owns the progress ring's producing end and what did not fit into the ring. That is one column per ledger row and no
more, however long the detokenizer stands still: the tokens are in the ledger, so a row's newest count and finish say
all that the ones before them said. It never looks into the ledger, and never loses an end.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from procs.batch_state import Ints
from shm.ledger import FINISH_NONE
from shm.records import PROGRESS_PLANES
from shm.ring import RingProducer

ROW, GENERATION, COUNT, FINISH = range(PROGRESS_PLANES)


class ProgressOut:
    """Records go out as they are while there is room; from the first that finds none on, they are merged by row."""

    def __init__(self, ring: RingProducer, rows: int, record_rows: int) -> None:
        """`rows` of the ledger, at most `record_rows` of them in one record."""
        self._ring = ring
        self._record_rows = record_rows
        self._late = np.zeros(rows, dtype=np.bool_)
        self._latest = np.zeros((PROGRESS_PLANES, rows), dtype=np.int32)
        self.behind = False  # some row is late

    @property
    def can_send(self) -> bool:
        """Whether rows are late that the ring has room for by now: reason enough to end a wait."""
        return self.behind and self._ring.space() > 0

    def send(self, records: Iterable[NDArray[np.int32]], step: int) -> None:
        """Push `records`, i32[4, n] each, behind what is late; `step` is the newest one whose result is in them.

        A row is in a record once. What the ring has no room for goes out with a later call.
        """
        for record in records:
            for begin in range(0, record.shape[1], self._record_rows):
                piece = record[:, begin : begin + self._record_rows]
                if self.behind or self._ring.space() == 0:
                    self._keep(piece)
                else:
                    self._push(piece, step)
        if self.behind:
            self._catch_up(step)

    def _keep(self, piece: NDArray[np.int32]) -> None:
        """Put a record's columns in the place of what the same rows have there already."""
        rows: Ints = piece[ROW].astype(np.int64)
        before = self._latest[:, rows]
        ended = self._late[rows] & (before[FINISH] != FINISH_NONE)
        # A newer generation may follow: then the frontend had the end from a scheduler before this one.
        assert not (ended & (before[GENERATION] == piece[GENERATION])).any(), "a row goes on after its end"
        self._latest[:, rows] = piece
        self._late[rows] = True
        self.behind = True

    def _catch_up(self, step: int) -> None:
        """Push late rows, lowest first, as far as there is room.

        Rows that run are late again after every step, but they are at most half of a record: each record that gets out
        takes ended ones with it, so that these cannot be late for ever.
        """
        rows = np.flatnonzero(self._late)
        for begin in range(0, len(rows), self._record_rows):
            if self._ring.space() == 0:
                return
            some = rows[begin : begin + self._record_rows]
            self._push(self._latest[:, some], step)
            self._late[some] = False
        self.behind = False

    def _push(self, columns: NDArray[np.int32], step: int) -> None:
        self._ring.push(np.ascontiguousarray(columns), source_seq=step)
