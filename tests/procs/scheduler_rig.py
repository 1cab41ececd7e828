"""A real scheduler process over real rings, with a simulated device in a thread and the test as everybody else."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from procs.child_specs import CHILD_SPECS, child_environment
from procs.server_memory import ServerMemory
from procs.stage_process import StageProcess
from shm.config import ServerConfig
from shm.ledger import FINISH_NONE, Ledger
from shm.records import ResultLayout, StepLayout, intake_record, read_progress, ring_specs
from shm.ring import Ring
from tests.procs.simulated_device import SimulatedDevice
from tests.procs.simulated_server import Request

(SPEC,) = (spec for spec in CHILD_SPECS if spec.stage == "scheduler")
SECONDS_MAX = 20.0


class SchedulerRig:
    def __init__(self, config: ServerConfig, step_s: float = 0.0) -> None:
        self.config = config
        self.step_s = step_s
        self.memory = ServerMemory(config)
        self.ledger = Ledger(self.memory.segments["ledger"], config.rows, config.max_len)
        self.bells = {stage: self.memory.control.doorbell(stage, fd) for stage, fd in self.memory.doorbell_fds.items()}
        self.intake = self._ring("intake").attach_producer()
        self.queue = self._ring("step").attach_consumer()
        self.results = self._ring("result").attach_producer()
        self.progress = self._ring("progress").attach_consumer()
        self.device = SimulatedDevice(config, self.ledger)
        self.steps_run: list[int] = []
        self.queued_behind: list[int] = []  # steps that waited behind each one when it ended
        self.wrong_order = False  # misbehave: give results of the wrong step
        self.open: dict[int, Request] = {}
        self.stop_device = False
        self.go_on = threading.Event()
        self.go_on.set()
        self.device_error: BaseException | None = None
        self.thread = threading.Thread(target=self._run_device)
        self.thread.start()
        self.epoch = 0
        self.start()

    def _ring(self, name: str) -> Ring:
        spec = ring_specs(self.config)[name]
        return Ring(self.memory.segments[name], self.bells[spec.consumer], self.bells[spec.producer], spec.schema)

    def start(self) -> None:
        """Start a scheduler; the one before must be dead."""
        self.epoch += 1
        self.memory.control.set_epoch("scheduler", self.epoch)
        self.process = StageProcess(SPEC, self.memory, child_environment(SPEC, self.config, {}), None)
        self.wait(lambda: any(said.event == "ready" for said in self.process.listen()))

    def wait(self, condition: Any) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not condition():
            assert self.device_error is None, repr(self.device_error)
            assert time.monotonic() < deadline, "nothing happens"
            time.sleep(0.002)

    def pause_device(self) -> threading.Event:
        """Let the device take no further step until the returned event is set."""
        self.go_on.clear()
        return self.go_on

    def close(self) -> None:
        self.stop_device = True
        self.go_on.set()
        self.thread.join()
        self.process.reap()
        self.memory.close()

    def _run_device(self) -> None:
        layout, results = StepLayout(self.config), ResultLayout(self.config)
        try:
            while not self.stop_device:
                if not self.bells["gpu"].wait(lambda: self.queue.available() > 0, 20):
                    continue
                self.go_on.wait()
                slot = self.queue.peek()
                view = layout.view(self.queue.ring.payloads[slot.seq % self.queue.ring.slots])
                self.wait(lambda: self.results.space() > 0)
                self.device.run(view, results.view(self.results.slot()))
                assert slot.source_seq == view.step and slot.kind == view.kind
                time.sleep(self.step_s)
                self.steps_run.append(view.step)
                self.queued_behind.append(self.queue.available() - 1)
                self.results.publish(results.nbytes, source_seq=slot.seq + self.wrong_order)
                self.queue.release()
        except BaseException as error:  # noqa: BLE001 - told by the next wait
            self.device_error = error

    def send(self, *requests: Request) -> None:
        for request in requests:
            row = next(row for row in range(self.config.rows) if row not in self.open)
            request.write(self.ledger, row)
            self.open[row] = request
            self.wait(lambda: self.intake.space() > 0)
            self.intake.push(intake_record([row], [request.generation]))

    def read(self) -> None:
        """The detokenizer's part: note what was produced and what ended."""
        while self.progress.available():
            for row, generation, count, finish in np.stack(
                read_progress(self.progress.peek().payload), axis=1
            ).tolist():
                request = self.open.get(row)
                if request is None or request.generation != generation:
                    continue  # told again after a restart
                assert count >= request.count
                request.count = count
                begin = len(request.prompt)
                request.outputs = self.ledger.tokens[row, begin : begin + count].tolist()
                if finish:
                    request.finish = finish
                    del self.open[row]
            self.progress.release()

    def finish(self, *requests: Request) -> None:
        """Wait until all have ended, and check what they got."""

        def ended() -> bool:
            self.read()
            return all(request.finish != FINISH_NONE for request in requests)

        self.wait(ended)
        for request in requests:
            if request.abort_after is None:
                assert (request.outputs, request.finish) == request.natural_end(self.config.max_len)

    def stats(self) -> dict[str, Any]:
        return dict(self.memory.stats.read_stage("scheduler"))


@contextmanager
def scheduler_rig(config: ServerConfig, step_s: float = 0.0) -> Iterator[SchedulerRig]:
    rig = SchedulerRig(config, step_s)
    try:
        yield rig
    finally:
        rig.close()
