"""The guard: what would wait for the device raises in the launch loop, with its line, and nowhere else."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from gpu.device.adversary import AdversaryDevice
from gpu.device.guard import LaunchGuard, WatchedArray, plain
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
    "shape": lambda x: (x.shape, x.dtype, len(x), x.nbytes, x.flags.c_contiguous, np.shape(x), x.ndim),
    "address": lambda x: x.ctypes.data,
}


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
            return repr(act(x)).replace("WatchedArray", "array")
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
TORCH_READS: dict[str, Callable[[Any], Any]] = {
    "item": lambda x: x[0, 1].item(),
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
}
TORCH_ALLOWED: dict[str, Callable[[Any], Any]] = {
    "views": lambda x: (x[1:, :2], x.view(-1)[3:], x.T, list(x), x[None], x.reshape(-1)),
    "shape": lambda x: (x.shape, x.dtype, x.nbytes, len(x), x.stride(), x.is_contiguous(), x.numel()),
    "address": lambda x: x.data_ptr(),
    "arithmetic": lambda x: x.add_(1).mul(x).sum(),
    "number": lambda x: x.fill_(3),
    "number into a place": lambda x: x.__setitem__((0, 1), 3),
    "choice": lambda x: torch.where(x > 0, x, -x),
    "index": lambda x: x[x[0, :2].long() % 3],
    "copy within": lambda x: x.copy_(x + 1),
    "type": lambda x: x.to(torch.float32),
    "copy out": lambda x: PINNED.copy_(x, non_blocking=True),
    "copy in": lambda x: x.copy_(PINNED, non_blocking=True),
    "the host's own": lambda x: (
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
    "tolist": lambda b: b.program.lanes[0].sampled.tolist(),
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
