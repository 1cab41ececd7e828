"""The n-gram drafter: no model; what once followed on the last tokens of a text is likely to follow again.

Owns the text of every entry, prompt and output, on the device, so that looking it up is part of the step and no result
has to reach the CPU first. Texts of ended requests stay until their entry is taken again: other rows may look there
too, where that is asked for. It never reads what another stream writes.
"""

import numpy as np

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.draft_kernels import NgramKernels, Text
from gpu.kernels.step_kernels import Gained, PassShape, Rows
from gpu.lanes import Lane
from shm.config import ServerConfig
from shm.records import CHUNK_COUNT, CHUNK_ENTRY, CHUNK_ROW, CHUNK_START, StepView


class NgramDrafter:
    """See `drafter.Drafter`."""

    def __init__(self, device: Device, config: ServerConfig, kernels: NgramKernels, *, shared: bool = False) -> None:
        """shared: drafts may come from what other requests have read and written."""
        self._kernels = kernels
        self._shared = shared
        width = config.pages_per_row * config.page_size + 1  # the newest token is not in the cache yet
        self._history = device.buffer((config.entries, width), np.int32, "ngram.history")
        self._known = device.buffer((config.entries,), np.int32, "ngram.known")
        self._texts = (self._history.region(), self._known.region())

    @property
    def observes(self) -> Regions:
        """Nothing of the model's."""
        return ()

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """Look up the end of every decode row's text."""
        if shape.decode and shape.window > 1:
            arrays = (self._history.array, self._known.array, rows, shape)
            reads = (batch.tokens.region(), batch.positions.region(), batch.entries.region())
            launch(
                "look up",
                self._look_up,
                *arrays,
                reads=(*self._texts, *reads),
                writes=(batch.tokens.region(),),
            )

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """Take the prompts, whole: what of them lies in the prefix cache is in no chunk."""
        chunks = step.chunks[:, : step.n_chunks]
        ends = chunks[CHUNK_START] + chunks[CHUNK_COUNT]
        columns = np.stack((chunks[CHUNK_ENTRY], chunks[CHUNK_ROW], ends), axis=1)
        texts = [Text(*column) for column in columns.tolist()]
        launch(
            "note prompts",
            self._kernels.note_prompts,
            *(self._history.array, self._known.array, plane.array, texts),
            reads=[plane.rows(text.row, text.row + 1) for text in texts],
            writes=self._texts,
        )

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """Append what every row has gained."""
        if shape.gainers:
            gained = Gained(lane.counts, lane.gained, batch.newest.array)
            launch(
                "note gains",
                self._kernels.note_gains,
                *(self._history.array, self._known.array, rows, gained, shape),
                reads=(batch.entries.region(), lane.lengths.region(), *lane.gained_region),
                writes=self._texts,
            )

    def _look_up(self, *arrays: object) -> None:
        self._kernels.look_up(*arrays, shared=self._shared)  # type: ignore[arg-type]
