"""The slot table: where in the KV cache each position of each running request lives, in pages.

Owns table i32[entries, pages_per_row]; slot of position p of entry e = table[e, p // page_size] * page_size + p %
page_size. The scheduler decides every page and keeps each row filled two windows beyond what it has counted; the
schedule stream writes what it decided; a step reads rows in its gather and nowhere else. Row 0 stays all zeros: page
0 takes what padded rows write, and no other row may name it.
"""

import numpy as np

from gpu.device.protocol import Device, Region


class SlotTable:
    """The table; written by `StepKernels.write_slots` alone."""

    def __init__(self, device: Device, entries: int, pages_per_row: int) -> None:
        self.table = device.buffer((entries, pages_per_row), np.int32, "slot_table")

    @property
    def region(self) -> Region:
        """All of it."""
        return self.table.region()
