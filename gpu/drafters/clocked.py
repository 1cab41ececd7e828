"""The clocked drafter: passes that take the time that they are told, and drafts that are right as often as told.

Owns a word of each entry, which reaches the next step on the device: the clocked model's word of the newest place. With
the newest token it says what the model will choose next, and the drafter is wrong on purpose. A step has the passes of
an MTP drafter: one behind the model's, which leaves that word, and as many as there are drafts but one, since the first
draft would come with it. (It is made in the next step here, beside the others: the passes cost the same.)
"""

import numpy as np

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.step_kernels import Array, PassShape, Rows
from gpu.kernels.trained import HostTrainedKernels
from gpu.lanes import Lane
from gpu.models.clocked import ClockedModel, pass_time, run_draft
from shm.config import ServerConfig
from shm.records import StepView


class ClockedDrafter:
    """See `drafter.Drafter`."""

    def __init__(self, device: Device, config: ServerConfig, model: ClockedModel) -> None:
        self._model = model
        self._kernels = HostTrainedKernels()
        self._kept = device.buffer((config.entries,), np.uint64, "clocked.kept")
        self._places = device.buffer((config.max_running,), np.int32, "clocked.places")
        self._words = device.adopt(model.words, "clocked.words")

    @property
    def observes(self) -> Regions:
        """The words of a pass."""
        return (self._words.region(),)

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """The first pass writes all drafts; the others only take their time."""
        if not shape.decode or shape.window == 1:
            return
        inputs = (batch.tokens, batch.positions, batch.entries, self._kept)
        reads = tuple(part.region() for part in inputs)
        launch("draft", self._draft, rows, shape, reads=reads, writes=(batch.tokens.region(),))
        for number in range(2, shape.window - 1):
            took_ns = self._model.draft_ns[shape.decode]
            launch(f"draft {number}", pass_time, took_ns, self._model.work, reads=(), writes=())

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """Nothing: what is kept of a prompt is the word of its last token."""

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """The pass behind the model's: keep the word of each row's newest place."""
        inputs = (self._words, self._places, batch.entries, batch.logit_rows)
        reads = (*(part.region() for part in inputs), *lane.gained_region)
        writes = (self._kept.region(), self._places.region())
        launch("draft extend", self._extend, rows, lane.counts, shape, reads=reads, writes=writes)

    def _draft(self, rows: Rows, shape: PassShape) -> None:
        model = self._model
        took_ns = model.draft_ns[shape.decode] if shape.window > 2 else 0  # a single draft needs no pass
        arrays = (rows.tokens, rows.positions, rows.entries, self._kept.array)
        run_draft(*arrays, shape.decode, shape.window, model.share, took_ns, model.work)

    def _extend(self, rows: Rows, counts: Array, shape: PassShape) -> None:
        places = self._places.array[: shape.gainers]
        self._kernels.newest_places(counts, rows, shape, places)
        self._kernels.keep(self._kept.array, rows.entries[: shape.gainers], self._words.array, places)
        pass_time(self._model.extend_ns[shape.rows], self._model.work)
