"""The standalone drafter: a whole model, smaller than the target and with the same tokens, writes ahead of it.

Owns the draft model's cache and working memory. The cache has the target's pages: what the slot table says holds for
both, so prefixes found, rows retracted and pages given away need nothing of their own here. A step drafts by as many
passes of one token a row as windows are wide; the last one only writes the cache, so that after any number of accepted
drafts no position of a row is missing in it. It drafts what it finds likeliest, whatever the temperature.
"""

from typing import Any, Protocol

import numpy as np

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.columns import Array, Columns
from gpu.kernels.step_kernels import Extents, PassShape, Rows
from gpu.lanes import Lane
from shm.config import ServerConfig
from shm.records import StepView


class DraftModel(Protocol):
    """See `gpu.step.Model`."""

    k_cache: Array
    v_cache: Array

    def forward(self, *arguments: Any) -> None:
        """One pass."""


class StandaloneDrafter:
    """See `drafter.Drafter`."""

    def __init__(self, device: Device, config: ServerConfig, model: DraftModel, columns: Columns) -> None:
        """model: for passes as large as the target's, with the target's pages."""
        self._model = model
        self._columns = columns
        rows = config.max_running

        def buffer(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Buffer:
            return device.buffer(shape, dtype, f"draft.{name}")

        self._tokens = buffer((rows,), np.int32, "tokens")
        self._positions = buffer((rows,), np.int32, "positions")
        self._ends = buffer((rows,), np.int32, "ends")
        self._order = buffer((rows + 1,), np.int32, "order")
        self._logits = buffer((rows, config.model.vocab_size), np.float32, "logits")
        own = (self._tokens, self._positions, self._ends, self._order, self._logits)
        caches = device.adopt(model.k_cache, "draft.k_cache"), device.adopt(model.v_cache, "draft.v_cache")
        self._state: Regions = tuple(part.region() for part in (*own, *caches))
        self._caches: Regions = tuple(cache.region() for cache in caches)

    @property
    def observes(self) -> Regions:
        """Nothing of the model's."""
        return ()

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """Pass by pass, and the last one for the cache alone."""
        if not shape.decode:
            return
        inputs = (batch.tokens, batch.positions, batch.pages)
        reads = (*(part.region() for part in inputs), *self._state)
        launch("draft", self._draft, rows, shape, reads=reads, writes=(batch.tokens.region(), *self._state))

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """The whole pass once more, for the cache: decode rows are in it again, and come to the same."""
        reads = (*batch.model_inputs, *self._caches)
        launch("draft prefill", self._prefill, rows, shape, reads=reads, writes=self._caches)

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """Nothing: all positions are in the cache, and those that were not accepted will be written again."""

    def _draft(self, rows: Rows, shape: PassShape) -> None:
        count, window, columns = shape.decode, shape.window, self._columns
        tokens, positions, ends = (part.array[:count] for part in (self._tokens, self._positions, self._ends))
        order, pages = self._order.array[: count + 1], rows.pages[:count]
        columns.count(order)
        for place in range(window):
            columns.take(rows.tokens, window, place, tokens)
            columns.take(rows.positions, window, place, positions)
            columns.add(positions, 1, ends)
            wanted = count if place + 1 < window else 0
            logits = self._logits.array[:wanted]
            extents = Extents(order, ends, 1)
            self._model.forward(tokens, positions, order[:count], pages, order[:wanted], logits, extents)
            if wanted:
                columns.put_best(logits, rows.tokens, window, place + 1)

    def _prefill(self, rows: Rows, shape: PassShape) -> None:
        tokens, none = shape.tokens, self._logits.array[:0]
        extents = Extents(rows.starts[: shape.rows + 1], rows.ends[: shape.rows], shape.longest)
        passed = (rows.tokens[:tokens], rows.positions[:tokens], rows.seqs[:tokens], rows.pages[: shape.rows])
        self._model.forward(*passed, rows.logit_rows[:0], none, extents)
