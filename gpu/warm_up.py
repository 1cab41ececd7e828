"""The warm-up: captures the graphs and runs a step of every kind once, before the first request comes.

Owns what a first use costs: compiled kernels and graphs. After it nothing is captured and nothing compiles. The steps
it runs are as small as can be: kernels are compiled for any size (where sizes matter, `CudaLlama.warm` has seen to
them), so a larger step would cost time and bring nothing. They belong to padding (entry 0, page 0) and leave nothing
behind for a request to see: entry 1, whose tables they write, gets its slots and sampling parameters with its first
request. Runs once, with nothing else queued. A standby leaves the models' passes out (`Backend.rehearsal`): their code
is compiled or loaded without them.
"""

import numpy as np

from gpu.device.protocol import Device
from gpu.lanes import ResultSlot, StepSlot
from gpu.step import StepProgram
from shm.config import ServerConfig
from shm.records import CHUNK_COUNT, CHUNK_LAST, STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout


class WarmUp:
    """One descriptor and one result, used again for every step."""

    def __init__(self, device: Device, config: ServerConfig, program: StepProgram) -> None:
        layout, results = StepLayout(config), ResultLayout(config)
        payload, result = np.zeros(layout.nbytes // 4, np.int32), np.zeros(results.nbytes // 4, np.int32)
        self._device = device
        self._drafts = config.window - 1
        self._program = program
        self._step = StepSlot.on(device, layout, payload, "warm-up step")
        self._result = ResultSlot.on(device, results, result, "warm-up result", " of the warm-up")

    def run(self) -> int:
        """Capture, then run. Returns the number of graphs. Raises DeviceError if a step fails."""
        graphs = self._program.capture()
        self.run_steps()
        return graphs

    def run_steps(self) -> None:
        """Run a step of every kind. Raises DeviceError if one fails."""
        view = self._step.view
        view.kind = STEP_DECODE
        view.n_decode = 1
        view.decode_entries[0] = 0
        view.n_slot_writes = view.n_sampling = 1
        view.slot_writes[:, 0] = (1, 0, 1)  # entry 1, its first slot, page 1
        view.set_sampling(0, 1, 0.0, 1.0, 0.0, 0, 0)
        self._once()
        if self._drafts:
            view.drafts = self._drafts
            self._once()
        view.drafts = view.n_slot_writes = view.n_sampling = 0
        view.kind = STEP_MIXED  # and one token of a prompt, alone: a step has no more rows than may run
        view.n_decode = 0
        view.n_chunks = 1
        view.chunks[:, 0] = 0
        view.chunks[CHUNK_COUNT, 0] = 1
        view.chunks[CHUNK_LAST, 0] = 1
        self._once()

    def _once(self) -> None:
        self._program.enqueue(self._step, self._result, lambda: None)
        self._device.synchronize()
