"""The dflash drafter: one pass over a block of unknown tokens fills the whole window, trained for its target.

Owns no more than its cache, which has the target's pages: behind every pass the target's states give it the keys and
values of each place, chunks and windows alike. Whatever a row went through, its cache has what it would have without
drafts, and nothing but that goes from one step to the next. It drafts what it finds likeliest, whatever the
temperature.
"""

import numpy as np

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.step_kernels import Array, PassShape, Rows
from gpu.lanes import Lane
from gpu.models.host_drafters import HostDflash
from shm.config import ServerConfig
from shm.records import StepView


class DflashDrafter:
    """See `drafter.Drafter`."""

    def __init__(self, device: Device, config: ServerConfig, model: HostDflash, target_states: Array) -> None:
        """target_states: f32[tokens, taps, hidden], what a pass of the target leaves of each token."""
        self._model = model
        rows, drafts = config.max_running, config.window - 1

        def buffer(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Buffer:
            return device.buffer(shape, dtype, f"dflash.{name}")

        self._blocks = buffer((rows * config.window,), np.int32, "blocks")
        self._last_seen = buffer((rows * config.window,), np.int32, "last seen")
        self._logits = buffer((rows * drafts, len(model.vocabulary)), np.float32, "logits")
        caches = device.adopt(model.k_cache, "dflash.k_cache"), device.adopt(model.v_cache, "dflash.v_cache")
        self._caches: Regions = tuple(part.region() for part in caches)
        work = (self._blocks, self._last_seen, self._logits)
        self._own: Regions = (*(part.region() for part in work), *self._caches)
        self._target = device.adopt(target_states, "target.states")
        self._drafted = {window: _places(rows, window) for window in range(2, config.window + 1)}
        self._nothing = np.zeros(0, np.int32), np.zeros((0, len(model.vocabulary)), np.float32)

    @property
    def observes(self) -> Regions:
        """The target's states."""
        return (self._target.region(),)

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """Pass over a block of each row."""
        if shape.decode and shape.window > 1:
            inputs = (batch.tokens, batch.positions, batch.seqs, batch.pages)
            reads = (*(part.region() for part in inputs), *self._own)
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
        count, window, model = shape.decode, shape.window, self._model
        tokens, drafts = count * window, count * (window - 1)
        given = rows.tokens[:tokens].reshape(count, window)
        blocks, last = self._blocks.array[:tokens], self._last_seen.array[:tokens]
        blocks.reshape(count, window)[:, 0] = given[:, 0]
        blocks.reshape(count, window)[:, 1:] = model.mask
        last.reshape(count, window)[:] = rows.positions[window - 1 : tokens : window, None]
        logits = self._logits.array[:drafts]
        passed = (rows.positions[:tokens], rows.seqs[:tokens], rows.pages[: shape.rows])
        model.draft(last, blocks, *passed, self._drafted[window][:drafts], logits)
        given[:, 1:] = model.vocabulary[logits.argmax(axis=1)].reshape(count, window - 1)

    def _know(self, rows: Rows, shape: PassShape) -> None:
        tokens = shape.tokens
        passed = (rows.positions[:tokens], rows.seqs[:tokens], rows.pages[: shape.rows])
        self._model.know(self._target.array[:tokens], rows.tokens[:tokens], *passed, *self._nothing)


def _places(rows: int, window: int) -> Array:
    """i32: the tokens of windows of so many rows that say a draft, which is all but the first of each."""
    places = np.arange(rows * window, dtype=np.int32).reshape(rows, window)
    return np.ascontiguousarray(places[:, 1:]).reshape(-1)
