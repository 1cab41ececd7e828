"""Parts of the check that concern the device alone: what it is, pinned rings, graphs with events inside.

Owns small programs on the device protocol, written so that they run on the host device as well. Each asserts what the
rules of CUDA promise; none asserts how long anything takes.
"""

import os
import platform
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu.device.guard import LaunchGuard
from gpu.device.guard_torch import TorchGuard
from gpu.device.order import OrderChecker
from gpu.device.protocol import Completion, Device, DeviceError, Stream, Timestamp
from shm.segment import Segment
from tools.gpu_check import Options
from tools.gpu_check_part import Figures, open_device, run

SLEEP_S = 0.02
CYCLES_PER_S = 1.5e9  # about what a GPU's clock counts
INTS = 1024


def sleep(kind: str, seconds: float) -> None:
    """The body of an operation that takes about this long on its stream."""
    if kind == "cuda":
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))
    else:
        time.sleep(seconds)


def environment(options: Options, figures: Figures) -> None:
    """Versions, and what the device says of itself."""
    figures.add("python", platform.python_version())
    figures.add("torch", torch.__version__)
    figures.add("numpy", np.__version__)
    try:
        import triton

        figures.add("triton", triton.__version__)
    except ImportError:
        figures.add("triton", "not installed")
    figures.add("cpus", os.cpu_count())
    device = open_device(options.device, OrderChecker())
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        figures.add("device", properties.name)
        figures.add("capability", f"{properties.major}.{properties.minor}")
        figures.add("memory_gb", round(properties.total_memory / 1e9, 1))
        figures.add("cuda", torch.version.cuda)
    streams = {device.stream(f"stream{i}") for i in range(24)}  # each one of its own, of the 32 that torch has
    device.close()
    figures.add("streams", len(streams))


def rings(options: Options, figures: Figures) -> None:
    """The device writes into a registered memfd, and another process reads it there."""
    device = open_device(options.device, OrderChecker())
    segment = Segment.create("check", 8 * INTS * 4)
    slots = [segment.array("i4", INTS, i * INTS * 4) for i in range(8)]
    pinned = [device.pinned(slot, f"slot{i}") for i, slot in enumerate(slots)]
    source = device.buffer((INTS,), np.int32, "source")
    stream = device.stream("copy")
    host_ns = []
    for i, slot in enumerate(pinned):

        def fill(value: int = i) -> None:
            source.array[:] = value + 1

        def copy(target: Any = slot.array) -> None:
            if options.device == "cuda":
                target.copy_(source.array, non_blocking=True)
            else:
                np.copyto(target, source.array)

        device.launch(stream, fill, reads=(), writes=(source.region(),), name="fill")
        begin_ns = time.monotonic_ns()
        device.launch(stream, copy, reads=(source.region(),), writes=(slot.region(),), name="copy")
        host_ns.append(time.monotonic_ns() - begin_ns)
    device.synchronize()
    for i, values in enumerate(slots):
        assert (values == i + 1).all(), f"slot {i} holds {values[:4].tolist()}"
    read = f"b''.join(os.pread({segment.fd}, 4, i * {INTS * 4}) for i in range(8))"
    script = f"import os, struct; print(struct.unpack('<8i', {read}))"
    seen = subprocess.run([sys.executable, "-c", script], pass_fds=[segment.fd], capture_output=True, check=True)
    assert seen.stdout.decode().strip() == "(1, 2, 3, 4, 5, 6, 7, 8)", seen.stdout
    figures.add("copy_issue_us_median", round(float(np.median(host_ns)) / 1e3, 1))
    device.close()
    segment.close()


def graphs(options: Options, figures: Figures) -> None:
    """A graph with an event in its middle: who waits for it sees the first half, and runs before the second ends."""
    kind, device = options.device, open_device(options.device, OrderChecker())
    forward, other = device.stream("forward"), device.stream("other")
    middle = device.event("middle")
    first, last, seen = (device.buffer((INTS,), np.int32, name) for name in ("first", "last", "seen"))
    early, late = device.timestamp("early"), device.timestamp("late")

    def add(target: Any) -> None:
        target += 1

    def issue() -> None:
        write = (first.region(),)
        device.launch(forward, partial(add, first.array), reads=write, writes=write, name="first half")
        middle.record(forward)
        device.launch(forward, partial(sleep, kind, SLEEP_S), reads=(), writes=(), name="sleep")
        write = (last.region(),)
        device.launch(forward, partial(add, last.array), reads=write, writes=write, name="second half")

    issue()
    device.synchronize()
    with device.capture(forward) as graph:
        issue()
    rounds, overlapped, gaps = 10, 0, []
    for i in range(rounds):
        graph.launch(forward)
        late.record(forward)
        middle.wait(other)

        def look() -> None:
            if kind == "cuda":
                seen.array.copy_(first.array)
            else:
                np.copyto(seen.array, first.array)

        device.launch(other, look, reads=(first.region(),), writes=(seen.region(),), name="look")
        early.record(other)
        times: dict[str, int] = {}
        reading = [read_time(device, early, other, times), read_time(device, late, forward, times)]
        device.synchronize()
        while not all(completion.query() for completion in reading):
            time.sleep(0.001)
        overlapped += times["early"] < times["late"]
        gaps.append((times["late"] - times["early"]) / 1e6)
        value = np.asarray(seen.array.cpu() if kind == "cuda" else seen.array)
        assert (value == i + 2).all(), (i, value[:4])
    assert overlapped == rounds, f"the waiter ran beside the second half in {overlapped} of {rounds} rounds only"
    figures.add("second_half_ms_median", round(float(np.median(gaps)), 2))
    check_query(device)
    device.close()


def guard(options: Options, figures: Figures) -> None:
    """What would wait for the device raises in the launch loop, and nowhere else; work that does not wait passes."""
    watcher = TorchGuard(cuda=True) if options.device == "cuda" else LaunchGuard()
    device = open_device(options.device, guard=watcher)
    stream = device.stream("stream")
    memory = device.buffer((INTS,), np.int32, "memory")
    planted: dict[str, Any] = {
        "item": lambda: memory.array[3].item(),  # noqa: PLW0108 - evaluated in the section
        "tolist": memory.array.tolist,
        "bool": lambda: bool(memory.array[0] > 0),
        "synchronize": device.synchronize,
        "stream synchronize": stream.synchronize,
    }
    if options.device == "cuda":
        planted |= {
            "to cpu": lambda: memory.array.to("cpu"),
            "blocking copy": lambda: torch.empty(INTS, dtype=torch.int32).copy_(memory.array),
            "nonzero": memory.array.nonzero,
            "torch.cuda.synchronize": lambda: torch.cuda.synchronize(),  # noqa: PLW0108 - replaced in the section
        }

    def add() -> None:
        memory.array.__iadd__(1)

    missed = []
    with watcher.section():
        device.launch(stream, add, reads=(memory.region(),), writes=(memory.region(),), name="add")
        for name, wait in planted.items():
            try:
                wait()
                missed.append(name)
            except (DeviceError, RuntimeError) as error:
                figures.add(name, str(error)[:120])
    assert not missed, f"not refused: {', '.join(missed)}"
    device.synchronize()
    assert memory.array.tolist()[5] == 1
    device.close()


def read_time(device: Device, stamp: Timestamp, stream: Stream, times: dict[str, int]) -> Completion:
    """Have the time of `stamp`, which was just recorded on `stream`, put into `times` under its name."""

    def read() -> None:
        times[stamp.name] = stamp.ns()

    return device.call(stream, read, reads=(stamp.region(),), writes=(), name=f"read {stamp.name}")


def check_query(device: Device) -> None:
    """An event that was never recorded does not block; one that was reached says so."""
    stream, never, event = device.stream("query"), device.event("never"), device.event("event")
    never.wait(stream)
    event.record(stream)
    stream.synchronize()
    assert event.query()


if __name__ == "__main__":
    run({"environment": environment, "rings": rings, "graphs": graphs, "guard": guard})
