"""The step program: queues one step on the device's streams, from its descriptor to its result.

    schedule  wait fence(N-1) -> descriptor to the device -> slot and sampling writes -> staged
    forward   wait staged -> begin -> gather -> fence(N) -> (draft) -> model -> sample -> accept (lengths are published)
              -> (learn) -> stash tokens -> end -> done; a plan, for attention that needs one, stands behind begin
    lengths   wait published -> early copy of the lengths; only for programs that want them on the CPU
    copy      wait done -> result to pinned memory -> complete (head, release) -> left

Owns the streams, what lives on the device, and the order of all that touches it. What the next step needs of this one
stays in the relay, so a step can be queued before the one in front of it has run. Never waits for the device, and
never looks at a token or at the length of a running request.

A decode row takes a window of tokens: its newest one, and what a drafter puts behind it. The target samples a token
behind each of them, and a row gains those up to the first that no draft foresaw. Without a drafter windows are of one
token, and all of this still holds.

A decode step's pass, from gather to stash, is captured for every padded batch size, window and lane and replayed by one
call; a step with chunks is queued operation by operation, by the same code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from gpu.batch import Batch, Gather
from gpu.device.protocol import Completion, Device, Regions
from gpu.drafters.drafter import Drafter
from gpu.early_lengths import EarlyLengths
from gpu.fence import Fence
from gpu.graphs import DecodeGraphs, GraphKey
from gpu.kernels.step_kernels import Array, Extents, PassShape, StepKernels
from gpu.lanes import LANES, Lane, ResultSlot, StepSlot, make_lanes
from gpu.pass_plans import PassPlans, Plan
from gpu.relay import Relay
from gpu.sampling_table import SamplingTable
from gpu.slots import SlotTable
from shm.config import ServerConfig
from shm.records import CHUNK_ROW, STEP_DECODE, StepView


class Model(Protocol):
    """What the program needs of a model. The caches are its own; pages of them are named in `page_rows`."""

    k_cache: Array
    v_cache: Array

    def forward(
        self,
        tokens: Array,
        positions: Array,
        seqs: Array,
        page_rows: Array,
        logit_rows: Array,
        logits: Array,
        extents: Extents,
    ) -> None:
        """One pass over tokens, positions, seqs i32[T]: token t of sequence seqs[t] stands at positions[t].

        page_rows i32[R, pages_per_row]: where the sequences live. logits f32[S, V] are written for the tokens that
        logit_rows i32[S] names. extents: the same, row by row, for implementations that work so.
        """


Sampler = Callable[[Array, Array, Array, Array, Array, Array, Array, Array], None]


class StepProgram:
    """The device side of the server. Calls come from one thread."""

    def __init__(
        self,
        device: Device,
        config: ServerConfig,
        model: Model,
        kernels: StepKernels,
        sample: Sampler,
        ledger_tokens: Array,
        *,
        drafter: Drafter | None = None,
        early_lengths: bool = False,
        plan: Plan | None = None,
    ) -> None:
        """ledger_tokens: plane i32[rows, max_len] of the ledger. drafter: for steps with drafts; it must be there if
        the configuration's window is more than one. early_lengths: copy lengths out before a step ends.

        plan: called before every pass with its lengths, for a model that needs them on the CPU.
        """
        self._device = device
        self._model = model
        self.kernels = kernels
        self._sample = sample
        self.drafter = drafter
        assert drafter is not None or config.window == 1, "nobody drafts"
        self.relay = Relay(device, config.entries, poison=config.poison)
        self.slots = SlotTable(device, config.entries, config.pages_per_row)
        self.sampling = SamplingTable(device, config.entries)
        self.fence = Fence(device, LANES)
        self.batch = Batch(device, config)
        self.lanes = make_lanes(device, config, kernels)
        self._gather = Gather(kernels, self.relay, self.slots, self.sampling)
        self._plane = device.pinned(ledger_tokens, "ledger.tokens")
        caches = device.adopt(model.k_cache, "k_cache"), device.adopt(model.v_cache, "v_cache")
        self.caches: Regions = tuple(cache.region() for cache in caches)
        self.kv_bytes = sum(cache.nbytes for cache in caches)
        self.schedule = device.stream("schedule")
        self.forward = device.stream("forward")
        self.copy = device.stream("copy")
        assert len({id(stream) for stream in (self.schedule, self.forward, self.copy)}) == 3, "streams are secretly one"
        self.early_lengths = EarlyLengths(device, kernels, self.batch.max_rows) if early_lengths else None
        self.plans = None if plan is None else PassPlans(device, plan, config.entries)
        planned: Regions = () if self.plans is None else self.plans.regions
        self._model_reads: Regions = (*self.batch.model_inputs, *self.caches, *planned)
        observed: Regions = () if drafter is None else drafter.observes
        self._model_writes: Regions = (*self.caches, self.batch.logits.region(), *observed)
        windows = (1,) if config.window == 1 else (1, config.window)
        self.graphs = DecodeGraphs(device, self.forward, config.max_running, windows, LANES)
        self.steps_launched = 0

    def capture(self) -> int:
        """Record the decode graphs; once, before the first step. Returns how many there are.

        On a device that asks for it, each shape runs once before: as padding, which leaves nothing behind.
        """
        for rows in self.graphs.sizes:
            if self.plans is not None:
                self.plans.prepare(self.forward, rows)
            for window in self.graphs.windows if self._device.warms_before_capture else ():
                self._issue(self.lanes[0], PassShape.of_decode(rows, window))
        self._device.synchronize()
        return self.graphs.capture(self._issue_captured)

    def enqueue(self, step: StepSlot, result: ResultSlot, complete: Callable[[], None]) -> Completion:
        """Queue one step and return. Neither slot may be written by anybody else until `complete` has run.

        `complete` is the host function that runs once `result` holds the result; steps complete in the order of the
        calls. Asserts that the descriptor keeps the scheduler's bounds. Raises DeviceError if an earlier step has
        failed.
        """
        lane = self.lanes[self.steps_launched % LANES]
        shape = PassShape.of_step(step.view)
        self.batch.check(shape)
        self._device.host_access(  # others filled the one and are through with what was in the other
            reads=(result.buffer.region(),), writes=(step.buffer.region(),), name="slots handed in"
        )
        self._stage(lane, step)
        lane.staged.wait(self.forward)  # SYNC step-staged
        result.begin.record(self.forward)
        if step.view.kind == STEP_DECODE:
            assert shape.chunks == 0, "a decode step has no chunks"
            key = self.graphs.key(shape.decode, shape.window, lane.index)
            self._plan_pass(lane, step, key.rows)
            self.graphs.launch(key)
        else:
            self._plan_pass(lane, step, shape.rows)
            self._issue(lane, shape, step.view)
        result.end.record(self.forward)
        lane.done.record(self.forward)  # SYNC step-done
        if self.early_lengths is not None:
            self.early_lengths.queue(lane)
        completion = self._deliver(lane, step.view.step, result, shape, complete)
        if self.plans is not None:
            self.plans.over_with(lane, completion)
        self.steps_launched += 1
        return completion

    def _plan_pass(self, lane: Lane, step: StepSlot, rows: int) -> None:
        if self.plans is not None:
            self.plans.plan(self.forward, lane, step.view, rows)

    def _stage(self, lane: Lane, step: StepSlot) -> None:
        """Schedule stream: bring the step's descriptor to the device and the shared tables up to date."""
        device, stream, view, kernels = self._device, self.schedule, step.view, self.kernels
        descriptor, fault, faults = (lane.descriptor.region(),), lane.fault, lane.fault_region
        lane.left.wait(stream)  # SYNC lane-left
        self.fence.hold(stream, self.steps_launched)
        rows = [self._plane.rows(row, row + 1) for row in view.chunks[CHUNK_ROW, : view.n_chunks].tolist()]
        arrays = (lane.descriptor.array, self._plane.array, lane.ids.array, fault)
        device.launch(
            stream,
            partial(kernels.upload, view, step.buffer.array, *arrays),
            reads=(step.buffer.region(), *rows),
            writes=lane.staging,
            name="upload",
        )
        if view.n_slot_writes:
            write = partial(kernels.write_slots, lane.step, view.n_slot_writes, self.slots.table.array, fault)
            device.launch(stream, write, reads=descriptor, writes=(self.slots.region, *faults), name="slot writes")
        if view.n_sampling:
            table = (self.sampling.real.array, self.sampling.top_k.array, self.sampling.seed.array)
            write = partial(kernels.write_sampling, lane.step, view.n_sampling, *table, fault)
            writes = (*self.sampling.regions, *faults)
            device.launch(stream, write, reads=descriptor, writes=writes, name="sampling writes")
        lane.staged.record(stream)  # SYNC step-staged

    def _issue_captured(self, key: GraphKey) -> None:
        self._issue(self.lanes[key.lane], PassShape.of_decode(key.rows, key.window))

    def _issue(self, lane: Lane, shape: PassShape, step: StepView | None = None) -> None:
        """Forward stream: the pass and all around it. Captured for decode steps, queued as it is for the others.

        step: the descriptor of a step with chunks, as the host sees it.
        """
        stream, batch, relay, kernels, drafter = self.forward, self.batch, self.relay, self.kernels, self.drafter
        arrays, rows = batch.arrays(lane, shape), batch.rows(lane)
        entries, lengths, newest = batch.entries.region(), lane.lengths.region(), batch.newest.region()

        def launch(name: str, fn: Callable[..., None], *args: Any, reads: Regions, writes: Regions) -> None:
            self._device.launch(stream, partial(fn, *args), reads=reads, writes=writes, name=name)

        launch(
            "gather",
            self._gather.run,
            *(lane, rows, shape),
            reads=(*self._gather.reads, *lane.staging),
            writes=(*self._gather.writes, *batch.gathered, lengths, *lane.fault_region),
        )
        self.fence.record(stream, lane.index)
        if drafter is not None:
            drafter.draft(launch, batch, rows, shape)
            if step is not None:
                drafter.prefill(launch, batch, rows, shape, step, self._plane)
        launch(
            "model",
            self._model.forward,
            *arrays.model,
            reads=self._model_reads,
            writes=self._model_writes,
        )
        if shape.samples:
            launch(
                "sample",
                self._sample,
                *arrays.sampler,
                reads=batch.sampler_inputs,
                writes=(batch.targets.region(), batch.logits.region()),  # a sampler may work in the logits
            )
        launch(
            "accept",
            kernels.accept,
            *(rows, arrays.targets, arrays.gained, relay.length.array, shape),
            reads=(batch.tokens.region(), entries, lengths, batch.targets.region()),
            writes=(*lane.gained_region, newest, lengths, relay.length.region()),
        )
        if self.early_lengths is not None:
            lane.published.record(stream)  # SYNC lengths-published
        if drafter is not None:
            drafter.learn(launch, batch, rows, shape, lane)
        stash = (relay.token.array, arrays.entries, arrays.gained.newest)
        launch("stash", kernels.stash, *stash, reads=(entries, newest), writes=(relay.token.region(),))

    def _deliver(
        self, lane: Lane, step: int, result: ResultSlot, shape: PassShape, complete: Callable[[], None]
    ) -> Completion:
        """Copy stream: the result to pinned memory, then the host's part."""
        device, stream, payload = self._device, self.copy, result.buffer.region()
        rows, window = shape.gainers, shape.window
        ints = lane.results.tokens_at + (window - 1) * lane.results.max_rows + rows  # planes are as wide as can be

        def completed() -> None:
            result.finish(rows, window, step)
            complete()

        lane.done.wait(stream)  # SYNC step-done
        device.launch(
            stream,
            partial(self.kernels.deliver, lane.outcome.array, result.buffer.array, ints),
            reads=(lane.outcome.rows(0, ints),),
            writes=(payload,),
            name="result",
        )
        times = (result.begin.region(), result.end.region())
        completion = device.call(stream, completed, reads=(payload, *times), writes=(payload,), name="complete")
        if self.early_lengths is not None:
            self.early_lengths.hold(stream, lane)
        lane.left.record(stream)  # SYNC lane-left
        return completion
