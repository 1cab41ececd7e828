"""The sampling table: how the next token of each running request is chosen, one column per relay entry.

Owns the parameters on the device. The scheduler sends them once, when a request gets its entry, so that a decode step
carries none of them. Written by the schedule stream, read by the gather of a step and nowhere else. Column 0 stays
zero: padding is greedy.
"""

import numpy as np

from gpu.device.protocol import Device, Regions


class SamplingTable:
    """real f32[3, entries] (temperature, top_p, min_p), top_k i32[entries] (0 = off), seed u64[entries].

    Written by `StepKernels.write_sampling` alone.
    """

    def __init__(self, device: Device, entries: int) -> None:
        self.real = device.buffer((3, entries), np.float32, "sampling.real")
        self.top_k = device.buffer((entries,), np.int32, "sampling.top_k")
        self.seed = device.buffer((entries,), np.uint64, "sampling.seed")

    @property
    def regions(self) -> Regions:
        """All of it."""
        return (self.real.region(), self.top_k.region(), self.seed.region())
