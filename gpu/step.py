"""The step program: queues one step on the device's streams, from its descriptor to its result.

    schedule  wait fence(N-1) -> descriptor to the device -> slot and sampling writes -> staged
    forward   wait staged -> gather -> fence(N) -> model -> sample -> publish lengths -> stash tokens -> done
    lengths   wait published -> early copy of the lengths; only for models that need them on the CPU
    copy      wait done -> result to pinned memory -> complete (head, release) -> left

Owns the streams, what lives on the device, and the order of all that touches it. What the next step needs of this one
stays in the relay, so a step can be queued before the one in front of it has run. Never waits for the device, and
never looks at a token or at the length of a running request.

A decode step's part on the forward stream is captured, for every padded batch size and lane, and replayed by one
call; a step with chunks is queued operation by operation, by the same code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu.batch import Batch, Gather, PassShape
from gpu.device.protocol import Device, Regions
from gpu.early_lengths import EarlyLengths
from gpu.fence import Fence
from gpu.graphs import DecodeGraphs, GraphKey
from gpu.lanes import BEGIN, END, LANES, Lane, ResultSlot, StepSlot, make_lanes
from gpu.relay import Relay
from gpu.sampling_table import SamplingTable
from gpu.slots import SlotTable
from shm.config import ServerConfig
from shm.records import CHUNK_ROW, STEP_DECODE

Ints = NDArray[np.int32]
Reals = NDArray[np.float32]


class Model(Protocol):
    """What the program needs of a model. The caches are its own; pages of them are named in `page_rows`."""

    k_cache: NDArray[Any]
    v_cache: NDArray[Any]

    def forward(
        self, tokens: Ints, positions: Ints, seqs: Ints, page_rows: Ints, logit_rows: Ints, logits: Reals
    ) -> None:
        """One pass over tokens, positions, seqs i32[T]: token t of sequence seqs[t] stands at positions[t].

        page_rows i32[R, pages_per_row]: where the sequences live. logits f32[S, V] are written for the tokens that
        logit_rows i32[S] names.
        """


Sampler = Callable[[Reals, Reals, Reals, Reals, Ints, NDArray[np.uint64], Ints, Ints], None]


class StepProgram:
    """The device side of the server. Calls come from one thread."""

    def __init__(
        self,
        device: Device,
        config: ServerConfig,
        model: Model,
        sample: Sampler,
        ledger_tokens: Ints,
        *,
        early_lengths: bool = False,
    ) -> None:
        """ledger_tokens: plane i32[rows, max_len] of the ledger. early_lengths: copy lengths out before a step ends."""
        self._device = device
        self._model = model
        self._sample = sample
        self.relay = Relay(device, config.entries, poison=config.poison)
        self.slots = SlotTable(device, config.entries, config.pages_per_row, config.pages)
        self.sampling = SamplingTable(device, config.entries)
        self.fence = Fence(device, LANES)
        self.batch = Batch(device, config)
        self.lanes = make_lanes(device, config)
        self._gather = Gather(self.relay, self.slots, self.sampling, config.page_size)
        self._plane = device.pinned(ledger_tokens, "ledger.tokens")
        caches = device.adopt(model.k_cache, "k_cache"), device.adopt(model.v_cache, "v_cache")
        self._kv: Regions = tuple(cache.region() for cache in caches)
        self.kv_bytes = sum(cache.nbytes for cache in caches)
        self.schedule = device.stream("schedule")
        self.forward = device.stream("forward")
        self.copy = device.stream("copy")
        self.early_lengths = EarlyLengths(device, self.batch.max_rows) if early_lengths else None
        self.graphs = DecodeGraphs(device, self.forward, config.max_running, LANES)
        self.steps_launched = 0

    def capture(self) -> int:
        """Record the decode graphs; once, before the first step. Returns how many there are."""
        return self.graphs.capture(self._issue_captured)

    def enqueue(self, step: StepSlot, result: ResultSlot, complete: Callable[[], None]) -> None:
        """Queue one step and return. Neither slot may be written by anybody else until `complete` has run.

        `complete` runs on the copy stream once `result` holds the result; steps complete in the order of the calls.
        Asserts that the descriptor keeps the scheduler's bounds. Raises DeviceError if an earlier step has failed.
        """
        lane = self.lanes[self.steps_launched % LANES]
        shape = PassShape.of_step(step.view)
        self.batch.check(shape)
        self._stage(lane, step)
        lane.staged.wait(self.forward)  # SYNC step-staged
        if step.view.kind == STEP_DECODE:
            assert shape.chunks == 0, "a decode step has no chunks"
            self.graphs.launch(self.graphs.key(shape.decode, lane.index))
        else:
            self._issue(lane, shape)
        if self.early_lengths is not None:
            self.early_lengths.queue(lane)
        self._deliver(lane, result, shape.samples, complete)
        self.steps_launched += 1

    def _stage(self, lane: Lane, step: StepSlot) -> None:
        """Schedule stream: bring the step's descriptor to the device and the shared tables up to date."""
        device, stream, view = self._device, self.schedule, step.view
        lane.left.wait(stream)  # SYNC lane-left
        self.fence.hold(stream, self.steps_launched)
        rows = [self._plane.rows(row, row + 1) for row in view.chunks[CHUNK_ROW, : view.n_chunks].tolist()]
        device.launch(
            stream,
            partial(lane.upload, step, self._plane),
            reads=(step.buffer.region(), *rows),
            writes=lane.staging,
            name="upload",
        )
        descriptor = (lane.descriptor.region(),)
        if view.n_slot_writes:
            write = partial(self.slots.write, lane.view)
            device.launch(stream, write, reads=descriptor, writes=(self.slots.region,), name="slot writes")
        if view.n_sampling:
            write = partial(self.sampling.write, lane.view)
            device.launch(stream, write, reads=descriptor, writes=self.sampling.regions, name="sampling writes")
        lane.staged.record(stream)  # SYNC step-staged

    def _issue_captured(self, key: GraphKey) -> None:
        self._issue(self.lanes[key.lane], PassShape.of_decode(key.rows))

    def _issue(self, lane: Lane, shape: PassShape) -> None:
        """Forward stream: the pass and all around it. Captured for decode steps, queued as it is for the others."""
        stream, batch, relay = self.forward, self.batch, self.relay
        arrays = batch.arrays(lane, shape)
        entries, lengths, sampled = batch.entries.region(), lane.lengths.region(), lane.sampled.region()

        def launch(name: str, fn: Callable[..., None], *args: Any, reads: Regions, writes: Regions) -> None:
            self._device.launch(stream, partial(fn, *args), reads=reads, writes=writes, name=name)

        launch("begin", lane.stamp, BEGIN, reads=(), writes=(lane.clock.rows(BEGIN, BEGIN + 1),))
        launch(
            "gather",
            self._gather.run,
            *(lane, batch.rows(lane), shape),
            reads=(*self._gather.reads, *lane.staging),
            writes=(*self._gather.writes, *batch.gathered, lengths),
        )
        self.fence.record(stream, lane.index)
        launch(
            "model",
            self._model.forward,
            *arrays.model,
            reads=(*batch.model_inputs, *self._kv),
            writes=(*self._kv, batch.logits.region()),
        )
        if shape.samples:
            launch(
                "sample",
                self._sample,
                *arrays.sampler,
                reads=batch.sampler_inputs,
                writes=(sampled, batch.logits.region()),  # a sampler may work in the logits
            )
        publish, stash = (arrays.entries, arrays.lengths), (arrays.entries, arrays.sampled)
        launch("publish", relay.publish, *publish, reads=(entries, lengths), writes=(relay.length.region(),))
        lane.published.record(stream)  # SYNC lengths-published
        launch("stash", relay.stash, *stash, reads=(entries, sampled), writes=(relay.token.region(),))
        launch("end", lane.stamp, END, reads=(), writes=(lane.clock.rows(END, END + 1),))
        lane.done.record(stream)  # SYNC step-done

    def _deliver(self, lane: Lane, result: ResultSlot, rows: int, complete: Callable[[], None]) -> None:
        """Copy stream: the result to pinned memory, then the host's part."""
        device, stream = self._device, self.copy
        lane.done.wait(stream)  # SYNC step-done
        device.launch(
            stream,
            partial(lane.write_result, result.view, rows),
            reads=(lane.sampled.region(), lane.clock.region(), lane.descriptor.region()),
            writes=(result.buffer.region(),),
            name="result",
        )
        device.call(stream, complete, reads=(result.buffer.region(),), writes=(), name="complete")
        if self.early_lengths is not None:
            self.early_lengths.hold(stream, lane)
        lane.left.record(stream)  # SYNC lane-left
