"""The early copy of the lengths: what a step has published, in pinned memory while the step still runs.

Owns the lengths stream, its events and the pinned copies, one for each lane. It is for whoever has to know lengths on
the CPU before a step has ended and cannot work them out, as attention that is planned there could not with drafts. No
server asks for it yet: then there are neither the stream nor the events. Never waits on the CPU.
"""

from functools import partial

import numpy as np

from gpu.device.protocol import Device, Stream
from gpu.kernels.step_kernels import StepKernels
from gpu.lanes import LANES, Lane


class EarlyLengths:
    """`copies[i]`: i32[max_rows], valid from `out[i]` on and until the next step of lane i is queued."""

    def __init__(self, device: Device, kernels: StepKernels, max_rows: int) -> None:
        self._device = device
        self._kernels = kernels
        self._rows = max_rows
        self.stream = device.stream("lengths")
        self.copies = [device.pinned(np.zeros(max_rows, np.int32), f"early{i}") for i in range(LANES)]
        self.out = [device.event(f"lengths_out{i}") for i in range(LANES)]

    def queue(self, lane: Lane) -> None:
        """Queue the copy for the step in `lane`, behind its publishing."""
        copy = self.copies[lane.index]
        lane.published.wait(self.stream)  # SYNC lengths-published
        self._device.launch(
            self.stream,
            partial(self._kernels.deliver, lane.lengths.array, copy.array, self._rows),
            reads=(lane.lengths.region(),),
            writes=(copy.region(),),
            name="early lengths",
        )
        self.out[lane.index].record(self.stream)  # SYNC lengths-out

    def hold(self, stream: Stream, lane: Lane) -> None:
        """What is queued on `stream` from now on runs behind the copy for the step in `lane`."""
        self.out[lane.index].wait(stream)  # SYNC lengths-out
