"""The mtp drafter: one layer that goes on where the target's last state stands, trained for its target.

Owns its cache, which has the target's pages, and a state of each entry: what the newest place joins of the target's
states and of the token behind it reaches the next step that way, on the device. Behind every pass the drafter takes the
keys and values of all of its places from the target's states and the tokens that the target chose: so its cache has,
for every position that counts, what it would have without drafts, after steps of any window, chunks and retractions
alike; and a step that does not draft pays for little more than that. Since a place holds what follows from the token
behind it as well, the prefix cache has that token in the key of each page (`procs.prefix_cache`). It drafts what it
finds likeliest, whatever the temperature.
"""

from typing import Any, Protocol

import numpy as np

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.draft_kernels import NO_TAIL, Tail, TrainedKernels
from gpu.kernels.step_kernels import Array, Extents, PassShape, Rows
from gpu.lanes import Lane
from shm.config import ServerConfig
from shm.records import CHUNK_COUNT, CHUNK_LAST, CHUNK_ROW, CHUNK_START, StepView


class MtpModel(Protocol):
    """See `HostMtp`."""

    k_cache: Array
    v_cache: Array
    vocabulary: Array  # i32[D]
    residual: Array  # [tokens, hidden]

    def learn(self, *arguments: Any) -> None:
        """Take keys and values from the target's states and the tokens behind them."""

    def begin(self, *arguments: Any) -> None:
        """A pass that goes on with what is left of that."""

    def draft(self, *arguments: Any) -> None:
        """A pass behind its own."""


class MtpDrafter:
    """See `drafter.Drafter`."""

    def __init__(
        self, device: Device, config: ServerConfig, model: MtpModel, target_states: Array, kernels: TrainedKernels
    ) -> None:
        """target_states: f32[tokens, taps, hidden], what a pass of the target leaves of each token."""
        self._model = model
        self._kernels = kernels
        rows, hidden = config.max_running, config.model.hidden_size

        def buffer(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Buffer:
            return device.buffer(shape, dtype, f"mtp.{name}")

        self._state = buffer((config.entries, hidden), np.float32, "state")
        self._tails = buffer((rows,), np.int32, "tails")
        self._next = buffer((config.pass_tokens,), np.int32, "next")
        self._places = buffer((rows,), np.int32, "places")
        self._given = buffer((rows,), np.int32, "given")
        self._at = buffer((rows,), np.int32, "at")
        self._ends = buffer((rows,), np.int32, "ends")
        self._order = buffer((rows + 1,), np.int32, "order")
        self._logits = buffer((rows, len(model.vocabulary)), np.float32, "logits")
        self._work = buffer((rows, 1, hidden), np.float32, "work")
        caches = device.adopt(model.k_cache, "mtp.k_cache"), device.adopt(model.v_cache, "mtp.v_cache")
        work = (self._next, self._places, self._given, self._at, self._ends, self._order)
        own = (self._state, *work, self._logits, self._work, *caches)
        self._own: Regions = tuple(part.region() for part in own)
        self._target = device.adopt(target_states, "target.states")

    @property
    def observes(self) -> Regions:
        """The target's states."""
        return (self._target.region(),)

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """Each draft is a pass over one place of every row; the first one goes on with what was kept."""
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
        wanted = [Tail(row, end) for row, end in zip(chunks[CHUNK_ROW].tolist(), ends.tolist(), strict=True)]
        launch(
            "note tails",
            self._kernels.note_tails,
            *(plane.array, wanted, self._tails.array),
            reads=[plane.rows(tail.row, tail.row + 1) for tail in wanted],
            writes=(self._tails.region(),),
        )

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """Take the keys and values of all places, and keep what the next step begins with."""
        inputs = (*batch.model_inputs, batch.entries.region(), batch.targets.region(), self._tails.region())
        reads = (*inputs, *lane.gained_region)
        launch(
            "draft extend",
            self._extend,
            *(rows, batch.targets.array, lane.counts, shape),
            reads=(*reads, *self.observes, *self._own),
            writes=self._own,
        )

    def _draft(self, rows: Rows, shape: PassShape) -> None:
        count, window, model, kernels = shape.decode, shape.window, self._model, self._kernels
        given, at, ends = (part.array[:count] for part in (self._given, self._at, self._ends))
        order, pages = self._order.array[: count + 1], rows.pages[:count]
        logits, states = self._logits.array[:count], self._work.array[:count]
        kernels.count(order)
        kernels.recall(self._state.array, rows, shape, states)
        for w in range(1, window):
            kernels.take(rows.tokens, window, w - 1, given)
            kernels.take(rows.positions, window, 0, at)
            kernels.add(at, w - 2, at)  # the first pass is over the place before the newest token's
            kernels.add(at, 1, ends)
            passed = (given, at, order[:count], pages, order[:count], logits, Extents(order, ends, 1))
            if w == 1:
                model.begin(states, *passed)
            else:
                kernels.copy_states(model.residual[:count], states)
                model.draft(states, *passed)
            kernels.put_drafts(logits, model.vocabulary, rows.tokens, window, w)

    def _extend(self, rows: Rows, targets: Array, counts: Array, shape: PassShape) -> None:
        tokens, gainers, model, kernels = shape.tokens, shape.gainers, self._model, self._kernels
        behind, places = self._next.array[:tokens], self._places.array[:gainers]
        kernels.next_tokens(rows, targets, self._tails.array, shape, behind)
        kernels.newest_places(counts, rows, shape, places)
        passed = (rows.positions[:tokens], rows.seqs[:tokens], rows.pages[: shape.rows])
        extents = Extents(rows.starts[: shape.rows + 1], rows.ends[: shape.rows], shape.longest)
        nothing = (self._places.array[:0], self._logits.array[:0])
        model.learn(self._target.array[:tokens], behind, *passed, *nothing, extents)
        kernels.keep(self._state.array, rows.entries[:gainers], model.residual, places)
