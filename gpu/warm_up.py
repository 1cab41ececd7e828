"""The warm-up: captures the graphs and runs a step of every size once, before the first request comes.

Owns what a first use costs: compiled kernels, first-touched memory, graphs. After it, no step of a server pays for
being the first of its size. Its steps belong to padding (entry 0, page 0), so they leave nothing behind for a request
to see. Runs once, with nothing else queued.
"""

import time
from collections.abc import Callable

import numpy as np

from gpu.device.protocol import Device
from gpu.lanes import ResultSlot, StepSlot
from gpu.step import StepProgram
from shm.config import ServerConfig
from shm.records import CHUNK_COUNT, CHUNK_LAST, STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout

PROGRESS_SECONDS = 1.0


class WarmUp:
    """One descriptor and one result, used again for every step."""

    def __init__(self, device: Device, config: ServerConfig, program: StepProgram) -> None:
        layout, results = StepLayout(config), ResultLayout(config)
        payload, result = np.zeros(layout.nbytes // 4, np.int32), np.zeros(results.nbytes // 4, np.int32)
        self._device = device
        self._config = config
        self._program = program
        self._step = StepSlot(device.pinned(payload, "warm-up step"), layout.view(payload))
        self._result = ResultSlot(device.pinned(result, "warm-up result"), results.view(result))

    def run(self, progress: Callable[[str], None]) -> int:
        """Capture, then run. Returns the number of graphs. Raises DeviceError if a step fails."""
        program, view = self._program, self._step.view
        graphs = program.capture()
        program.slots.write(view)  # nothing to write; it only has to be compiled
        program.sampling.write(view)
        told = time.monotonic()
        sizes = program.graphs.sizes
        for i, rows in enumerate(reversed(sizes)):  # the largest first: it brings the memory
            if time.monotonic() - told > PROGRESS_SECONDS:
                told = time.monotonic()
                progress(f"warming up: {i} of {len(sizes) + 1} batch sizes")
            view.clear()
            view.kind = STEP_DECODE
            view.n_decode = rows
            view.decode_entries[:rows] = 0
            self._once()
        self._prefill()
        return graphs

    def _prefill(self) -> None:
        """The largest mixed step: a full batch of decode rows and a chunk."""
        view, config = self._step.view, self._config
        view.clear()
        view.kind = STEP_MIXED
        view.n_decode = config.max_running
        view.n_chunks = 1
        view.decode_entries[: config.max_running] = 0
        view.chunks[:, 0] = 0
        view.chunks[CHUNK_COUNT, 0] = min(config.prefill_chunk, config.max_len)
        view.chunks[CHUNK_LAST, 0] = 1
        self._once()

    def _once(self) -> None:
        self._program.enqueue(self._step, self._result, lambda: None)
        self._device.synchronize()
