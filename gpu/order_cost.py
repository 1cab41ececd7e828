"""What the order checker costs: the launching thread's time for one step, with and without it.

Run `python -m gpu.order_cost`. Owns a step program whose model computes nothing, so that the streams leave the
processor alone; descriptors and results rotate as in a server, and the thread sees every step complete before it uses
a slot again. It measures the thread's processor time, which other processes do not change much.
"""

import argparse
import statistics
import time
from collections import deque
from typing import Any

import numpy as np

from gpu.bench import SHAPE
from gpu.device.host import HostDevice
from gpu.device.order import OrderChecker
from gpu.device.protocol import Completion, Observer
from gpu.kernels.host_step import HostStepKernels
from gpu.lanes import ResultSlot, StepSlot
from gpu.step import StepProgram
from shm.config import ServerConfig
from shm.limits import STEPS_IN_FLIGHT
from shm.records import STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout, StepView

ROWS, CHUNK = 32, 64
BATCHES = 20


class NoModel:
    """A model and a sampler that compute nothing: every token is 0."""

    def __init__(self) -> None:
        self.k_cache = self.v_cache = np.zeros(16, np.float32)

    def forward(self, *_: Any) -> None:
        """Nothing."""

    def sample(self, *arguments: Any) -> None:
        """The token 0 for every row; the last argument is where it goes."""
        arguments[-1][:] = 0


class Loop:
    """A launch loop over the same step again and again."""

    def __init__(self, observer: Observer | None, *, mixed: bool, early_lengths: bool) -> None:
        config = ServerConfig(
            model=SHAPE, served_model_name="none", host="none", port=0, max_running=ROWS, kv_tokens=ROWS * 1024,
            max_len=1024, prefill_chunk=CHUNK, threads=1,
        )  # fmt: skip
        self._device = device = HostDevice(observer)
        layout, results, model = StepLayout(config), ResultLayout(config), NoModel()
        kernels = HostStepKernels.of(config)
        ledger = np.zeros((config.rows, config.max_len), np.int32)
        self._program = StepProgram(device, config, model, kernels, model.sample, ledger, early_lengths=early_lengths)
        self._program.capture()
        self._slots: list[tuple[StepSlot, ResultSlot]] = []
        for i in range(STEPS_IN_FLIGHT):
            payload, result = np.zeros(layout.nbytes // 4, np.int32), np.zeros(results.nbytes // 4, np.int32)
            slot = StepSlot.on(device, layout, payload, f"step{i}")
            self._describe(slot.view, config, mixed)
            self._slots.append((slot, ResultSlot.on(device, results, result, f"result{i}", i)))
        self._running: deque[Completion] = deque()
        self._steps = 0

    def _describe(self, view: StepView, config: ServerConfig, mixed: bool) -> None:
        """All pages of a row and one chunk of it; or padding alone, which never grows, and a slot write."""
        view.kind, view.n_decode, view.n_slot_writes = STEP_DECODE, ROWS, 1
        view.decode_entries[:ROWS] = 0
        view.slot_writes[:, 0] = (1, 0, 1)
        if mixed:
            view.kind, view.n_decode, view.n_chunks = STEP_MIXED, 0, 1
            view.chunks[:5, 0] = (1, 0, 0, CHUNK, 1)
            view.n_slot_writes = CHUNK // config.page_size
            for i in range(view.n_slot_writes):
                view.slot_writes[:, i] = (1, i, i + 1)

    def step(self) -> float:
        """Queue one step. Returns the microseconds that it took this thread."""
        if len(self._running) == STEPS_IN_FLIGHT:
            while not self._running[0].query():
                self._device.check()
                time.sleep(1e-5)
            self._running.popleft()
        slots = self._slots[self._steps % STEPS_IN_FLIGHT]
        self._steps += 1
        begin = time.thread_time_ns()
        self._running.append(self._program.enqueue(*slots, lambda: None))
        return (time.thread_time_ns() - begin) / 1e3

    def close(self) -> None:
        """End the streams."""
        self._device.close()


def measure(steps: int, *, mixed: bool, early_lengths: bool) -> tuple[list[float], list[float]]:
    """Microseconds per step, without and with the checker: the medians of BATCHES batches, taken in turn."""
    loops = [Loop(observer, mixed=mixed, early_lengths=early_lengths) for observer in (None, OrderChecker())]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(BATCHES):
        for loop, kept in zip(loops, times, strict=True):
            kept.append(statistics.median(loop.step() for _ in range(steps // BATCHES)))
    for loop in loops:
        loop.close()
    return times


def main() -> None:
    """Parse the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    print(f"launching thread, processor time in us a step (median of {BATCHES} batches of {options.steps // BATCHES})")
    for mixed in (False, True):
        for early in (False, True):
            without, checked = measure(options.steps, mixed=mixed, early_lengths=early)
            off, on = statistics.median(without), statistics.median(checked)
            what = f"{'mixed' if mixed else 'decode'} step{', early lengths' if early else ''}"
            drift = f"first batch {checked[0]:.0f}, last {checked[-1]:.0f}"
            print(f"{what:28s} off {off:6.1f}  on {on:6.1f}  checker {on - off:6.1f}  ({drift})", flush=True)


if __name__ == "__main__":
    main()
