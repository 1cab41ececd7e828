"""The dflash drafter: one pass over a block of unknown tokens fills the whole window, trained for its target.

Owns no more than its cache, which has the target's pages: behind every pass the target's states give it the keys and
values of each place, chunks and windows alike. Whatever a row went through, its cache has what it would have without
drafts, and nothing but that goes from one step to the next. It drafts what it finds likeliest, whatever the
temperature.
"""

from typing import Any, Protocol

import numpy as np

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.draft_kernels import TrainedKernels
from gpu.kernels.step_kernels import Array, Extents, PassShape, Rows
from gpu.lanes import Lane
from shm.config import ServerConfig
from shm.records import StepView


class DflashModel(Protocol):
    """See `HostDflash`."""

    k_cache: Array
    v_cache: Array
    vocabulary: Array  # i32[D]
    mask: int

    def know(self, *arguments: Any) -> None:
        """Take keys and values from the target's states."""

    def draft(self, *arguments: Any) -> None:
        """A pass over blocks."""


class DflashDrafter:
    """See `drafter.Drafter`."""

    def __init__(
        self, device: Device, config: ServerConfig, model: DflashModel, target_states: Array, kernels: TrainedKernels
    ) -> None:
        """target_states: f32[tokens, taps, hidden], what a pass of the target leaves of each token."""
        self._model = model
        self._kernels = kernels
        rows, drafts = config.max_running, config.window - 1

        def buffer(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Buffer:
            return device.buffer(shape, dtype, f"dflash.{name}")

        self._blocks = buffer((rows * config.window,), np.int32, "blocks")
        self._last_seen = buffer((rows * config.window,), np.int32, "last seen")
        self._wanted = buffer((rows * drafts,), np.int32, "wanted")
        self._logits = buffer((rows * drafts, len(model.vocabulary)), np.float32, "logits")
        caches = device.adopt(model.k_cache, "dflash.k_cache"), device.adopt(model.v_cache, "dflash.v_cache")
        self._caches: Regions = tuple(part.region() for part in caches)
        work = (self._blocks, self._last_seen, self._wanted, self._logits)
        self._own: Regions = (*(part.region() for part in work), *self._caches)
        self._target = device.adopt(target_states, "target.states")

    @property
    def observes(self) -> Regions:
        """The target's states."""
        return (self._target.region(),)

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """Pass over a block of each row."""
        if shape.decode and shape.window > 1:
            reads = (*batch.model_inputs, *self._own)
            launch("draft", self._draft, rows, shape, reads=reads, writes=(batch.tokens.region(), *self._own))

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """Nothing: what chunks leave behind is in the target's states."""

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """Take the keys and values of all places of the pass from the target's states."""
        inputs = (batch.tokens, batch.positions, batch.seqs, batch.pages)
        reads = (*(part.region() for part in inputs), *self.observes)
        launch("draft extend", self._know, rows, shape, reads=reads, writes=self._caches)

    def _draft(self, rows: Rows, shape: PassShape) -> None:
        count, window, model, kernels = shape.decode, shape.window, self._model, self._kernels
        tokens, drafts = count * window, count * (window - 1)
        blocks, last, wanted = self._blocks.array[:tokens], self._last_seen.array[:tokens], self._wanted.array[:drafts]
        kernels.lay_blocks(rows, shape, model.mask, blocks, last, wanted)
        logits = self._logits.array[:drafts]
        passed = (rows.positions[:tokens], rows.seqs[:tokens], rows.pages[:count])
        extents = Extents(rows.starts[: count + 1], rows.ends[:count], window)
        model.draft(last, blocks, *passed, wanted, logits, extents)
        kernels.put_drafts(logits, model.vocabulary, rows.tokens, window, 1, window - 1)

    def _know(self, rows: Rows, shape: PassShape) -> None:
        tokens, nothing = shape.tokens, (self._wanted.array[:0], self._logits.array[:0])
        passed = (rows.positions[:tokens], rows.seqs[:tokens], rows.pages[: shape.rows])
        self._model.know(self._target.array[:tokens], rows.tokens[:tokens], *passed, *nothing)
