"""The batch tables: what of the running batch outlives its scheduler, so that the next one finds the pages again.

Owns the layout of the segment "batch". Its only writer is the scheduler, which works on these arrays and keeps no
others of the kind: what is in them is what it knows, at whatever instruction it ends. It knows no rule of the batch;
what may be believed of the arrays is said in `procs.sched_adoption`.

Nobody reads them while their writer lives, and its successor is started after its end was collected: so stores are seen
in the order of the program, up to the last one, on any machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shm.limits import CACHE_LINE_BYTES, HEADER_BYTES
from shm.segment import Segment, schema_hash

_MEMORY = 8  # word of the header's second line

# name, dtype; items per entry, 0 standing for the pages of a row
_ARRAYS = (("used", "?", 1), ("row", "i8", 1), ("generation", "i8", 1), ("counted", "i8", 1), ("pages", "i4", 0))


class BatchTables:
    """Views, indexed by relay entry: [entries], and pages [entries, pages_per_row]."""

    used: npt.NDArray[np.bool_]
    row: npt.NDArray[np.int64]  # of the ledger
    generation: npt.NDArray[np.int64]
    counted: npt.NDArray[np.int64]  # positions in the KV cache
    pages: npt.NDArray[np.int32]

    def __init__(self, segment: Segment, entries: int, pages_per_row: int) -> None:
        """Attach to the segment, or format it if it is new. Raises LayoutError if it holds something else."""
        schema = schema_hash(f"{_ARRAYS} {_MEMORY} {entries} {pages_per_row}")
        if not segment.formatted:
            segment.format("batch", schema)
        segment.check("batch", schema)
        self._words = segment.words
        for (name, dtype, items), offset in zip(_ARRAYS, _offsets(entries, pages_per_row), strict=False):
            view = segment.array(dtype, entries * (items or pages_per_row), offset)
            setattr(self, name, view if items else view.reshape(entries, pages_per_row))

    @classmethod
    def private(cls, entries: int, pages_per_row: int) -> BatchTables:
        """Tables that nobody else sees."""
        return cls(Segment.create("batch", cls.size(entries, pages_per_row)), entries, pages_per_row)

    @staticmethod
    def size(entries: int, pages_per_row: int) -> int:
        """Return the bytes of the segment."""
        return _offsets(entries, pages_per_row)[-1]

    @property
    def memory(self) -> int:
        """Whose memory the page numbers are about: an epoch of the gpu process, see `Control.memory`."""
        return self._words[_MEMORY]

    @memory.setter
    def memory(self, memory: int) -> None:
        """Only while no entry is in use: a number of a page and the word for its memory are two stores."""
        assert not self.used.any(), "the pages of the batch are in another memory"
        self._words[_MEMORY] = memory

    def clear(self) -> None:
        """Forget every entry. `used` first: what is not in use says nothing, whatever the rest holds."""
        self.used[:] = False
        self.counted[:] = 0


def _offsets(entries: int, pages_per_row: int) -> list[int]:
    """Return the byte offset of each array, and of the end."""
    offsets = [HEADER_BYTES]
    for _, dtype, items in _ARRAYS:
        nbytes = entries * (items or pages_per_row) * np.dtype(dtype).itemsize
        offsets.append(offsets[-1] + -(-nbytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)
    return offsets


assert all(name in BatchTables.__annotations__ for name, _, _ in _ARRAYS)
