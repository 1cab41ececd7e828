"""Faults that a program like this could have, planted one by one: each is found, and by what it says.

Each fault is planted into the real step program, and each test runs the same thing without the fault first: that is
right, and nothing is found.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gpu.descriptor_audit import DescriptorAudit, DescriptorError
from gpu.device.adversary import AdversaryDevice
from gpu.device.host import HostDevice
from gpu.device.mutations import RECORD, WAIT, Edge, How, MutatedDevice
from gpu.device.order import OrderChecker, OrderViolation
from gpu.device.protocol import DeviceError
from gpu.fence import Fence
from gpu.kernels.host_step import HostStepKernels
from gpu.lanes import LANES
from shm.limits import STEPS_IN_FLIGHT
from tests.gpu.order.served_mill import ServedMill, check, served_config, workload
from tests.gpu.paged_mill import Bench, reference, small_config

FENCE = "'slot writes' on stream schedule behind 'gather' on stream forward"
PROMPT, OTHER = [5, 6, 7], [9, 8, 7, 6, 5]


def grow(device: Any, **options: Any) -> Bench:
    """A prompt, another one, and steps of which each gives a row a page, all queued at once."""
    bench = Bench(device, small_config(**options))
    bench.prompt(0, PROMPT)
    bench.prompt(1, OTHER)
    bench.step(slots=bench.fill(1, [1, 2]), sampling=[(1, 0.0, 1)], chunks=[(1, 0, 0, 3, 1)])
    bench.step(decode=[1], slots=bench.fill(2, [20, 21]), sampling=[(2, 0.0, 2)], chunks=[(2, 1, 0, 5, 1)])
    for i in range(6):
        bench.step(decode=[2, 1], slots=[(1, 2 + i, 3 + i), (2, 2 + i, 22 + i)])
    return bench


# ---------------------------------------------------------------------- found by the order checker


@pytest.mark.parametrize(
    ("edge", "how", "found"),
    [
        (
            Edge(WAIT, "fence", "schedule"),
            "drop",
            FENCE,
        ),
        (
            Edge(RECORD, "fence", "forward"),
            "early",
            FENCE,
        ),
        (
            Edge(RECORD, "staged", "schedule"),
            "early",
            r"'gather' on stream forward behind '(slot|sampling) writes' on stream schedule: read after write",
        ),
    ],
    ids=["fence dropped", "fence recorded before the last read", "barrier that misses the writes of result processing"],
)
def test_an_order_that_is_missing_or_comes_too_early(edge: Edge, how: How, found: str) -> None:
    grow(AdversaryDevice(observer=OrderChecker()))
    with pytest.raises(OrderViolation, match=found):
        grow(MutatedDevice(AdversaryDevice(observer=OrderChecker()), edge, how))


def serve(slots: int) -> None:
    """A server whose step and result slots are so many."""
    config, asked = served_config(), workload(0)
    mill = ServedMill(AdversaryDevice(observer=OrderChecker()), config, asked, slots)
    check(asked, mill.run(), config)


def test_one_pinned_buffer_where_two_are_needed() -> None:
    serve(STEPS_IN_FLIGHT)
    with pytest.raises(OrderViolation, match=r"'slots handed in' on the launching thread behind '(upload|complete)'"):
        serve(STEPS_IN_FLIGHT - 1)


def rearm(depth: int) -> None:
    """Fences in a ring of `depth` events, in a program that is several steps ahead of a stream that waits."""
    device = AdversaryDevice(observer=OrderChecker())
    forward, schedule = device.stream("forward"), device.stream("schedule")
    fence, back = Fence(device, depth), [device.event(f"back{i}") for i in range(LANES)]
    for step in range(4 * LANES):
        fence.record(forward, step % depth)
        fence.hold(schedule, step + 1)
        back[step % LANES].record(schedule)
        back[(step + 1) % LANES].wait(forward)  # of LANES - 1 steps ago


def test_an_event_that_is_armed_again_while_a_stream_waits_for_it() -> None:
    rearm(LANES)
    with pytest.raises(OrderViolation, match="event fence0 is recorded again while the wait for its earlier record"):
        rearm(2)


class OneStream(AdversaryDevice):
    """Hands out the same stream again, as a pool of streams does once it is exhausted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first: Any = None

    def stream(self, name: str) -> Any:
        if name == "copy":
            return self.first
        stream = super().stream(name)
        self.first = self.first or stream
        return stream


def test_two_streams_that_are_secretly_one_hide_a_missing_order_so_a_device_must_refuse_them() -> None:
    """Nothing can be wrong in the order of one stream, which is why the CUDA device counts its streams.

    What is lost is the overlap: with it goes what the mutants prove. `copy` and `schedule` are the same here.
    """
    dropped = partial(MutatedDevice, edge=Edge(WAIT, "left", "schedule"))
    with pytest.raises(OrderViolation):
        grow(dropped(AdversaryDevice(observer=OrderChecker())))
    with pytest.raises(AssertionError, match="streams are secretly one"):
        Bench(OneStream(), small_config())


# ---------------------------------------------------------------------- found by marks in the relay


def poisoned(steps: Callable[[Bench], None]) -> Bench:
    device = HostDevice(OrderChecker())
    bench = Bench(device, small_config(poison=True))
    bench.prompt(0, PROMPT)
    bench.prompt(1, OTHER)
    try:
        steps(bench)
        device.synchronize()
    finally:
        device.close()
    return bench


def begin(bench: Bench) -> None:
    bench.step(slots=bench.fill(1, [1, 2]), sampling=[(1, 0.0, 1)], chunks=[(1, 0, 0, 3, 1)])
    bench.step(decode=[1])


def test_a_relay_entry_that_is_used_again_after_its_row_was_retracted() -> None:
    """Entry 1 goes to another row, whose prompt is not complete, and the step in flight still decodes it."""

    def right(bench: Bench) -> None:
        begin(bench)
        bench.step(slots=bench.fill(1, [3, 4]), chunks=[(1, 1, 0, 3, 0)])
        bench.step(chunks=[(1, 1, 3, 2, 1)])
        bench.step(decode=[1])

    def wrong(bench: Bench) -> None:
        begin(bench)
        bench.step(slots=bench.fill(1, [3, 4]), chunks=[(1, 1, 0, 3, 0)])
        bench.step(decode=[1])

    assert len(poisoned(right).completed) == 5
    with pytest.raises(DeviceError, match="entry 1 is read before a step has published"):
        poisoned(wrong)


def test_a_placeholder_token_that_survives_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes the token and leaves none: the next one finds the mark of the taking, and no old token."""
    lost, stash = False, HostStepKernels.stash

    def sometimes(self: Any, table: Any, entries: Any, tokens: Any) -> None:
        if not lost:
            stash(self, table, entries, tokens)

    def gap(bench: Bench, loses: bool) -> None:
        nonlocal lost
        begin(bench)
        bench.device.synchronize()
        lost = loses
        bench.step(decode=[1])
        bench.device.synchronize()
        lost = False
        bench.step(decode=[1])

    monkeypatch.setattr(HostStepKernels, "stash", sometimes)
    assert len(poisoned(partial(gap, loses=False)).completed) == 4
    with pytest.raises(DeviceError, match="entry 1 is read before a step has published"):
        poisoned(partial(gap, loses=True))


# ---------------------------------------------------------------------- found by what comes out


def padded_steps() -> list[list[int]]:
    """Five rows, which are padded to six."""
    device = HostDevice(OrderChecker())
    bench = Bench(device, small_config())
    bench.prompt(0, PROMPT)
    assert 5 not in bench.program.graphs.sizes
    rows = range(1, 6)
    slots = [write for row in rows for write in bench.fill(row, [3 * row, 3 * row + 1])]
    bench.step(slots=slots, chunks=[(row, 0, 0, 3, 1) for row in rows])
    for _ in range(2):
        bench.step(decode=list(rows))
    device.synchronize()
    device.close()
    return [step.tokens or [] for step in bench.completed]


def test_padding_that_writes_outside_entry_0(monkeypatch: pytest.MonkeyPatch) -> None:
    right = [[token] * 5 for token in reference(PROMPT, 3)]
    assert padded_steps() == right
    gather = HostStepKernels.gather

    def astray(self: Any, step: Any, tables: Any, ids: Any, rows: Any, shape: Any, fault: Any) -> None:
        gather(self, step, tables, ids, rows, shape, fault)
        rows.entries[step.n_decode : shape.decode] = 1

    monkeypatch.setattr(HostStepKernels, "gather", astray)
    assert padded_steps() != right


# ---------------------------------------------------------------------- found in the descriptors


@pytest.mark.parametrize("gone", [True, False])
def test_a_row_that_is_freed_and_used_again_one_step_early(gone: bool) -> None:
    """Its pages go to another row while it takes part in the same step; a step later they may."""
    bench = Bench(HostDevice(), small_config())
    audit = DescriptorAudit(bench.config)
    steps: list[dict[str, Any]] = [
        {"slots": bench.fill(1, [1, 2, 3]), "sampling": [(1, 0.0, 1)], "chunks": [(1, 0, 0, 3, 1)]},
        {"decode": [1]},
    ]
    for step in steps:
        audit.check(bench.describe(**step).view)
    reused = {"slots": bench.fill(2, [2, 3]), "sampling": [(2, 0.0, 2)], "chunks": [(2, 1, 0, 5, 1)]}
    view = bench.describe(decode=[] if gone else [1], **reused).view
    bench.device.close()
    if gone:
        audit.check(view)
    else:
        with pytest.raises(DescriptorError, match="entry 1, page 2: a page of a row that takes part was given"):
            audit.check(view)
