"""Buffers: named arrays whose bytes launches declare, the same for every device.

Owns the arithmetic from rows to bytes and nothing else; which memory an array lies in is the device's business.
"""

from typing import Any

import numpy as np

from gpu.device.protocol import Region


class ArrayBuffer:
    """A C-contiguous numpy array or torch tensor, see `protocol.Buffer`."""

    def __init__(self, name: str, array: Any) -> None:
        contiguous = array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
        assert contiguous, name
        self.name = name
        self.array = array
        self.nbytes = int(array.nbytes)
        self._rows = int(array.shape[0])
        self._row_bytes = self.nbytes // self._rows if self._rows else 0

    def region(self) -> Region:
        """All of it."""
        return Region(self, 0, self.nbytes)

    def rows(self, lo: int, hi: int) -> Region:
        """Rows [lo, hi) of the first axis."""
        assert 0 <= lo <= hi <= self._rows, (self.name, lo, hi)
        return Region(self, lo * self._row_bytes, hi * self._row_bytes)


def signed(array: Any) -> Any:
    """The same bits of a numpy array in a type that torch computes with: uint64 as int64."""
    return array.view(np.int64) if array.dtype == np.uint64 else array
