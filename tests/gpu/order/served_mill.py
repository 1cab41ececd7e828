"""The real scheduler, the real step program and the mill, in one thread on any device.

Descriptors and results lie in as few slots as there are steps in flight, so they are used again as early as can be.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.device.protocol import Completion, Device
from gpu.kernels.host_step import HostStepKernels
from gpu.lanes import ResultSlot, StepSlot
from gpu.step import StepProgram
from procs.sched_audit import check_conservation
from procs.sched_rows import Rows
from procs.sched_steps import Steps
from shm.config import ServerConfig
from shm.ledger import FINISH_ABORT, FINISH_LENGTH
from shm.limits import STEPS_IN_FLIGHT
from shm.records import ResultLayout, StepLayout, StepView
from shm.segment import Segment
from shm.stats import Stats
from tests.gpu.mill_drafter import MillDrafter, make_drafter
from tests.gpu.paged_mill import PagedMill, mill_sample, reference, small_config
from tests.procs.simulated_server import Request, new_ledger

TURNS_MAX = 600


@dataclass
class Asked(Request):
    temperature: float = 0.0

    def expected(self, config: ServerConfig) -> list[int]:
        limit = min(self.max_new, config.max_len - len(self.prompt))
        return reference(self.prompt, limit, self.temperature, self.seed)


def served_config(**changes: Any) -> ServerConfig:
    """So few pages that rows are retracted, and few entries, so that they are used again at once."""
    small = {"max_running": 3, "max_queued": 20, "kv_tokens": 48, "page_size": 4, "max_len": 24, "prefill_chunk": 8}
    return small_config(**(small | {"poison": True} | changes))


class ServedMill:
    def __init__(
        self,
        device: Device,
        config: ServerConfig,
        asked: list[Asked],
        slots: int = STEPS_IN_FLIGHT,
        drafting: str = "mill",
        **options: Any,
    ) -> None:
        self.device = device
        self.config = config
        self.asked = asked
        self.audit: Any = None  # told of every descriptor before it is queued
        self.ledger = new_ledger(config)
        self.stats = Stats(Segment.create("stats", Stats.size()))
        self.rows = Rows(config, self.ledger, self.stats.writer("scheduler"))
        self.steps = Steps(self.rows)
        self.program = self.make_program(device, config, drafting, options)
        self.program.capture()
        layout, results = StepLayout(config), ResultLayout(config)
        self.step_slots, self.result_slots = [], []
        for i in range(slots):
            payload, result = np.full(layout.nbytes // 4, -99, np.int32), np.full(results.nbytes // 4, -99, np.int32)
            self.step_slots.append(StepSlot.on(device, layout, payload, f"step{i}"))
            self.result_slots.append(ResultSlot.on(device, results, result, f"result{i}", i))
        self.running: deque[tuple[Completion, ResultSlot]] = deque()
        self.step = 0
        self.to_arrive = deque(sorted(asked, key=lambda request: request.arrival))

    def make_program(self, device: Device, config: ServerConfig, drafting: str, options: dict[str, Any]) -> StepProgram:
        """The mill's."""
        model = PagedMill(config.pages, config.page_size)
        drafter = make_drafter(drafting, device, config, model) if config.window > 1 else None
        kernels, plane = HostStepKernels.of(config), self.ledger.tokens
        program = StepProgram(device, config, model, kernels, mill_sample, plane, drafter=drafter, **options)
        if isinstance(drafter, MillDrafter):
            drafter.caches = program.caches
        return program

    def run(self) -> list[list[int]]:
        """Serve all; returns what each got. Asserts that the scheduler's books are in order at the end."""
        turn = 0
        while self.to_arrive or self.rows.waiting or self.rows.state.running or self.running:
            assert turn < TURNS_MAX, "a request starves"
            self._turn(turn)
            turn += 1
        check_conservation(self.rows)
        got = []
        for row, request in enumerate(self.asked):
            begin, count = len(request.prompt), int(self.ledger.count[row])
            got.append(self.ledger.tokens[row, begin : begin + count].tolist())
            request.finish = int(self.ledger.finish[row])
        return got

    def total(self, name: str) -> int:
        return int(self.stats.read_stage("scheduler")[name])

    def _turn(self, turn: int) -> None:
        while self.to_arrive and self.to_arrive[0].arrival <= turn:
            request = self.to_arrive.popleft()
            row = next(i for i, other in enumerate(self.asked) if other is request)
            request.write(self.ledger, row)
            self.ledger.temperature[row] = request.temperature
            self.rows.enqueue(row, request.generation)
        for request in self.asked:
            if request.generation and request.abort_after is not None and turn >= request.arrival + request.abort_after:
                self.ledger.abort[request.row] = request.generation
        self.rows.observe()
        pushed = len(self.running) < STEPS_IN_FLIGHT and self._push()
        if len(self.running) == STEPS_IN_FLIGHT or (self.running and not pushed):
            completion, result = self.running.popleft()
            while not completion.query():
                self.device.check()
            self.device.host_access(reads=(result.buffer.region(),), writes=(), name="read result")
            self.steps.apply(result.view)
        self.rows.outbox.clear()

    def _push(self) -> bool:
        slot, result = (slots[self.step % len(slots)] for slots in (self.step_slots, self.result_slots))
        if self.steps.plan(slot.view, self.step + 1) is None:
            return False
        self._fill(slot.view)
        if self.audit is not None:
            self.audit.check(slot.view)
        self.step += 1
        self.running.append((self.program.enqueue(slot, result, lambda: None), result))
        return True

    def _fill(self, view: StepView) -> None:
        """For tests that spoil descriptors."""


def check(asked: list[Asked], got: list[list[int]], config: ServerConfig) -> None:
    """Assert that every request got its own tokens, and all of them unless it was aborted."""
    for request, tokens in zip(asked, got, strict=True):
        expected = request.expected(config)
        assert tokens == expected[: len(tokens)], "a token differs from the one computed alone"
        assert request.finish in (FINISH_LENGTH, FINISH_ABORT)
        if request.finish == FINISH_LENGTH:
            assert len(tokens) == len(expected)
        else:
            assert request.abort_after is not None


def workload(seed: int, count: int = 8) -> list[Asked]:
    """Prompts with common beginnings, arriving one by one, some aborted, some sampled with a temperature."""
    random = np.random.default_rng(seed)
    families = random.integers(1, 90, (2, 24))
    asked = []
    for i in range(count):
        length = int(random.integers(1, 18))
        prompt = families[random.integers(2), :length].tolist()
        if random.random() < 0.4:
            prompt[-1] = int(random.integers(1, 90))
        asked.append(
            Asked(
                prompt=prompt,
                max_new=int(random.integers(1, 14)),
                arrival=int(random.integers(0, 12)),
                seed=i * 2**40 + 7,
                temperature=float(random.random() < 0.5),
                abort_after=int(random.integers(1, 15)) if random.random() < 0.2 else None,
            )
        )
    return asked
