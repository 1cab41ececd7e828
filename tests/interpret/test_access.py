"""The trace of kernels and operators sees each kind of fault that it is there for, and nothing that is right."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpu.device.buffers import ArrayBuffer
from gpu.device.guard_torch import TorchGuard
from gpu.device.protocol import DeviceError
from tests.interpret.access import OutOfBoundsError, RaceError, trace


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def count(x, total):
    i = tl.program_id(0)
    tl.atomic_add(total, tl.load(x + i))


@triton.jit
def swap(lock, n):
    tl.atomic_cas(lock + n, 0, 1)


@triton.jit
def overwrite(out):
    tl.store(out, tl.program_id(0))


@triton.jit
def shift(x):
    """Each program reads what the next one writes."""
    i = tl.program_id(0)
    tl.store(x + i, tl.load(x + i + 1))


@triton.jit
def look_at_the_sum(total, out):
    tl.atomic_add(total, 1)
    tl.store(out + tl.program_id(0), tl.load(total))


@triton.jit
def scatter(places, values, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + tl.load(places + i), tl.load(values + i))


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def test_a_kernel_that_stays_inside_and_what_it_touches() -> None:
    x, out = torch.arange(12.0), torch.zeros(12)
    with trace() as seen:
        copy[(3,)](x[1:], out, 10, 4)
    assert out.tolist() == [*range(1, 11), 0, 0]
    assert seen.kernels == ["copy"]
    assert seen.read(x).tolist() == [False] + [True] * 10 + [False]
    assert seen.written(out).tolist() == [True] * 10 + [False] * 2
    assert not seen.written(x).any()
    assert not seen.read(out).any()


@pytest.mark.parametrize(("argument", "word"), [("x", "reads"), ("out", "writes")])
def test_an_access_behind_the_end_of_a_view_is_seen(argument: str, word: str) -> None:
    tensors = {"x": torch.zeros(12), "out": torch.zeros(12)}
    tensors[argument] = tensors[argument][:9]  # there is memory behind it, but the kernel was not given it
    with trace(), pytest.raises(OutOfBoundsError, match=rf"copy {word} .* program \(2, 0, 0\): {argument} \+36 bytes"):
        copy[(3,)](tensors["x"], tensors["out"], 10, 4)


def test_atomic_operations_out_of_bounds_are_seen() -> None:
    with trace(), pytest.raises(OutOfBoundsError, match="count updates"):
        count[(3,)](ints(1, 2, 3), ints())
    with trace(), pytest.raises(OutOfBoundsError, match=r"swap updates .* lock -4"):
        swap[(1,)](ints(0), -1)


def test_atomic_operations_of_many_programs_are_no_race() -> None:
    total = ints(0)
    with trace() as seen:
        count[(3,)](ints(1, 2, 3), total)
        swap[(4,)](ints(0), 0)
    assert total.item() == 6
    assert seen.read(total).all()
    assert seen.written(total).all()


def test_programs_that_race_are_seen() -> None:
    with trace(), pytest.raises(RaceError, match=r"overwrite: programs \(0, 0, 0\) and \(1, 0, 0\) race for out \+0"):
        overwrite[(2,)](ints(0))
    with trace(), pytest.raises(RaceError, match=r"shift.* race for x \+4"):
        shift[(2,)](ints(1, 2, 3))
    with trace(), pytest.raises(RaceError, match=r"look_at_the_sum.* race for total"):
        look_at_the_sum[(2,)](ints(0), ints(0, 0))
    with trace():
        overwrite[(1,)](ints(0))
        shift[(1,)](ints(1, 2))
        look_at_the_sum[(1,)](ints(0), ints(0, 0))


def test_lanes_that_write_different_values_to_one_place_are_seen() -> None:
    out = ints(0, 0)
    with trace():
        scatter[(1,)](ints(1, 0, 0, 0), ints(5, 7, 7, 7), out, 4)
    assert out.tolist() == [7, 5]
    with trace(), pytest.raises(RaceError, match=r"lanes of program \(0, 0, 0\) .* out \+0"):
        scatter[(1,)](ints(1, 0, 0, 0), ints(5, 7, 7, 8), out, 4)


# ------------------------------------------------------------------ declarations


def buffer(name: str, n: int = 8) -> ArrayBuffer:
    return ArrayBuffer(name, torch.from_numpy(np.zeros(n, np.float32)))


def test_undeclared_accesses_of_a_kernel_are_named() -> None:
    x, out = buffer("x"), buffer("out")
    with trace() as seen:
        copy[(2,)](x.array, out.array, 8, 4)
    assert seen.undeclared([x, out], [x.region()], [out.region()]) == []
    assert seen.undeclared([x, out], [x.rows(0, 4)], [out.region()]) == ["reads x[16:32], undeclared"]
    assert seen.undeclared([x, out], [x.region()], [out.rows(2, 8)]) == ["writes out[0:8], undeclared"]
    assert seen.undeclared([x, out], [x.region(), out.region()], []) == ["writes out[0:32], undeclared"]


def test_undeclared_accesses_of_torch_operators_are_named() -> None:
    x, out, table = buffer("x"), buffer("out"), buffer("table")
    with trace() as seen:
        view = out.array.view(2, 4)[:, 1:3]  # making a view touches nothing
        view.add_(x.array[:2])
        torch.add(x.array[4:6], 1, out=out.array[:2])
        table.array[torch.tensor([3])] = 1.0
    buffers = [x, out, table]
    assert np.flatnonzero(seen.written(out.array)).tolist() == [0, 1, 2, 5, 6]
    declared = [out.region(), table.region()]
    assert seen.undeclared(buffers, [x.rows(0, 6)], declared) == []
    assert seen.undeclared(buffers, [x.rows(0, 5)], declared) == ["reads x[20:24], undeclared"]
    assert seen.undeclared(buffers, [x.region()], [out.region()]) == ["writes table[0:32], undeclared"]
    assert seen.undeclared(buffers, [x.region()], [out.rows(0, 6), table.region()]) == ["writes out[24:28], undeclared"]


WAITS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool((x > 0).any()),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "put by mask": lambda x: x.__setitem__(x > 0, 1.0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "to the host": lambda x: x.to("cpu"),
    "blocking copy": lambda x: x.copy_(torch.zeros(8)),
}


@pytest.mark.parametrize("name", WAITS)
def test_torch_calls_that_wait_for_the_device_are_refused(name: str) -> None:
    guard = TorchGuard()
    x = guard.watch(torch.zeros(8))
    with trace(guard), pytest.raises(DeviceError, match="would wait for the device"):
        WAITS[name](x)
    with trace(guard):
        x.add_(1)
        copy[(2,)](x, guard.watch(torch.zeros(8)), 8, 4)  # the interpreter may look at it
