"""Lanes: the buffers and events of one step that another step may not touch while this one is in flight.

Owns what rotates. Steps take the lanes in turn, and there is one more of them than steps in flight, so the schedule
stream can fill the next descriptor and the copy stream can still read the last result while a step runs. A lane is
taken again only behind the event that says that its last step has left it. Never holds what only the forward stream
touches: that is the batch, and one is enough. What a step is told and what it answers lies in slots that belong to
the caller, because another process reads and writes them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.device.protocol import Buffer, Device, DeviceError, Event, Regions, Timestamp
from gpu.kernels.step_kernels import OK, Array, StepKernels, explain
from shm.config import ServerConfig
from shm.limits import STEPS_IN_FLIGHT
from shm.records import RESULT_FAULT, ResultLayout, ResultView, StepLayout, StepView

LANES = STEPS_IN_FLIGHT + 1


@dataclass(frozen=True)
class StepSlot:
    """A step descriptor in pinned memory. Whoever filled it leaves it alone until the step is complete."""

    buffer: Buffer
    view: StepView

    @classmethod
    def on(cls, device: Device, layout: StepLayout, payload: Array, name: str) -> "StepSlot":
        """The slot in payload i32[layout.nbytes // 4], host memory that the device gets to know by `name`."""
        return cls(device.pinned(payload, name), layout.view(payload))


@dataclass(frozen=True)
class ResultSlot:
    """Pinned memory for the result of one step, and the time that its step took."""

    buffer: Buffer
    view: ResultView
    begin: Timestamp
    end: Timestamp

    @classmethod
    def on(
        cls, device: Device, layout: ResultLayout, payload: Array, name: str, number: int | str = ""
    ) -> "ResultSlot":
        """The slot in payload i32[layout.nbytes // 4]; `number` tells the times of one slot from those of others."""
        times = device.timestamp(f"begin{number}"), device.timestamp(f"end{number}")
        return cls(device.pinned(payload, name), layout.view(payload), *times)

    def finish(self, rows: int, window: int, step: int) -> None:
        """Write what the device does not know into the header. Raises DeviceError for what it had to say.

        Runs as the first part of the host function behind the copy of the result.
        """
        view = self.view
        if view.fault != OK:
            raise DeviceError(explain(view.fault))
        if rows:
            last = view.tokens[view.counts[:rows] - 1, np.arange(rows)]
            if last.min() < 0:
                raise DeviceError(f"logits of rows {np.flatnonzero(last < 0).tolist()} hold NaN or no finite value")
        view.n_rows, view.window = rows, window
        view.begin_ns, view.end_ns = self.begin.ns(), self.end.ns()
        view.step = step


@dataclass(frozen=True)
class Lane:
    """What one step in flight has to itself."""

    index: int
    descriptor: Buffer  # i32, the device's copy of the step descriptor
    step: Any  # how kernels see it, see StepKernels.view
    ids: Buffer  # i32[prefill_chunk] prompt tokens of all chunks, end to end
    lengths: Buffer  # i32[max_rows] published lengths
    outcome: Buffer  # i32, the result as the device knows it: fault, counts and tokens of a ResultLayout
    results: ResultLayout
    staged: Event  # schedule stream: descriptor and tables are ready for the step
    published: Event  # forward stream: lengths are there
    done: Event  # forward stream: the step has ended
    left: Event  # copy stream: nothing will touch the lane any more

    @property
    def staging(self) -> Regions:
        """What the schedule stream fills."""
        return (self.descriptor.region(), self.ids.region(), *self.fault_region)

    @property
    def fault_region(self) -> Regions:
        """Where a device that cannot raise leaves its code."""
        return (self.outcome.rows(RESULT_FAULT, RESULT_FAULT + 1),)

    @property
    def fault(self) -> Array:
        """i32[1]"""
        return self.outcome.array[RESULT_FAULT : RESULT_FAULT + 1]

    @property
    def counts(self) -> Array:
        """i32[max_rows] tokens that each row has gained."""
        return self.outcome.array[self.results.counts_at : self.results.tokens_at]

    @property
    def gained(self) -> Array:
        """i32[window, max_rows] the tokens that each row has gained, plane by plane."""
        layout = self.results
        return self.outcome.array[layout.tokens_at : layout.nbytes // 4].reshape(layout.window, layout.max_rows)

    @property
    def gained_region(self) -> Regions:
        """All of `counts` and `gained`."""
        return (self.outcome.rows(self.results.counts_at, self.results.nbytes // 4),)


def make_lanes(device: Device, config: ServerConfig, kernels: StepKernels) -> tuple[Lane, ...]:
    """All lanes of a program."""
    layout, results = StepLayout(config), ResultLayout(config)

    def lane(i: int) -> Lane:
        descriptor = device.buffer((layout.nbytes // 4,), np.int32, f"descriptor{i}")
        return Lane(
            index=i,
            descriptor=descriptor,
            step=kernels.view(descriptor.array),
            ids=device.buffer((config.prefill_chunk,), np.int32, f"ids{i}"),
            lengths=device.buffer((results.max_rows,), np.int32, f"lengths{i}"),
            outcome=device.buffer((results.nbytes // 4,), np.int32, f"outcome{i}"),
            results=results,
            staged=device.event(f"staged{i}"),
            published=device.event(f"published{i}"),
            done=device.event(f"done{i}"),
            left=device.event(f"left{i}"),
        )

    return tuple(lane(i) for i in range(LANES))
