"""The drafter as the step program sees it: it guesses the tokens behind a row's newest one.

Owns the protocol alone. A drafter queues its work inside the step, on the forward stream, and keeps what it needs from
one step to the next on the device: no result has to reach the CPU. Whatever it drafts, right or wrong, changes how many
tokens a row gains and never which ones.

What it keeps of a page outlives rows and, on the host device, the process; so it depends on nothing but the tokens up
to the page's end, and the one behind where that is in the key (`procs.prefix_cache`), and it comes from
`gpu.models.caches`. What it keeps of an entry is made again by the chunks that an admission begins with.
"""

from collections.abc import Callable
from typing import Any, Protocol

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Regions
from gpu.kernels.step_kernels import PassShape, Rows
from gpu.lanes import Lane
from shm.records import StepView


class Launch(Protocol):
    """Queues an operation of the pass, see `Device.launch`: `fn(*args)` on the forward stream."""

    def __call__(self, name: str, fn: Callable[..., None], *args: Any, reads: Regions, writes: Regions) -> None:
        """Declare every byte."""


class Drafter(Protocol):
    """Called while a pass is queued. Decode rows may be captured, so only `prefill` sees a descriptor."""

    @property
    def observes(self) -> Regions:
        """What it reads of the model's own memory behind a pass, beside the caches."""

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """Queue what fills rows.tokens behind the newest token of each decode row. Called for windows of one as well,
        where there is nothing to fill, so that what the drafter knows stays complete.
        """

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """Queue what takes note of the step's chunks; plane: the ledger's tokens, i32[rows, max_len], pinned."""

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """Queue what takes note of what every row has gained, see `Lane.gained` and `Lane.counts`."""
