"""Lanes: the buffers and events of one step that another step may not touch while this one is in flight.

Owns what rotates. Steps take the lanes in turn, and there is one more of them than steps in flight, so the schedule
stream can fill the next descriptor and the copy stream can still read the last result while a step runs. A lane is
taken again only behind the event that says that its last step has left it. Never holds what only the forward stream
touches: that is the batch, and one is enough.
"""

import time
from dataclasses import dataclass

import numpy as np

from gpu.device.protocol import Buffer, Device, DeviceError, Event, Regions
from gpu.kernels.host_step import OK, copy_ids, explain
from shm.config import ServerConfig
from shm.limits import STEPS_IN_FLIGHT
from shm.records import ResultLayout, ResultView, StepLayout, StepView

LANES = STEPS_IN_FLIGHT + 1
BEGIN, END = 0, 1  # of Lane.clock


@dataclass(frozen=True)
class StepSlot:
    """A step descriptor in pinned memory. Whoever filled it leaves it alone until the step is complete."""

    buffer: Buffer
    view: StepView


@dataclass(frozen=True)
class ResultSlot:
    """Pinned memory for the result of one step."""

    buffer: Buffer
    view: ResultView


@dataclass(frozen=True)
class Lane:
    """What one step in flight has to itself."""

    index: int
    descriptor: Buffer  # i32, the device's copy of the step descriptor
    view: StepView  # its sections
    ids: Buffer  # i32[prefill_chunk] prompt tokens of all chunks, end to end
    lengths: Buffer  # i32[max_rows] published lengths
    sampled: Buffer  # i32[max_rows] new token of each row
    clock: Buffer  # i64[2] when the device began and ended the step, CLOCK_MONOTONIC ns
    staged: Event  # schedule stream: descriptor and tables are ready for the step
    published: Event  # forward stream: lengths are there
    done: Event  # forward stream: the step has ended
    left: Event  # copy stream: nothing will touch the lane any more

    @property
    def staging(self) -> Regions:
        """What the schedule stream fills."""
        return (self.descriptor.region(), self.ids.region())

    def upload(self, step: StepSlot, plane: Buffer) -> None:
        """Copy the used part of a descriptor, and the chunks' tokens from the ledger's plane i32[rows, max_len].

        Raises DeviceError for a chunk that is no part of its row.
        """
        ints = step.view.used_nbytes // self.descriptor.array.itemsize
        np.copyto(self.descriptor.array[:ints], step.buffer.array[:ints])
        if self.view.n_chunks:
            fault = copy_ids(self.view.chunks, self.view.n_chunks, plane.array, self.ids.array)
            if fault != OK:
                raise DeviceError(explain(fault))

    def stamp(self, which: int) -> None:
        """Note the time of BEGIN or END."""
        self.clock.array[which] = time.monotonic_ns()

    def write_result(self, result: ResultView, rows: int) -> None:
        """Copy the outcome of `rows` rows to pinned memory. With W = 1 every row has gained one token."""
        result.n_rows = rows
        result.window = 1
        result.begin_ns, result.end_ns = self.clock.array.tolist()
        result.step = self.view.step
        result.counts[:rows] = 1
        result.tokens[0, :rows] = self.sampled.array[:rows]


def make_lanes(device: Device, config: ServerConfig) -> tuple[Lane, ...]:
    """All lanes of a program."""
    layout, max_rows = StepLayout(config), ResultLayout(config).max_rows

    def lane(i: int) -> Lane:
        descriptor = device.buffer((layout.nbytes // 4,), np.int32, f"descriptor{i}")
        return Lane(
            index=i,
            descriptor=descriptor,
            view=layout.view(descriptor.array),
            ids=device.buffer((config.prefill_chunk,), np.int32, f"ids{i}"),
            lengths=device.buffer((max_rows,), np.int32, f"lengths{i}"),
            sampled=device.buffer((max_rows,), np.int32, f"sampled{i}"),
            clock=device.buffer((2,), np.int64, f"clock{i}"),
            staged=device.event(f"staged{i}"),
            published=device.event(f"published{i}"),
            done=device.event(f"done{i}"),
            left=device.event(f"left{i}"),
        )

    return tuple(lane(i) for i in range(LANES))
