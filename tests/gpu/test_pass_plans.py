"""Plans of passes: the lengths that follow from descriptors, and the memory that rests while a step may need it."""

import threading
from typing import Any

import pytest

from gpu.device.host import HostDevice
from gpu.device.protocol import DeviceError
from gpu.lanes import LANES
from tests.gpu.paged_mill import Bench, reference, small_config

PROMPT = [5, 6, 7, 8]


def bench(device: HostDevice) -> Bench:
    made = Bench(device, small_config(), planned=True)
    made.prompt(0, PROMPT)
    return made


def test_lengths_follow_from_descriptors() -> None:
    device = HostDevice()
    made, told = bench(device), []
    plan = made.program.plans._make  # type: ignore[union-attr]

    def note(lengths: Any, rows: int) -> None:
        told.append((None if lengths is None else lengths.tolist(), rows))
        plan(lengths, rows)

    made.program.plans._make = note  # type: ignore[union-attr]
    made.step(slots=made.fill(1, [1, 2, 3]), chunks=[(1, 0, 0, 4, 1)])
    for _ in range(2):
        made.step(decode=[1])
        device.synchronize()
    made.step(slots=made.fill(2, [4, 5]), chunks=[(2, 0, 0, 2, 0)], decode=[1])
    device.synchronize()
    made.step(chunks=[(2, 0, 2, 2, 1)])
    device.synchronize()
    made.step(decode=[2, 1])
    device.synchronize()
    assert told == [(None, 1), ([5], 1), ([6], 1), (None, 2), (None, 1), ([5, 8], 2)]
    assert made.completed[-1].tokens == [reference(PROMPT, 2)[1], reference(PROMPT, 5)[4]]
    device.close()


def test_a_plan_is_refused_while_the_step_before_it_in_the_same_memory_may_run() -> None:
    device = HostDevice()
    made, gate = bench(device), threading.Event()
    made.step(slots=made.fill(1, [1, 2, 3]), chunks=[(1, 0, 0, 4, 1)])
    device.synchronize()
    device.launch(made.program.forward, lambda: bool(gate.wait(10)) and None, reads=(), writes=(), name="gate")
    for _ in range(LANES - 1):
        made.step(decode=[1])
    with pytest.raises(DeviceError, match="planned in memory that a step in flight may still need"):
        for _ in range(LANES):
            made.step(decode=[1])
    gate.set()
    device.synchronize()
    device.close()
