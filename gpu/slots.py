"""The slot table: where in the KV cache each position of each running request lives, in pages.

Owns table i32[entries, pages_per_row]; slot of position p of entry e = table[e, p // page_size] * page_size + p %
page_size. The scheduler decides every page and keeps each row filled two windows beyond what it has counted; the
schedule stream writes what it decided; a step reads rows in its gather and nowhere else. Row 0 stays all zeros: page
0 takes what padded rows write, and no other row may name it.
"""

import numpy as np

from gpu.device.protocol import Device, DeviceError, Region
from gpu.kernels.host_step import OK, explain, write_slots
from shm.records import StepView


class SlotTable:
    """The table and the one way to write it."""

    def __init__(self, device: Device, entries: int, pages_per_row: int, pages: int) -> None:
        self.table = device.buffer((entries, pages_per_row), np.int32, "slot_table")
        self._pages = pages

    @property
    def region(self) -> Region:
        """All of it."""
        return self.table.region()

    def write(self, step: StepView) -> None:
        """Apply the slot writes of a step. Raises DeviceError if one names what does not exist, or page 0."""
        fault = write_slots(self.table.array, step.slot_writes, step.n_slot_writes, self._pages)
        if fault != OK:
            raise DeviceError(explain(fault))
