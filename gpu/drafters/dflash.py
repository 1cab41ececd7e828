"""The dflash drafter: one pass over a block of unknown tokens fills the whole window, trained for its target.

Owns its cache, which has the target's pages, and a state of each entry: behind every pass the target's states give it
the keys and values of each place, chunks and windows alike, and the joined states of each row's newest place are what
the next block begins with. Whatever a row went through, both are what they would be without drafts. It drafts what it
finds likeliest, whatever the temperature.
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
    residual: Array  # [tokens, hidden]
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
        rows, drafts, hidden = config.max_running, config.window - 1, config.model.hidden_size

        def buffer(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Buffer:
            return device.buffer(shape, dtype, f"dflash.{name}")

        self._state = buffer((config.entries, hidden), np.float32, "state")
        self._work = buffer((rows * config.window, 1, hidden), np.float32, "work")
        self._places = buffer((rows,), np.int32, "places")
        self._blocks = buffer((rows * config.window,), np.int32, "blocks")
        self._last_seen = buffer((rows * config.window,), np.int32, "last seen")
        self._wanted = buffer((rows * drafts,), np.int32, "wanted")
        self._logits = buffer((rows * drafts, len(model.vocabulary)), np.float32, "logits")
        caches = device.adopt(model.k_cache, "dflash.k_cache"), device.adopt(model.v_cache, "dflash.v_cache")
        work = (self._work, self._places, self._blocks, self._last_seen, self._wanted, self._logits)
        self._own: Regions = tuple(part.region() for part in (self._state, *work, *caches))
        self._target = device.adopt(target_states, "target.states")

    @property
    def observes(self) -> Regions:
        """The target's states."""
        return (self._target.region(),)

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """Pass over a block of each row."""
        if shape.decode and shape.window > 1:
            reads = (*batch.model_inputs, batch.entries.region(), *self._own)
            launch("draft", self._draft, rows, shape, reads=reads, writes=(batch.tokens.region(), *self._own))

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """Nothing: what chunks leave behind is in the target's states."""

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """Take the keys and values of all places from the target's states, and keep what blocks begin with."""
        reads = (*batch.model_inputs, batch.entries.region(), *lane.gained_region, *self.observes, *self._own)
        launch("draft extend", self._know, rows, lane.counts, shape, reads=reads, writes=self._own)

    def _draft(self, rows: Rows, shape: PassShape) -> None:
        count, window, model, kernels = shape.decode, shape.window, self._model, self._kernels
        tokens, drafts = count * window, count * (window - 1)
        blocks, last, wanted = self._blocks.array[:tokens], self._last_seen.array[:tokens], self._wanted.array[:drafts]
        states, logits = self._work.array[:tokens], self._logits.array[:drafts]
        kernels.lay_blocks(rows, shape, model.mask, blocks, last, wanted)
        kernels.recall(self._state.array, rows, shape, states)
        passed = (rows.positions[:tokens], rows.seqs[:tokens], rows.pages[:count])
        extents = Extents(rows.starts[: count + 1], rows.ends[:count], window)
        model.draft(states, last, blocks, *passed, wanted, logits, extents)
        kernels.put_drafts(logits, model.vocabulary, rows.tokens, window, 1, window - 1)

    def _know(self, rows: Rows, counts: Array, shape: PassShape) -> None:
        tokens, nothing = shape.tokens, (self._wanted.array[:0], self._logits.array[:0])
        places = self._places.array[: shape.gainers]
        passed = (rows.positions[:tokens], rows.seqs[:tokens], rows.pages[: shape.rows])
        self._model.know(self._target.array[:tokens], rows.tokens[:tokens], *passed, *nothing)
        self._kernels.newest_places(counts, rows, shape, places)
        self._kernels.keep(self._state.array, rows.entries[: shape.gainers], self._model.residual, places)
