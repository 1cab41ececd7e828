"""Plans of passes: what an attention that is planned on the CPU is told before every pass.

Owns the lengths of all entries as the launching thread knows them, and the order of planning: a plan is copied to the
device from pinned memory, which may be used again only once the step that it was made for is over. Only programs whose
attention needs lengths on the CPU have it. Exact while a step gains one token for each row: then a length follows from
descriptors alone, and no result has to reach the CPU. Never waits for the device.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device.protocol import Completion, Device, DeviceError, Regions, Stream
from gpu.lanes import LANES, Lane
from shm.records import CHUNK_COUNT, CHUNK_ENTRY, CHUNK_START, STEP_DECODE, StepView

Plan = Callable[[NDArray[np.int32] | None, int], None]  # see `attention_contract.Attention.plan`


class PassPlans:
    """The plans of one program. The library owns their memory; buffers of one word stand for it."""

    def __init__(self, device: Device, plan: Plan, entries: int) -> None:
        self._device = device
        self._make = plan
        self._lengths = np.zeros(entries, np.int32)  # tokens of each entry in the cache once all that is queued has run
        self._sources = [device.pinned(np.zeros(1, np.int32), f"plan source {i}") for i in range(LANES)]
        self._target = device.buffer((1,), np.int32, "plan")
        self._steps: list[Completion | None] = [None] * LANES

    @property
    def regions(self) -> Regions:
        """What a planned pass reads."""
        return (self._target.region(),)

    @property
    def memory(self) -> Any:
        """i32[1] on the device: what stands for a plan, for models that keep theirs in it."""
        return self._target.array

    def prepare(self, stream: Stream, rows: int) -> None:
        """Plan a pass of `rows` rows of padding, and wait for it: only before the first step."""
        self._launch(stream, 0, np.zeros(0, np.int32), rows)
        self._device.synchronize()

    def plan(self, stream: Stream, lane: Lane, step: StepView, rows: int) -> None:
        """Plan the pass of `step` on `stream`, over `rows` rows with padding. Raises DeviceError for a lane in use."""
        before = self._steps[lane.index]
        if before is not None and not before.query():
            raise DeviceError("a pass is planned in memory that a step in flight may still need")
        lengths = self._advance(step)
        self._launch(stream, lane.index, lengths if step.kind == STEP_DECODE else None, rows)

    def over_with(self, lane: Lane, completion: Completion) -> None:
        """The step of `lane` is over when `completion` says so."""
        self._steps[lane.index] = completion

    def _advance(self, step: StepView) -> NDArray[np.int32]:
        """Count in what `step` adds, and return the lengths of its decode rows. Padding always has one token."""
        decode, chunks = step.decode_entries[: step.n_decode], step.chunks[:, : step.n_chunks]
        self._lengths[decode] += 1
        self._lengths[chunks[CHUNK_ENTRY]] = chunks[CHUNK_START] + chunks[CHUNK_COUNT]
        self._lengths[0] = 1
        lengths: NDArray[np.int32] = self._lengths[decode]
        return lengths

    def _launch(self, stream: Stream, number: int, lengths: NDArray[Any] | None, rows: int) -> None:
        source = (self._sources[number].region(),)
        self._device.host_access(reads=(), writes=source, name="planning")
        act = partial(self._make, lengths, rows)
        self._device.launch(stream, act, reads=source, writes=self.regions, name="plan")
