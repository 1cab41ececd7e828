"""The executor between real rings, with a model of a few lines: results, order, credit, resume, errors, stop."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from gpu.backend import Backend, Checks
from gpu.device.guard import LaunchGuard
from gpu.device.host import HostDevice
from gpu.device.order import OrderChecker
from gpu.device.protocol import DeviceError
from gpu.kernels.host_step import HostStepKernels
from gpu.step import StepProgram
from gpu.warm_up import WarmUp
from procs.device_watch import DeviceWatch, Patience
from procs.executor import Executor
from shm import child
from shm.control import Control
from shm.doorbell import Doorbell
from shm.limits import RESULT_RING_SLOTS, STEP_RING_SLOTS
from shm.records import RESULT_DROPPED, RESULT_RAN, STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout, ring_specs
from shm.ring import Ring
from shm.segment import Segment
from shm.stats import Stats
from shm.trace import Trace, What
from tests.gpu.paged_mill import PagedMill, mill_sample, reference, small_config

WAIT_S = 10.0
PROMPT = [5, 6, 7, 8, 9]


class Rig:
    """Rings, an executor in a thread, and the scheduler's ends in the hands of the test."""

    def __init__(self, **changes: Any) -> None:
        self.config = small_config(**changes)
        control = Control(Segment.create("control", Control.size()))
        self.bell: Doorbell = control.doorbell("gpu", Doorbell.create_fd())
        scheduler_bell = control.doorbell("scheduler", Doorbell.create_fd())
        self.rings: dict[str, Ring] = {}
        for name in ("step", "result"):
            spec = ring_specs(self.config)[name]
            segment = Segment.create(name, Ring.size(spec.slots, spec.payload_bytes))
            Ring.create(segment, spec.slots, spec.payload_bytes, spec.schema)
            bells = (self.bell, scheduler_bell) if name == "step" else (scheduler_bell, self.bell)
            self.rings[name] = Ring(segment, *bells, schema=spec.schema)
        self.steps = self.rings["step"].attach_producer()
        self.results = self.rings["result"].attach_consumer()
        self.stats = Stats(Segment.create("stats", Stats.size()))
        self.trace = Trace(Segment.create("trace", Trace.size()))
        self.layout, self.result_layout = StepLayout(self.config), ResultLayout(self.config)
        self.ledger = np.zeros((self.config.rows, self.config.max_len), np.int32)
        self.ledger[2, : len(PROMPT)] = PROMPT
        self.number = 0
        self.stopping = False
        self.error: BaseException | None = None
        self.beats = 0
        self.thread: threading.Thread | None = None
        self.epoch = 0
        self.start()

    def start(self) -> None:
        """A fresh device and executor on the same rings, as after a restart."""
        guard, checker = LaunchGuard(), OrderChecker()
        self.device = HostDevice(checker, guard)
        model = PagedMill(self.config.pages, self.config.page_size)
        kernels = HostStepKernels.of(self.config)
        self.program = StepProgram(self.device, self.config, model, kernels, mill_sample, self.ledger)
        WarmUp(self.device, self.config, self.program).run()
        self.executor = Executor(
            self.config,
            Backend(self.device, self.program, Checks(checker, guard)),
            (self.rings["step"].attach_consumer(), self.rings["result"].attach_producer()),
            self.stats.writer("gpu"),
            (self.trace.writer("gpu", 0), self.trace.writer("gpu", 1)),
            self.epoch,
        )

    def serve(self) -> None:
        def beat() -> None:
            self.beats += 1

        def run() -> None:
            try:
                self.executor.serve(self.bell, beat, lambda: self.stopping)
            except BaseException as error:  # noqa: BLE001 - the tests look at it
                self.error = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def stop(self) -> None:
        self.stopping = True
        self.bell.kick()
        if self.thread is not None:
            self.thread.join(WAIT_S)
            assert not self.thread.is_alive()
        self.device.close()

    def push(
        self,
        decode: list[int],
        chunk: tuple[int, ...] | None = None,
        pages: list[int] | None = None,
        gpu_epoch: int = 0,
    ) -> None:
        view = self.layout.view(self.steps.slot())
        view.clear()
        view.gpu_epoch = gpu_epoch
        self.number += 1
        view.step = self.number
        view.kind = STEP_MIXED if chunk else STEP_DECODE
        view.n_decode = len(decode)
        view.decode_entries[: len(decode)] = decode
        if chunk:
            view.n_chunks = 1
            view.chunks[:5, 0] = chunk
        for i, page in enumerate(pages or []):
            view.slot_writes[:, i] = (1, i, page)
        view.n_slot_writes = len(pages or [])
        self.steps.publish(view.used_nbytes, view.kind)

    def prefill(self) -> None:
        self.push([], (1, 2, 0, len(PROMPT), 1), [3, 4, 5, 6, 7, 8, 9, 10])

    def result(self) -> tuple[int, int, list[int]]:
        """Wait for the next result: step number, source seq, tokens."""
        await_that(lambda: self.results.available() > 0)
        record = self.results.peek()
        view = self.result_layout.view(self.rings["result"].payloads[record.seq % self.rings["result"].slots])
        assert view.window == 1
        assert 0 < view.begin_ns <= view.end_ns
        out = view.step, record.source_seq, view.tokens[0, : view.n_rows].tolist()
        self.results.release()
        return out


def await_that(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.stop()


def hold_forward(rig: Rig) -> threading.Event:
    gate = threading.Event()
    rig.device.launch(rig.program.forward, lambda: assert_true(gate.wait(WAIT_S)), reads=(), writes=(), name="gate")
    return gate


def assert_true(value: bool) -> None:
    assert value


def test_tokens_travel_from_ring_to_ring(rig: Rig) -> None:
    rig.serve()
    rig.prefill()
    results = [rig.result()]
    for _ in range(20):  # no overlap: each step is pushed behind the result before
        rig.push([1])
        results.append(rig.result())
    tokens = reference(PROMPT, 21)
    assert results == [(i + 1, i, [tokens[i]]) for i in range(21)]
    gpu = rig.stats.read()["gpu"]
    assert (gpu["steps_total"], gpu["mixed_steps_total"], gpu["decode_steps_total"]) == (21, 1, 20)
    assert gpu["graph_replays_total"] == 20


def test_full_rings_hold_the_executor_back_and_lose_nothing(rig: Rig) -> None:
    """Sixteen steps, and nobody reads a result until the result ring is full."""
    rig.serve()
    rig.prefill()
    for _ in range(7):
        rig.push([1])
    await_that(lambda: rig.steps.space() == STEP_RING_SLOTS)
    for _ in range(8):
        rig.push([1])
    time.sleep(0.05)
    assert rig.results.available() == 8
    assert rig.steps.space() == 0  # left where they are
    tokens = reference(PROMPT, 16)
    assert [rig.result() for _ in range(16)] == [(i + 1, i, [tokens[i]]) for i in range(16)]
    assert rig.error is None


def test_a_result_that_is_still_to_come_has_a_claim_on_its_slot(rig: Rig) -> None:
    """Three results lie unread, the device is blocked, and more steps are queued than results have room for."""
    rig.serve()
    rig.prefill()
    rig.push([1])
    rig.push([1])
    await_that(lambda: rig.results.available() == 3 and rig.steps.space() == STEP_RING_SLOTS)
    gate = hold_forward(rig)
    for _ in range(RESULT_RING_SLOTS):
        rig.push([1])
    launched = RESULT_RING_SLOTS - 3
    await_that(lambda: rig.stats.read()["gpu"]["decode_steps_total"] >= 2 + launched)
    time.sleep(0.05)
    assert rig.stats.read()["gpu"]["decode_steps_total"] == 2 + launched
    gate.set()
    await_that(lambda: rig.results.available() == RESULT_RING_SLOTS)
    tokens = reference(PROMPT, 3 + RESULT_RING_SLOTS)
    assert [rig.result() for _ in tokens] == [(i + 1, i, [token]) for i, token in enumerate(tokens)]
    assert rig.error is None


def test_a_step_slot_is_given_back_only_behind_its_result(rig: Rig) -> None:
    seen: list[tuple[int, int]] = []
    ring, publish = rig.rings["step"], rig.executor._results.publish

    def watched(*args: Any, **options: Any) -> int:
        seq = publish(*args, **options)
        seen.append((seq, ring.tail))
        return seq

    rig.executor._results.publish = watched  # type: ignore[method-assign]
    gate = hold_forward(rig)
    rig.serve()
    rig.prefill()
    rig.push([1])
    await_that(lambda: rig.stats.read()["gpu"]["decode_steps_total"] == 1)  # launched, though nothing has run
    assert ring.tail == 0
    assert rig.results.available() == 0
    gate.set()
    rig.result()
    rig.result()
    await_that(lambda: ring.tail == 2)
    assert seen == [(0, 0), (1, 1)]


def test_an_idle_executor_gives_signs_of_life(rig: Rig) -> None:
    rig.serve()
    await_that(lambda: rig.beats >= 3)


def beats_within(rig: Rig, seconds: float) -> int:
    before = rig.beats
    time.sleep(seconds)
    return rig.beats - before


def test_a_step_that_works_is_waited_for_and_one_that_sleeps_ends_the_loop(rig: Rig) -> None:
    def compute() -> None:
        while not done.is_set():
            pass

    ident = rig.program.forward._thread.ident  # type: ignore[attr-defined]
    clock = time.pthread_getcpuclockid(ident)  # the test has a thread in this process as well
    rig.executor._watch = DeviceWatch(Patience(0.2, 60.0), worked_s=lambda: time.clock_gettime(clock))
    done = threading.Event()
    rig.device.launch(rig.program.forward, compute, reads=(), writes=(), name="long step")
    rig.serve()
    rig.prefill()
    assert beats_within(rig, 1.0) >= 3 and beats_within(rig, 0.3) >= 1
    gate = hold_forward(rig)
    done.set()
    rig.result()
    rig.push([1])
    await_that(lambda: rig.error is not None)
    gate.set()
    assert isinstance(rig.error, child.Hung) and "a step on the device has not ended for 0." in str(rig.error)


def test_a_device_error_ends_the_loop_with_its_reason(rig: Rig) -> None:
    rig.serve()
    rig.prefill()
    rig.result()
    rig.push([3])  # at position 0, for which it has no page
    await_that(lambda: rig.error is not None)
    assert isinstance(rig.error, DeviceError)
    assert "gather on stream forward: DeviceError: entry 3" in str(rig.error)
    assert rig.results.available() == 0


def test_a_wait_in_the_launch_loop_ends_it(rig: Rig) -> None:
    """What `serve` runs it runs in the guard's section."""
    rig.program.fence.hold = lambda *_: rig.program.forward.synchronize()  # type: ignore[method-assign]
    rig.serve()
    rig.prefill()
    await_that(lambda: rig.error is not None)
    assert isinstance(rig.error, DeviceError) and "would wait for the device in the launch loop" in str(rig.error)


def test_a_torn_descriptor_ends_the_loop(rig: Rig) -> None:
    rig.prefill()
    rig.rings["step"].payloads[0][20] ^= 1
    with pytest.raises(AssertionError, match="checksum"):
        rig.executor.launch_next()


def test_stopping_ends_behind_what_is_queued(rig: Rig) -> None:
    rig.prefill()
    for _ in range(5):
        rig.push([1])
    rig.stopping = True
    rig.serve()
    assert rig.thread is not None
    rig.thread.join(WAIT_S)
    rig.device.close()
    assert rig.results.available() == 6


@pytest.mark.parametrize("died_after", ["publish", "release"])
def test_a_new_executor_goes_on_behind_the_last_result(rig: Rig, died_after: str) -> None:
    rig.prefill()
    rig.executor.launch_next()
    if died_after == "publish":
        rig.executor._steps.release = lambda n=1: None  # type: ignore[method-assign]
    rig.device.synchronize()
    assert rig.rings["step"].tail == (0 if died_after == "publish" else 1)
    rig.device.close()
    rig.start()
    rig.prefill()  # the same request again: a new device knows nothing of it
    rig.serve()
    token = reference(PROMPT, 1)
    assert [rig.result(), rig.result()] == [(1, 0, token), (2, 1, token)]


@pytest.mark.parametrize("died_after", ["publish", "release"])
def test_steps_for_the_memory_of_an_earlier_process_are_dropped(rig: Rig, died_after: str) -> None:
    """A new executor answers them in their turn, runs what is meant for it, and may die between any two stores too."""
    rig.prefill()
    rig.push([1])
    rig.device.close()
    rig.epoch = 2
    rig.start()
    if died_after == "publish":
        rig.executor._steps.release = lambda n=1: None  # type: ignore[method-assign]
    rig.executor.launch_next()
    assert rig.rings["step"].tail == (0 if died_after == "publish" else 1)
    rig.device.close()
    rig.start()
    rig.push([], (1, 2, 0, len(PROMPT), 1), [3, 4, 5, 6, 7, 8, 9, 10], gpu_epoch=2)
    rig.serve()
    await_that(lambda: rig.results.available() == 3)
    kinds = [(rig.results.peek(i).kind, rig.results.peek(i).source_seq) for i in range(3)]
    assert kinds == [(RESULT_DROPPED, 0), (RESULT_DROPPED, 1), (RESULT_RAN, 2)]
    for step in (1, 2):
        assert rig.result() == (step, step - 1, [])
    assert rig.result() == (3, 2, reference(PROMPT, 1))
    assert rig.stats.read()["gpu"]["dropped_steps_total"] == 2


def test_gaps_count_where_there_was_something_to_do(rig: Rig) -> None:
    gate = hold_forward(rig)
    rig.serve()
    rig.prefill()
    rig.push([1])  # queued before the first one has ended
    await_that(lambda: rig.stats.read()["gpu"]["decode_steps_total"] == 1)
    gate.set()
    rig.result()
    rig.result()
    rig.push([1])  # pushed late, and a row was running: starved
    rig.result()
    rig.prefill()  # pushed late, and nobody was waiting for it
    rig.result()
    await_that(lambda: rig.stats.read()["gpu"]["steps_total"] == 4)
    gpu = rig.stats.read()["gpu"]
    assert (gpu["gaps_total"], gpu["starved_total"]) == (2, 1)
    assert 0 < gpu["starved_ns_total"] <= gpu["device_idle_ns_total"], "of the late step's gap, and of no other"
    names = [span.what for span in rig.trace.read()]
    assert {What.LAUNCH, What.STEP, What.RESULT} <= set(names)
    assert (names.count(What.STEP), names.count(What.GAP)) == (4, 2)


def test_nothing_is_left_behind() -> None:
    threads = threading.active_count()
    rig = Rig()
    rig.serve()
    rig.stop()
    assert threading.active_count() == threads
