"""The guard: what would wait for the device raises in the launch loop, with its line, and nowhere else."""
# ruff: noqa: PLW0108 - a name is looked up where the lambda runs, in the section

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.device.adversary import AdversaryDevice
from gpu.device.guard import LaunchGuard, PinnedArray, WatchedArray, plain
from gpu.device.guard_torch import TorchGuard
from gpu.device.host import HostDevice
from gpu.device.policies import policies
from gpu.device.protocol import DeviceError
from tests.gpu.paged_mill import Bench, reference, small_config

HERE = __file__


def host() -> Any:
    return np.arange(12, dtype=np.int32).reshape(3, 4)


# What the launching thread may not do with x, device memory i32[3, 4].
NUMPY_READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x.item(0),
    "item of a row": lambda x: x[1:2, 1:2].item(),
    "scalar index": lambda x: x[1, 2],
    "scalar of a view": lambda x: x[1][2],
    "int": lambda x: int(x[:1, :1]),
    "float": lambda x: float(x[:1, :1]),
    "bool": lambda x: bool(x[:1, :1]),
    "index": lambda x: range(9)[x[0, 1]],
    "tolist": lambda x: x.tolist(),
    "tobytes": lambda x: x.tobytes(),
    "data": lambda x: bytes(x.data),
    "array": lambda x: np.array(x),
    "array of rows": lambda x: np.array([x[0], x[1]]),
    "array of the same class": lambda x: np.array(x, subok=True),
    "asarray": lambda x: np.asarray(x),
    "asarray_chkfinite": lambda x: np.asarray_chkfinite(x),
    "asanyarray that converts": lambda x: np.asanyarray(x, np.float64),
    "ascontiguousarray": lambda x: np.ascontiguousarray(x.T),
    "asfortranarray": lambda x: np.asfortranarray(x),
    "require": lambda x: np.require(x, requirements="F"),
    "masked array": lambda x: np.ma.array(x),
    "scalar type": lambda x: np.float64(x),
    "numpy.copy": lambda x: np.copy(x),
    "frombuffer": lambda x: np.frombuffer(x, np.int32),
    "fromiter": lambda x: np.fromiter(x, np.dtype((np.int32, 4))),
    "nditer": lambda x: [int(element) for element in np.nditer(x)],
    "ndenumerate": lambda x: list(np.ndenumerate(x)),
    "as_strided": lambda x: np.lib.stride_tricks.as_strided(x, (2,), (4,)),
    "plain view": lambda x: x.view(np.ndarray),
    "plain view by name": lambda x: x.view(type=np.ndarray),
    "base": lambda x: x.base is None,
    "interface": lambda x: x.__array_interface__["shape"],
    "struct": lambda x: x.__array_struct__ is None,
    "numpy dlpack": lambda x: np.from_dlpack(x),
    "torch dlpack": lambda x: torch.from_dlpack(x),
    "torch.from_numpy": lambda x: torch.from_numpy(x),
    "torch.as_tensor": lambda x: torch.as_tensor(x),
    "torch.asarray": lambda x: torch.asarray(x),
    "torch.tensor": lambda x: torch.tensor(x),
    "torch.tensor of rows": lambda x: torch.tensor([list(row) for row in x]),
    "torch.frombuffer": lambda x: torch.frombuffer(x, dtype=torch.int32),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),  # noqa: S301 - its own
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "setfield": lambda x: x.setfield(1, np.int32),
    "resize": lambda x: x.reshape(-1).resize(12),
    "conjugate": lambda x: x.conj(),
    "flat assignment": lambda x: setattr(x, "flat", 1),
    "flat": lambda x: list(x.flat),
    "copy": lambda x: x.copy(),
    "astype": lambda x: x.astype(np.int64),
    "flatten": lambda x: x.flatten(),
    "reshape that copies": lambda x: x.T.reshape(-1),
    "iteration": lambda x: list(x[0]),
    "contains": lambda x: 3 in x,
    "mask": lambda x: x[np.ones((3, 4), bool)],
    "fancy index": lambda x: x[[0, 2]],
    "assignment": lambda x: x.__setitem__(slice(None), 1),
    "fill": lambda x: x.fill(1),
    "comparison": lambda x: x == 3,
    "arithmetic": lambda x: x + 1,
    "arithmetic of the host with it": lambda x: host() * x,
    "into the host": lambda x: np.add(x, 1, out=host()),
    "in place": lambda x: x.__iadd__(1),
    "host in place": lambda x: host().__iadd__(x),
    "sum": lambda x: x.sum(),
    "max": lambda x: x.max(),
    "any": lambda x: x.any(),
    "argmax": lambda x: x.argmax(),
    "nonzero": lambda x: x.nonzero(),
    "copyto the host": lambda x: np.copyto(host(), x),
    "copyto the device": lambda x: np.copyto(x, host()),
    "array_equal": lambda x: np.array_equal(x, host()),
    "concatenate": lambda x: np.concatenate((host(), x)),
    "str": str,
    "format": lambda x: f"{x}",
}
NUMPY_ALLOWED: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[1:, :2],
    "row": lambda x: x[1],
    "new axis": lambda x: x[None, ..., 1:2],
    "rows one by one": lambda x: [row[:2] for row in x],
    "reshape": lambda x: x.reshape(-1)[3:5],
    "transpose": lambda x: x.T,
    "other type": lambda x: x.view(np.float32),
    "field": lambda x: x.getfield(np.int16),
    "axes": lambda x: x[:1].squeeze(0).reshape(2, 2).swapaxes(0, 1),
    "view that reshape finds": lambda x: x[:, ::2].reshape(3, 2, 1),
    "itself": lambda x: (np.asanyarray(x), np.require(x))[0],
    "shape": lambda x: (x.shape, x.dtype, len(x), x.nbytes, x.flags.c_contiguous, np.shape(x), x.ndim),
    "address": lambda x: x.ctypes.data,
}


# What it does with p, pinned memory i32[3, 4], and x.
PINNED_READS: dict[str, Callable[[Any, Any], Any]] = {
    "assignment": lambda p, x: p.__setitem__(slice(None), x),
    "assignment to a view": lambda p, x: p[1:, :2].__setitem__(..., x[1:, :2]),
    "assignment of rows": lambda p, x: p.__setitem__(slice(0, 2), [x[0], x[1]]),
    "index": lambda p, x: p[x[0, :3]],
    "index among others": lambda p, x: p[0, x[0, :2]],
    "assignment by index": lambda p, x: p.__setitem__(x[0, :2], 1),
}
# Reads that nobody is asked about: who closes one moves it to the reads.
UNSEEN: dict[str, Callable[[Any], Any]] = {
    "assignment to a plain array": lambda x: host().__setitem__(..., x),
    "index of a plain array": lambda x: host()[x[0, :2]],
    "method of a plain array": lambda x: host().T.dot(x),
    "ufunc of a list": lambda x: np.add([x, x], 1),
    "reduction of a list": lambda x: np.max([x, x]),
    "method of the class": lambda x: np.ndarray.item(x, 0),
    "view by the class": lambda x: np.ndarray.view(x, np.ndarray),
    "class over a buffer": lambda x: np.ndarray((3, 4), np.int32, x),
    "class that cannot be replaced": lambda x: list(np.broadcast(x, 0)),
    "torch's class": lambda x: torch.Tensor(x),
    "address": lambda x: np.ctypeslib.as_array(
        (np.ctypeslib.as_ctypes_type(np.int32) * 12).from_address(x.ctypes.data)
    ),
    "function bound before": lambda x: BOUND_BEFORE(x),
}
BOUND_BEFORE = np.array
(NUMPY_READS if sys.version_info >= (3, 12) else UNSEEN)["buffer"] = lambda x: memoryview(x).tolist()


def message_names_line(error: DeviceError) -> bool:
    return f"{HERE}:" in str(error) and "would wait for the device" in str(error)


@pytest.mark.parametrize("what", NUMPY_READS)
def test_the_launch_loop_cannot_touch_device_memory(what: str) -> None:
    guard, act = LaunchGuard(), NUMPY_READS[what]
    x = guard.watch(host())
    with guard.section(), pytest.raises(DeviceError) as caught:
        act(x)
    assert message_names_line(caught.value), caught.value


@pytest.mark.parametrize("what", NUMPY_READS)
def test_everybody_else_can(what: str) -> None:
    """Control: before and after the loop, other threads in it, and what the thread does in the device's place."""
    guard, act = LaunchGuard(), NUMPY_READS[what]
    outcomes: list[Any] = []

    def outcome(act: Callable[[Any], Any], x: Any) -> Any:
        try:
            return " ".join(repr(act(x)).replace("WatchedArray", "array").split())
        except TypeError as error:  # int() of more than one element is one for everybody
            return str(error)

    expected = outcome(act, host())
    outcomes.append(outcome(act, guard.watch(host())))
    with guard.section():
        x = guard.watch(host())
        other = threading.Thread(target=lambda: outcomes.append(outcome(act, x)))
        other.start()
        other.join()
        with guard.lifted():
            outcomes.append(outcome(act, guard.watch(host())))
    outcomes.append(outcome(act, guard.watch(host())))
    assert len(outcomes) == 4
    for got in outcomes:
        assert got == expected or "flatiter" in got or "memory" in got


@pytest.mark.parametrize("what", NUMPY_ALLOWED)
def test_views_and_shapes_are_free(what: str) -> None:
    guard = LaunchGuard()
    x = guard.watch(host())
    with guard.section():
        found = NUMPY_ALLOWED[what](x)
        if isinstance(found, np.ndarray):
            assert isinstance(found, WatchedArray), "a view is watched too"
            with pytest.raises(DeviceError):
                found.tolist()
    assert np.shares_memory(plain(x), x)


@pytest.mark.parametrize("what", PINNED_READS)
def test_device_memory_is_not_read_through_pinned_memory(what: str) -> None:
    guard, act = LaunchGuard(), PINNED_READS[what]
    x, pinned = guard.watch(host()), host()
    p = guard.pin(pinned)
    with guard.section():
        p[0] = p[1:][0] + p.sum(axis=0)  # the host's own
        p[[0, 1], 2] = [3, 4]
        assert isinstance(p, PinnedArray) and np.shares_memory(p, pinned) and p.ctypes.data == pinned.ctypes.data
        with pytest.raises(DeviceError) as caught:
            act(p, x)
        assert message_names_line(caught.value), caught.value
        with guard.lifted():
            act(p, x)
    act(p, x)


@pytest.mark.parametrize("what", UNSEEN)
def test_what_asks_nobody_is_not_seen(what: str) -> None:
    """Pins the gaps that the module lists."""
    guard = LaunchGuard()
    x = guard.watch(host())
    with guard.section():
        UNSEEN[what](x)


def test_functions_are_replaced_in_the_section_only() -> None:
    before = (np.array, np.nditer, torch.tensor, torch.cuda.synchronize, torch.cuda.Event.synchronize)
    with TorchGuard().section():
        inside = (np.array, np.nditer, torch.tensor, torch.cuda.synchronize, torch.cuda.Event.synchronize)
        assert all(one is not other for one, other in zip(before, inside, strict=True))
        assert np.array([[1, 2], [3, 4]], order="F").flags.f_contiguous
    assert before == (np.array, np.nditer, torch.tensor, torch.cuda.synchronize, torch.cuda.Event.synchronize)


def test_a_section_is_left_whatever_happens_and_not_entered_twice() -> None:
    guard = TorchGuard()
    x = guard.watch(host())
    with pytest.raises(ZeroDivisionError), guard.section():
        assert guard.is_on
        1 / 0  # noqa: B018
    assert not guard.is_on
    x.tolist()
    with guard.section(), pytest.raises(AssertionError, match="entered once"), guard.section():
        pass


# ---------------------------------------------------------------------- torch

PINNED = torch.zeros(3, 4, dtype=torch.int32)
HOST = torch.arange(12, dtype=torch.int32).reshape(3, 4) % 3


@torch.library.custom_op("test_guard::foreign", mutates_args=())
def foreign(x: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """A library's operator, which may take memory of the host for what it is."""
    return x + len(plan)


TORCH_READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x[0, 1].item(),
    "empty_cache": lambda x: torch.cuda.empty_cache(),
    "int": lambda x: int(x[0, 1]),
    "bool": lambda x: bool(x[0, 1] > 0),
    "if": lambda x: 1 if (x > 0).any() else 2,
    "index": lambda x: range(9)[x[0, 1]],
    "slice to it": lambda x: PINNED[: x[0, 1]],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "into numpy": lambda x: host().__setitem__(slice(None), x),
    "array": np.array,
    "dlpack": np.from_dlpack,
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to a device": lambda x: x.to(device=torch.device("cpu")),
    "to as": lambda x: x.to(PINNED),
    "to by an operator": lambda x: torch.ops.aten._to_copy(x, device="cpu", non_blocking=True),
    "of something computed": lambda x: (x + 1).sum().item(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "masked_select": lambda x: x.masked_select(x > 0),
    "mask": lambda x: x[x > 0],
    "mask assignment": lambda x: x.__setitem__(x > 0, 3),
    "equal": lambda x: torch.equal(x, x),
    "unique": torch.unique,
    "contains": lambda x: 3 in x,
    "repeat": lambda x: torch.repeat_interleave(x[0]),
    "repr": repr,
    "format": lambda x: f"{x[0, 1]}",
    "blocking copy out": PINNED.copy_,
    "blocking copy in": lambda x: x.copy_(PINNED),
    "pageable copy out": lambda x: torch.zeros(3, 4, dtype=torch.int32).copy_(x, non_blocking=True),
    "pageable copy in": lambda x: x.copy_(torch.zeros(3, 4, dtype=torch.int32), non_blocking=True),
    "several copies": lambda x: torch._foreach_copy_([PINNED, HOST.clone()], [x, x], non_blocking=True),
    "number into a place": lambda x: x.__setitem__((0, 1), 3),  # which torch makes on the host, and copies
    "number into places": lambda x: x.__setitem__(x[0].long() % 3, 3),
    "host index": lambda x: x[HOST[0]],
    "pinned index": lambda x: x[PINNED[:1, 0]],
    "host index among others": lambda x: x[HOST[0], x[0, :4].long() % 3],
    "host index assignment": lambda x: x.__setitem__(HOST[0], x[0].clone()),
    "host values": lambda x: x.__setitem__(x[0, :1].long(), HOST[:1]),
    "host mask": lambda x: x[HOST > 0],
    "index_select": lambda x: x.index_select(0, HOST[0]),
    "embedding": lambda x: torch.nn.functional.embedding(HOST, x),
    "index of the host's": lambda x: HOST[x[0].long() % 3],
    "arithmetic with the host's": lambda x: x + HOST,
    "host's in place": lambda x: HOST.clone().add_(x),
    "out on the host": lambda x: torch.add(x, 1, out=PINNED),
    "number out on the host": lambda x: torch.sum(x, 0, out=torch.zeros(4, dtype=torch.int64)),
    "fill of the host's": lambda x: torch.zeros(()).fill_(x[0, 1]),
    "choice with the host's": lambda x: torch.where(x > 0, x, HOST),
    "cat": lambda x: torch.cat([x, HOST]),
    "stack": lambda x: torch.stack([HOST, x]),
    "isin": lambda x: torch.isin(x, HOST),
    "allclose": lambda x: torch.allclose(x, x),
    "histc": lambda x: torch.histc(x.float(), 4),
    "bincount": lambda x: torch.bincount(x[0]),
    "multinomial": lambda x: torch.multinomial(x[1].float(), 1),
    "normal": lambda x: torch.normal(0.0, x.float()),
    "masked_fill by a number of the device's": lambda x: x.masked_fill(x > 0, x[0, 1]),
    "max_norm": lambda x: torch.nn.functional.embedding(x[0, :2].long(), x.float(), max_norm=1.0),
    "inv": lambda x: torch.linalg.inv(x[:2, :2].float()),
    "cholesky": lambda x: torch.cholesky(x[:1, 1:2].float()),
    "svd": lambda x: torch.linalg.svdvals(x.float()),
    "sparse": lambda x: x.to_sparse(),
    "combinations": lambda x: torch.combinations(x[0]),
    "slice from it": lambda x: x[x[0, 0] :],
    "arange to it": lambda x: torch.arange(x[0, 1]),
    "tensor of numbers of the device's": lambda x: torch.tensor([x[0, 0], x[0, 1]]),
    "as_tensor on the host": lambda x: torch.as_tensor(x, device="cpu"),
    "new_tensor": lambda x: x.new_tensor([1, 2]),
    "type of the host's": lambda x: x.type("torch.FloatTensor"),
    "storage": lambda x: x.untyped_storage()[0],
    "copy.deepcopy": copy.deepcopy,
}
TORCH_ALLOWED: dict[str, Callable[[Any], Any]] = {
    "views": lambda x: (x[1:, :2], x.view(-1)[3:], x.T, list(x), x[None], x.reshape(-1)),
    "shape": lambda x: (x.shape, x.dtype, x.nbytes, len(x), x.stride(), x.is_contiguous(), x.numel()),
    "address": lambda x: x.data_ptr(),
    "arithmetic": lambda x: x.add_(1).mul(x).sum(),
    "number": lambda x: x.fill_(3),
    "number into a slice": lambda x: x.__setitem__((0, slice(1, 2)), 3),
    "numbers of the host's": lambda x: x.add(torch.tensor(2)).masked_fill(x > 0, torch.tensor(1)).clamp_(max=5),
    "number of the device's": lambda x: (x.fill_(x[0, 1]), x * x[0, 1], torch.where(x > 0, x, x[0, 1])),
    "choice": lambda x: torch.where(x > 0, x, -x),
    "places by a limit": lambda x: torch.nonzero_static(x, size=3),
    "repeat to a length": lambda x: torch.repeat_interleave(x[0], output_size=6),
    "histogram between bounds": lambda x: torch.histc(x.float(), 4, min=-5, max=0),
    "norm": lambda x: torch.linalg.vector_norm(x.float(), dim=1),
    "index assignment": lambda x: x.__setitem__(x[0, :1].long(), x[:1] + 1),
    "index by a number": lambda x: x[torch.tensor(1)],
    "several copies": lambda x: torch._foreach_copy_([PINNED, x], [x, x + 1], non_blocking=True),
    "operator of somebody else's": lambda x: foreign(x, PINNED),
    "index": lambda x: x[x[0, :2].long() % 3],
    "copy within": lambda x: x.copy_(x + 1),
    "type": lambda x: x.to(torch.float32),
    "copy out": lambda x: PINNED.copy_(x, non_blocking=True),
    "copy in": lambda x: x.copy_(PINNED, non_blocking=True),
    "the host's own": lambda _: (
        HOST[HOST > 0],
        HOST[HOST[0]] + 1,
        torch.tensor([1, 2]),
        HOST.to("cpu", torch.int64),
        torch.zeros(3).sum().item(),
        torch.ones(2).tolist(),
        torch.ones(2).numpy(),
        repr(PINNED),
    ),
}


def torch_guard() -> tuple[TorchGuard, Any]:
    guard = TorchGuard()
    guard.pin(PINNED)
    return guard, guard.watch(torch.arange(12, dtype=torch.int32).reshape(3, 4))


@pytest.mark.filterwarnings("ignore")  # numpy's own about __array__
@pytest.mark.parametrize("what", TORCH_READS)
def test_the_launch_loop_cannot_wait_for_torch(what: str) -> None:
    guard, x = torch_guard()
    with guard.section(), pytest.raises(DeviceError) as caught:
        TORCH_READS[what](x)
    assert message_names_line(caught.value), caught.value
    TORCH_READS[what](x)
    with guard.section(), guard.lifted():
        TORCH_READS[what](x)


@pytest.mark.parametrize("what", TORCH_ALLOWED)
def test_what_only_queues_is_free(what: str) -> None:
    guard, x = torch_guard()
    with guard.section():
        TORCH_ALLOWED[what](x)


TO_A_DEVICE: dict[str, tuple[bool, Callable[[], Any]]] = {
    "blocking": (False, lambda: PINNED.to("meta")),
    "pageable": (False, lambda: HOST.to("meta", non_blocking=True)),
    "pinned": (True, lambda: PINNED.to("meta", non_blocking=True)),
    "data": (False, lambda: torch.tensor([1, 2], device="meta")),
    "host": (False, lambda: torch.as_tensor(HOST, device="meta")),
    "memory": (True, lambda: torch.zeros(3, device="meta").fill_(1)),
}


@pytest.mark.parametrize("what", TO_A_DEVICE)
def test_new_memory_of_another_device_is_filled_without_waiting(what: str) -> None:
    """Meta is a device that every torch has."""
    guard, _ = torch_guard()
    free, act = TO_A_DEVICE[what]
    with guard.section():
        if free:
            act()
        else:
            with pytest.raises(DeviceError) as caught:
                act()
            assert message_names_line(caught.value), caught.value
    act()


class SyncingMode(TorchDispatchMode):
    """Torch on CUDA in its debug mode, for one operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.neg.default:
            raise RuntimeError("called a synchronizing CUDA operation")
        if func is torch.ops.aten.abs.default:
            raise RuntimeError("out of memory")
        return func(*args, **(kwargs or {}))


def test_what_torch_itself_refuses_is_told_with_its_line() -> None:
    guard, x = torch_guard()
    with guard.section():
        for operands in (x, HOST):
            with SyncingMode(), pytest.raises(DeviceError) as caught:
                operands.neg()
            assert message_names_line(caught.value) and "synchronizing" in str(caught.value.__cause__), caught.value
            with SyncingMode(), pytest.raises(RuntimeError, match="out of memory") as other:
                operands.abs()
            assert not isinstance(other.value, DeviceError)
    with SyncingMode(), pytest.raises(RuntimeError, match="synchronizing") as plain_error:
        x.neg()
    assert not isinstance(plain_error.value, DeviceError)


def test_on_cuda_torchs_own_check_is_on_in_the_section(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with TorchGuard(cuda=True).section():
        assert modes[-1] == "error"
    assert modes == [0, "error", 0]


# ---------------------------------------------------------------------- the step program


def guarded(policy: Any = None, memory: Any = "numpy") -> tuple[Any, AdversaryDevice]:
    guard = TorchGuard() if memory == "torch" else LaunchGuard()
    return guard, AdversaryDevice(policy, guard=guard, memory=memory)


@pytest.fixture
def on_threads() -> Iterator[tuple[LaunchGuard, HostDevice]]:
    guard = LaunchGuard()
    device = HostDevice(guard=guard)
    yield guard, device
    device.close()


def steps(bench: Bench) -> None:
    bench.step(slots=bench.fill(1, [1, 2, 3]), sampling=[(1, 0.0, 5)], chunks=[(1, 0, 0, 3, 1)])
    for _ in range(3):
        bench.step(decode=[1])


def test_the_step_program_queues_steps_without_waiting() -> None:
    for policy in policies(("schedule", "forward", "copy", "lengths"), seeds=5):
        guard, device = guarded(policy)
        bench = Bench(device, small_config(), early_lengths=True)
        bench.prompt(0, [5, 6, 7])
        with guard.section():
            steps(bench)
        device.synchronize()
        assert [step.tokens for step in bench.completed] == [[t] for t in reference([5, 6, 7], 4)]


def test_the_host_devices_streams_may_touch_what_the_launch_loop_may_not(
    on_threads: tuple[LaunchGuard, HostDevice],
) -> None:
    guard, device = on_threads
    bench = Bench(device, small_config(), early_lengths=True)
    bench.prompt(0, [5, 6, 7])
    with guard.section():
        steps(bench)
        with pytest.raises(DeviceError, match=HERE):
            device.synchronize()
        with pytest.raises(DeviceError, match=HERE):
            bench.program.relay.token.array.tolist()
    device.synchronize()
    assert [step.tokens for step in bench.completed] == [[t] for t in reference([5, 6, 7], 4)]
    assert isinstance(bench.program.relay.token.array.tolist(), list)


def test_without_a_guard_memory_is_plain() -> None:
    device = HostDevice()
    assert type(device.buffer((2,), np.int32, "b").array) is np.ndarray
    assert type(AdversaryDevice().buffer((2,), np.int32, "b").array) is np.ndarray
    device.close()


PLANTED: dict[str, Callable[[Bench], Any]] = {
    "item": lambda b: b.program.relay.length.array[1].item(),
    "int": lambda b: int(b.program.relay.length.array[1]),
    "tolist": lambda b: b.program.lanes[0].gained.tolist(),
    "descriptor": lambda b: b.program.lanes[0].step.n_decode,
    "model's memory": lambda b: b.program.slots.table.array.max(),
    "stream": lambda b: b.program.forward.synchronize(),
    "event": lambda b: b.program.lanes[0].done.synchronize(),
    "device": lambda b: b.device.synchronize(),
}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("kind", ["adversary", "host"])
def test_a_wait_planted_in_the_launch_loop_is_found(
    what: str, kind: str, on_threads: tuple[LaunchGuard, HostDevice]
) -> None:
    guard, device = on_threads if kind == "host" else guarded()
    bench = Bench(device, small_config())
    bench.prompt(0, [5, 6, 7])
    hold = bench.program.fence.hold

    def plant(*args: Any) -> None:
        PLANTED[what](bench)
        hold(*args)

    bench.program.fence.hold = plant  # type: ignore[method-assign]
    with guard.section(), pytest.raises(DeviceError) as caught:
        steps(bench)
    assert message_names_line(caught.value), caught.value
    bench = Bench(AdversaryDevice(), small_config())  # control: without a guard nobody notices
    bench.prompt(0, [5, 6, 7])
    hold = bench.program.fence.hold
    bench.program.fence.hold = plant  # type: ignore[method-assign]
    steps(bench)
    bench.device.synchronize()


def test_torch_memory_is_watched_through_the_adversary() -> None:
    guard, device = guarded(memory="torch")
    stream = device.stream("s")
    buffer, pinned = device.buffer((4,), np.int32, "b"), device.pinned(np.arange(4, dtype=np.int32), "p")
    regions: dict[str, Any] = {"reads": (pinned.region(),), "writes": (buffer.region(),)}
    with guard.section():
        device.launch(stream, lambda: buffer.array.copy_(pinned.array, non_blocking=True), name="copy", **regions)
        device.launch(stream, lambda: buffer.array.add_(int(buffer.array[1])), name="reads itself", **regions)
        pinned.array.tolist()  # the host's own
        with pytest.raises(DeviceError, match=HERE):
            buffer.array.tolist()
    device.synchronize()
    assert buffer.array.tolist() == [1, 2, 3, 4]
