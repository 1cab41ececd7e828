"""The real scheduler and the real gpu process in one thread, over real rings, and both may die behind any store.

The device is `SimulatedDevice`, whose pages die with its gpu process, or outlive it; tokenizer, detokenizer and
frontend are plain code that never dies. `run` serves all requests and returns what became of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpu.backend import Backend, Checks
from procs.executor import Executor
from procs.scheduler import Scheduler
from shm.config import ServerConfig
from shm.ledger import FINISH_ABORT, FINISH_STOP
from shm.records import intake_record, read_progress
from tests.procs.mortal import Deaths, Died
from tests.procs.mortal_memory import Memory, Ready, Seat
from tests.procs.simulated_device import SimulatedDevice
from tests.procs.simulated_server import Request

TURNS_MAX = 600


@dataclass
class Queued:
    """A step on the device, and what is known of its end."""

    step: Any
    result: Any
    complete: Callable[[], None]
    name: str = "step"
    done: bool = False

    def query(self) -> bool:
        return self.done


@dataclass
class Gpu:
    """One gpu process: its launch loop, and a device that runs a step when it is told to."""

    seat: Seat
    device: SimulatedDevice
    queued: deque[Queued] = field(default_factory=deque)

    def start(self) -> None:
        memory = SimpleNamespace(
            check=lambda: None,
            pinned=lambda payload, _name: payload,
            timestamp=lambda _name: None,
        )
        rings = self.seat.ring_consumer("step"), self.seat.ring_producer("result")
        backend = Backend(memory, SimpleNamespace(enqueue=self._enqueue), Checks())  # type: ignore[arg-type]
        traces = self.seat.trace(0), self.seat.trace(1)
        self.loop = Executor(self.seat.config, backend, rings, self.seat.stats_writer(), traces, self.seat.epoch)
        self.seat.ready()

    def launch(self) -> None:
        """Queue every step that there is."""
        self.loop.serve(self.seat.own_doorbell, self.seat.beat, lambda: True)

    def run_one(self) -> None:
        one = self.queued.popleft()
        self.device.run(one.step.view, one.result.view)
        one.result.view.begin_ns = one.result.view.end_ns = 1
        one.complete()
        one.done = True

    def _enqueue(self, step: Any, result: Any, complete: Callable[[], None]) -> Queued:
        self.queued.append(Queued(step, result, complete))
        return self.queued[-1]


class Engine:
    """Serves `requests`; gpu, scheduler: at which stores those processes die, one after the other. fine: see `Life`."""

    def __init__(
        self,
        config: ServerConfig,
        requests: list[Request],
        gpu: Sequence[int] = (),
        scheduler: Sequence[int] = (),
        fine: bool = True,
        keeps: bool = False,
    ) -> None:
        """keeps: pages outlive their gpu process."""
        self._keeps = keeps
        self.memory = Memory(config)
        self.requests = requests
        self.gpu_deaths, self.scheduler_deaths = Deaths(gpu, fine), Deaths(scheduler, fine)
        self._to_arrive = deque(sorted(requests, key=lambda request: request.arrival))
        self._open: dict[int, Request] = {}
        self._turn = 0
        self.gpu: Any = None
        self._intake = self.memory.rings["intake"].attach_producer()
        self._progress = self.memory.rings["progress"].attach_consumer()
        self._start_gpu()

    def run(self) -> list[tuple[Any, ...]]:
        """Serve everything. Asserts that nothing is left anywhere; returns what became of each request."""
        while True:
            seat = self.memory.seat("scheduler", self.scheduler_deaths.next(), self._wait, sound=True)
            seat.beat = lambda seat=seat: self._look(seat)  # type: ignore[method-assign,misc]
            try:
                with seat.life.turn():
                    self._scheduler = Scheduler(seat)  # type: ignore[arg-type]
                    self._scheduler.run()
                break
            except Died:
                continue
        self._read()
        while self._gpu_turn():  # whatever nobody waits for any more
            pass
        self._assert_clean()
        return [self._outcome(request) for request in self.requests]

    def _assert_clean(self) -> None:
        left, ledger, rows = self.memory.left_in_rings(), self.memory.ledger, self._scheduler.rows
        stale = left.pop("result", 0)  # of a scheduler that died; one that is idle drops them as they come
        assert not left and stale <= 2, (left, stale)
        assert (ledger.freed == ledger.generation).all() and (ledger.done == ledger.generation).all()
        assert rows.pool.free + rows.cache.cached == rows.pool.usable and rows.state.running == 0

    @staticmethod
    def _outcome(request: Request) -> tuple[Any, ...]:
        """What has to be the same whoever died: how far one gets that somebody ends is a matter of time."""
        if request.abort_after is None and request.text_stop is None:
            return (request.finish, *request.outputs)
        outputs, _ = request.natural_end(24)
        assert request.outputs == outputs[: len(request.outputs)], "a token differs"
        assert request.finish == (FINISH_ABORT if request.text_stop is None else FINISH_STOP)
        return (request.finish,)

    # ------------------------------------------------------------------ the gpu process

    def _start_gpu(self) -> None:
        while True:
            seat = self.memory.seat("gpu", self.gpu_deaths.next(), sound=self._keeps)
            device = SimulatedDevice(self.memory.config, self.memory.ledger)
            if self._keeps and self.gpu is not None:
                device.content = self.gpu.device.content
            self.gpu = Gpu(seat, device)
            try:
                with seat.life.turn():
                    self.gpu.start()
                return
            except Died:
                continue

    def _gpu_turn(self) -> bool:
        """Let it launch what there is, and the device run one step. False if there was nothing to do."""
        ring = self.memory.rings["step"]
        try:
            with self.gpu.seat.life.turn():
                before = ring.tail
                self.gpu.launch()
                if self.gpu.queued:
                    self.gpu.run_one()
                return ring.tail != before
        except Died:
            self._start_gpu()
            return True

    def _wait(self, ready: Ready) -> None:
        """The scheduler waits at its doorbell: until it is rung, or for so long that it looks again by itself."""
        epoch = self.memory.control.epoch("gpu")
        while not ready() and self._gpu_turn() and self.memory.control.epoch("gpu") == epoch:
            pass

    # ------------------------------------------------------------------ the others

    def _look(self, seat: Seat) -> None:
        """Once a turn of the scheduler: requests come and go."""
        self._turn += 1
        assert self._turn < TURNS_MAX, "a request starves"
        ledger = self.memory.ledger
        while self._to_arrive and self._to_arrive[0].arrival <= self._turn:
            request = self._to_arrive.popleft()
            request.arrival = self._turn
            request.write(ledger, next(row for row in range(ledger.rows) if row not in self._open))
            self._open[request.row] = request
            self._intake.push(intake_record([request.row], [request.generation]))
        for row, request in self._open.items():
            if request.abort_after is not None and self._turn >= request.arrival + request.abort_after:
                ledger.abort[row] = request.generation
        self._read()
        seat.stopping = not self._to_arrive and not self._open and not self.memory.rings["result"].head > self._tail()

    def _tail(self) -> int:
        return self.memory.rings["result"].tail

    def _read(self) -> None:
        """What the detokenizer is told is in the ledger already, grows, and ends once; then the row is free."""
        ledger = self.memory.ledger
        while self._progress.available():
            for row, generation, count, finish in np.stack(read_progress(self._progress.peek().payload), 1).tolist():
                request = self._open.get(row)
                if request is None or request.generation != generation:
                    continue  # told once more by a scheduler that took over
                assert count >= request.count
                request.count = count
                start = len(request.prompt)
                request.outputs = ledger.tokens[row, start : start + count].tolist()
                if finish:
                    assert (ledger.done[row], ledger.finish[row], ledger.count[row]) == (generation, finish, count)
                    request.finish = finish
                    ledger.freed[row] = generation
                    del self._open[row]
                elif request.text_stop is not None and count >= request.text_stop:
                    ledger.text_stop_count[row], ledger.text_stop[row] = request.text_stop, generation
            self._progress.release()
