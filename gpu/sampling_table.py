"""The sampling table: how the next token of each running request is chosen, one column per relay entry.

Owns the parameters on the device. The scheduler sends them once, when a request gets its entry, so that a decode step
carries none of them. Written by the schedule stream, read by the gather of a step and nowhere else. Column 0 stays
zero: padding is greedy.
"""

import numpy as np

from gpu.device.protocol import Device, DeviceError, Regions
from gpu.kernels.host_step import OK, explain, write_sampling
from shm.records import StepView


class SamplingTable:
    """real f32[3, entries] (temperature, top_p, min_p), top_k i32[entries] (0 = off), seed u64[entries]."""

    def __init__(self, device: Device, entries: int) -> None:
        self.real = device.buffer((3, entries), np.float32, "sampling.real")
        self.top_k = device.buffer((entries,), np.int32, "sampling.top_k")
        self.seed = device.buffer((entries,), np.uint64, "sampling.seed")

    @property
    def regions(self) -> Regions:
        """All of it."""
        return (self.real.region(), self.top_k.region(), self.seed.region())

    def write(self, step: StepView) -> None:
        """Apply the sampling writes of a step. Raises DeviceError if one names an entry that does not exist."""
        fault = write_sampling(
            self.real.array, self.top_k.array, self.seed.array, step.sampling, step.sampling_f32, step.n_sampling
        )
        if fault != OK:
            raise DeviceError(explain(fault))
