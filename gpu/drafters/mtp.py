"""The mtp drafter: one layer that goes on where the target's last state stands, trained for its target.

Owns, for each entry, the first draft of the next step and the state that the second one begins with; what comes from
the target's pass reaches the next step that way, on the device. Behind every pass the drafter goes over all of its
places once more, with the target's states and with the tokens that the target chose: so its cache has, for every
position that counts, what it would have without drafts, after steps of any window, chunks and retractions alike. The
cache has the target's pages. It drafts what it finds likeliest, whatever the temperature.
"""

from typing import Any

import numpy as np

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.mtp import newest_places, next_tokens
from gpu.kernels.step_kernels import Array, PassShape, Rows
from gpu.lanes import Lane
from gpu.models.host_drafters import HostMtp
from shm.config import ServerConfig
from shm.records import CHUNK_COUNT, CHUNK_LAST, CHUNK_ROW, CHUNK_START, StepView

NO_TAIL = -1  # of a last chunk: the target says what comes


class MtpDrafter:
    """See `drafter.Drafter`."""

    def __init__(self, device: Device, config: ServerConfig, model: HostMtp, target_states: Array) -> None:
        """target_states: f32[tokens, taps, hidden], what a pass of the target leaves of each token."""
        self._model = model
        rows, hidden = config.max_running, config.model.hidden_size

        def buffer(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Buffer:
            return device.buffer(shape, dtype, f"mtp.{name}")

        self._first = buffer((config.entries,), np.int32, "first")
        self._state = buffer((config.entries, hidden), np.float32, "state")
        self._tails = buffer((rows,), np.int32, "tails")
        self._next = buffer((config.pass_tokens,), np.int32, "next")
        self._places = buffer((rows,), np.int32, "places")
        self._logits = buffer((rows, len(model.vocabulary)), np.float32, "logits")
        self._work = buffer((rows, 1, hidden), np.float32, "work")
        caches = device.adopt(model.k_cache, "mtp.k_cache"), device.adopt(model.v_cache, "mtp.v_cache")
        own = (self._first, self._state, self._next, self._places, self._logits, self._work, *caches)
        self._own: Regions = tuple(part.region() for part in own)
        self._target = device.adopt(target_states, "target.states")
        self._order = np.arange(rows, dtype=np.int32)

    @property
    def observes(self) -> Regions:
        """The target's states."""
        return (self._target.region(),)

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """The first draft is there; each other one is a pass over one place of every row."""
        if shape.decode and shape.window > 1:
            inputs = (batch.tokens, batch.positions, batch.pages, batch.entries)
            reads = (*(part.region() for part in inputs), *self._own)
            launch("draft", self._draft, rows, shape, reads=reads, writes=(batch.tokens.region(), *self._own))

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """Note what comes behind each chunk: the prompt's next token, where it has one."""
        chunks = step.chunks[:, : step.n_chunks]
        ends = np.where(chunks[CHUNK_LAST] != 0, NO_TAIL, chunks[CHUNK_START] + chunks[CHUNK_COUNT])
        wanted = list(zip(chunks[CHUNK_ROW].tolist(), ends.tolist(), strict=True))
        launch(
            "note tails",
            self._note_tails,
            *(plane.array, wanted),
            reads=[plane.rows(row, row + 1) for row, _ in wanted],
            writes=(self._tails.region(),),
        )

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """Pass over all places with what the target made of them, and keep what the next step begins with."""
        inputs = (batch.tokens, batch.positions, batch.seqs, batch.pages, batch.starts, batch.entries, batch.logit_rows)
        reads = (*(part.region() for part in (*inputs, batch.targets, self._tails)), *lane.gained_region)
        launch(
            "draft extend",
            self._extend,
            *(rows, batch.targets.array, lane.counts, shape),
            reads=(*reads, *self.observes, *self._own),
            writes=self._own,
        )

    def _draft(self, rows: Rows, shape: PassShape) -> None:
        count, window, model = shape.decode, shape.window, self._model
        entries, order, pages = rows.entries[:count], self._order[:count], rows.pages[:count]
        logits, state = self._logits.array[:count], self._work.array[:count]
        drafts = rows.tokens[: count * window].reshape(count, window)
        begins = rows.positions[: count * window : window]
        drafts[:, 1] = self._first.array[entries]
        np.take(self._state.array, entries, axis=0, out=state[:, 0])
        for w in range(2, window):
            given = np.ascontiguousarray(drafts[:, w - 1])
            model.draft(state, given, begins + np.int32(w - 2), order, pages, order, logits)
            drafts[:, w] = model.vocabulary[logits.argmax(axis=1)]
            np.copyto(state[:, 0], model.residual[:count])

    def _note_tails(self, plane: Array, wanted: list[tuple[int, int]]) -> None:
        tails = self._tails.array
        for chunk, (row, end) in enumerate(wanted):
            tails[chunk] = NO_TAIL if end == NO_TAIL else plane[row, end]

    def _extend(self, rows: Rows, targets: Array, counts: Array, shape: PassShape) -> None:
        tokens, gainers, model = shape.tokens, shape.gainers, self._model
        behind, places = self._next.array[:tokens], self._places.array[:gainers]
        tails = self._tails.array
        next_tokens(rows.tokens, rows.starts, targets, tails, shape.decode, shape.chunks, shape.window, behind)
        newest_places(counts, rows.logit_rows, shape.decode, shape.lasts, shape.window, places)
        logits, states = self._logits.array[:gainers], self._target.array[:tokens]
        passed = (rows.positions[:tokens], rows.seqs[:tokens], rows.pages[: shape.rows])
        model.follow(states, behind, *passed, places, logits)
        entries: Any = rows.entries[:gainers]
        self._first.array[entries] = model.vocabulary[logits.argmax(axis=1)]
        self._state.array[entries] = model.residual[places]
