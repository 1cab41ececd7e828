"""The executor's launch loop between real rings, beside the real scheduler, on a device that runs in any order.

Scheduler and launch loop take turns in one thread, as chance has it; the device goes on as its policy has it; host
functions publish results and give descriptors back whenever they come to run.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from gpu.backend import Backend, Checks
from gpu.descriptor_audit import DescriptorAudit
from gpu.device.adversary import AdversaryDevice
from gpu.device.guard import LaunchGuard
from gpu.device.policies import policies
from gpu.device.protocol import DeviceError
from gpu.kernels.host_step import HostStepKernels
from gpu.lanes import LANES
from gpu.step import StepProgram
from procs.executor import Executor
from procs.sched_audit import check_conservation
from procs.sched_rows import Rows
from procs.sched_steps import Steps
from shm.control import Control
from shm.doorbell import Doorbell
from shm.limits import STEPS_IN_FLIGHT
from shm.records import ResultLayout, StepLayout, ring_specs
from shm.ring import Ring
from shm.segment import Segment
from shm.stats import Stats
from shm.trace import Trace
from tests.gpu.order.served_mill import Asked, check, served_config, workload
from tests.gpu.paged_mill import PagedMill, PlannedMill, mill_sample
from tests.procs.simulated_server import new_ledger

TURNS_MAX = 20_000


class Stages:
    """Scheduler and gpu process without the processes."""

    def __init__(self, device: AdversaryDevice, guard: LaunchGuard, asked: list[Asked], planned: bool = False) -> None:
        many = {"max_running": 6, "kv_tokens": 64} if planned else {}  # batches of five are padded to six
        self.config, self.asked, self.device, self.guard = served_config(**many), asked, device, guard
        config = self.config
        control = Control(Segment.create("control", Control.size()))
        bells = [control.doorbell(stage, Doorbell.create_fd()) for stage in ("gpu", "scheduler")]
        rings = {}
        for name, ends in (("step", bells), ("result", bells[::-1])):
            spec = ring_specs(config)[name]
            segment = Segment.create(name, Ring.size(spec.slots, spec.payload_bytes))
            Ring.create(segment, spec.slots, spec.payload_bytes, spec.schema)
            rings[name] = Ring(segment, *ends, schema=spec.schema)
        self.queue, self.results = rings["step"].attach_producer(), rings["result"].attach_consumer()
        self.step_views = [StepLayout(config).view(payload) for payload in rings["step"].payloads]
        self.result_views = [ResultLayout(config).view(payload) for payload in rings["result"].payloads]
        self.ledger = new_ledger(config)
        stats, trace = Stats(Segment.create("stats", Stats.size())), Trace(Segment.create("trace", Trace.size()))
        self.rows = Rows(config, self.ledger, stats.writer("scheduler"))
        self.steps = Steps(self.rows)
        kernels = HostStepKernels.of(config)
        model = (PlannedMill if planned else PagedMill)(config.pages, config.page_size)
        plan = model.plan if isinstance(model, PlannedMill) else None
        self.program = StepProgram(device, config, model, kernels, mill_sample, self.ledger.tokens, plan=plan)
        if isinstance(model, PlannedMill):
            model.memory = self.program.plans.memory  # type: ignore[union-attr]
        self.program.capture()
        self.executor = Executor(
            config,
            Backend(device, self.program, Checks(guard=guard, audit=DescriptorAudit(config))),
            (rings["step"].attach_consumer(), rings["result"].attach_producer()),
            stats.writer("gpu"),
            (trace.writer("gpu", 0), trace.writer("gpu", 1)),
            epoch=0,
        )
        self.to_arrive = deque(sorted(asked, key=lambda request: request.arrival))
        self.step = 0

    def run(self, seed: int) -> int:
        """Serve all and return the number of steps."""
        chance = random.Random(seed)
        for turn in range(TURNS_MAX):
            if chance.random() < 0.5:
                self.schedule(turn)
            else:
                with self.guard.section():
                    if self.executor._ready():
                        self.executor.launch_next()
                    else:
                        self.device.queues.pass_time()
            if not (self.to_arrive or self.rows.waiting or self.rows.state.running or self.steps.in_flight):
                check_conservation(self.rows)
                check(self.asked, [self.outputs(row) for row in range(len(self.asked))], self.config)
                return self.step
        raise AssertionError("a request starves")

    def outputs(self, row: int) -> list[int]:
        begin, count = int(self.ledger.prompt_len[row]), int(self.ledger.count[row])
        self.asked[row].finish = int(self.ledger.finish[row])
        tokens: list[int] = self.ledger.tokens[row, begin : begin + count].tolist()
        return tokens

    def schedule(self, turn: int) -> None:
        while self.to_arrive and self.to_arrive[0].arrival * 4 <= turn:
            request = self.to_arrive.popleft()
            row = next(i for i, other in enumerate(self.asked) if other is request)
            request.write(self.ledger, row)
            self.ledger.temperature[row] = request.temperature
            self.rows.enqueue(row, request.generation)
            if request.abort_after is not None and request.abort_after % 3 == 0:
                self.ledger.abort[row] = request.generation
        self.rows.observe()
        if len(self.steps.in_flight) < STEPS_IN_FLIGHT and self.queue.space() > 0:
            view = self.step_views[self.queue.head % len(self.step_views)]
            if self.steps.plan(view, self.step + 1) is not None:
                self.step += 1
                self.queue.publish(view.used_nbytes, view.kind, source_seq=self.step)
        if self.results.available() > 0:
            view = self.result_views[self.results.peek().seq % len(self.result_views)]
            assert view.step == self.steps.in_flight[0].step
            self.steps.apply(view)
            self.results.release()
        self.rows.outbox.clear()


def serve(
    policy: Any, seed: int, spoil: Callable[[StepProgram], None] = lambda _: None, *, planned: bool = False
) -> int:
    guard = LaunchGuard()
    stages = Stages(AdversaryDevice(policy, guard=guard), guard, workload(seed), planned)
    spoil(stages.program)
    return stages.run(seed)


def test_every_request_gets_its_own_tokens_through_the_rings() -> None:
    for seed, policy in enumerate(policies(("schedule", "forward", "copy"), seeds=20)):
        assert serve(policy, seed % 4) > 16, "the rings wrap"


@pytest.mark.unordered
def test_a_missing_order_is_seen_through_the_rings() -> None:
    """Control."""

    def spoil(program: StepProgram) -> None:
        for lane in program.lanes:
            lane.done.wait = lambda *_: None  # type: ignore[method-assign]

    wrong = 0
    for seed, policy in enumerate(policies(("schedule", "forward", "copy"), seeds=5)):
        try:
            serve(policy, seed % 4, spoil)
        except (DeviceError, AssertionError):
            wrong += 1
    assert wrong > 0


@pytest.mark.parametrize("seed", range(2))
def test_the_launch_loop_never_waits(seed: int) -> None:
    """Control for the guard: a wait planted in the program ends the loop at once."""

    def spoil(program: StepProgram) -> None:
        program.fence.hold = lambda *_: program.forward.synchronize()  # type: ignore[method-assign]

    with pytest.raises(DeviceError, match="would wait for the device in the launch loop"):
        serve(None, seed, spoil)


def test_every_pass_is_planned_with_its_lengths() -> None:
    """In any order, through retraction, aborts, prefix hits and surplus steps, and no two plans in one memory."""
    for seed, policy in enumerate(policies(("schedule", "forward", "copy"), seeds=20)):
        assert serve(policy, seed % 4, planned=True) > 16


def count_twice(program: StepProgram) -> None:
    advance = program.plans._advance  # type: ignore[union-attr]
    program.plans._advance = lambda step: (advance(step), advance(step))[1]  # type: ignore[union-attr,method-assign]


def one_source(program: StepProgram) -> None:
    assert program.plans is not None
    program.plans._sources = program.plans._sources[:1] * LANES


def unasked(program: StepProgram) -> None:
    """Nobody looks whether the step before has ended."""
    program.plans.over_with = lambda *_: None  # type: ignore[union-attr,method-assign]
    program.plans._sources = program.plans._sources[:2] * 2  # type: ignore[union-attr]


def for_live_rows_alone(program: StepProgram) -> None:
    """Rows of padding are forgotten."""
    plan = program._plan_pass
    program._plan_pass = lambda lane, step, rows: plan(lane, step, step.view.n_decode or rows)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (for_live_rows_alone, "another number of rows"),
        (count_twice, "other lengths"),
        (one_source, "plan source 0"),
        (unasked, "plan source"),
    ],
)
def test_a_plan_that_is_wrong_or_overwritten_is_found(fault: Callable[[StepProgram], None], says: str) -> None:
    found = []
    for seed, policy in enumerate(policies(("schedule", "forward", "copy"), seeds=3)):
        try:
            serve(policy, seed % 4, fault, planned=True)
        except (DeviceError, AssertionError) as error:
            found.append(str(error))
    assert any(says in error for error in found), found
