"""Every launch of the step program declares the bytes that it reads and writes, and no launch touches others.

Steps run one at a time on a device that wraps each operation. Writes: all buffers are compared before and after. Reads:
the operation runs twice on the same memory, the second time with every undeclared byte changed; what it writes must not
change with them.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu.device.buffers import ArrayBuffer
from gpu.device.host import HostCompletion, HostDevice
from gpu.device.protocol import Regions
from tests.gpu.paged_mill import Bench, reference, small_config

CLOCKED = {"begin", "end", "warm-up begin", "warm-up end"}  # write the time, which differs from run to run


class AuditDevice(HostDevice):
    """Keeps every buffer it hands out, and checks each operation against its declarations."""

    def __init__(self, observer: Any = None) -> None:
        super().__init__(observer)
        self.buffers: list[ArrayBuffer] = []
        self.audited: set[str] = set()
        # The lengths stream runs beside the forward stream; and whoever queues a step reads its descriptor, in memory
        # that an audit changes for a moment.
        self.one_at_a_time = threading.Lock()

    def buffer(self, *args: Any, **kwargs: Any) -> ArrayBuffer:
        self.buffers.append(super().buffer(*args, **kwargs))
        return self.buffers[-1]

    def pinned(self, *args: Any, **kwargs: Any) -> ArrayBuffer:
        self.buffers.append(super().pinned(*args, **kwargs))
        return self.buffers[-1]

    def adopt(self, *args: Any, **kwargs: Any) -> ArrayBuffer:
        self.buffers.append(super().adopt(*args, **kwargs))
        return self.buffers[-1]

    def launch(self, stream: Any, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str) -> None:
        def audited() -> None:
            with self.one_at_a_time:
                self._audit(name, fn, reads, writes)

        super().launch(stream, audited, reads=reads, writes=writes, name=name)

    def call(self, stream: Any, fn: Callable[[], None], **declared: Any) -> HostCompletion:
        """What the host does with a result is not the device's: it only waits its turn."""

        def alone() -> None:
            with self.one_at_a_time:
                fn()

        return super().call(stream, alone, **declared)

    def _audit(self, name: str, fn: Callable[[], None], reads: Regions, writes: Regions) -> None:
        memory = [bytes_of(b) for b in self.buffers]
        before = [m.copy() for m in memory]
        fn()
        after = [m.copy() for m in memory]
        for buffer, old, new in zip(self.buffers, before, after, strict=True):
            wrong = (old != new) & ~mask(buffer, writes)
            assert not wrong.any(), f"{name} writes {buffer.name}, undeclared"
        if name.rstrip("0123456789") not in CLOCKED:
            self._rerun(name, fn, before, after, reads, writes)
        self.audited.add(name)

    def _rerun(
        self, name: str, fn: Callable[[], None], before: Any, after: Any, reads: Regions, writes: Regions
    ) -> None:
        memory = [bytes_of(b) for b in self.buffers]
        for buffer, now, old in zip(self.buffers, memory, before, strict=True):
            lowest = np.arange(buffer.nbytes) % buffer.array.itemsize == 0  # a small change: 3 becomes 2
            now[:] = np.where(~mask(buffer, reads) & lowest, old ^ 1, old)
        try:
            fn()
        except Exception as error:
            raise AssertionError(f"{name} reads something undeclared: {error}") from error
        for buffer, now, first, old in zip(self.buffers, memory, after, before, strict=True):
            written = mask(buffer, writes) & (first != old)
            assert (now[written] == first[written]).all(), f"{name} reads something undeclared: {buffer.name} differs"
            now[:] = first


def forgetful(name: str, kind: str, buffer: str) -> AuditDevice:
    """A device that loses one part of a declaration."""

    class Forgetful(AuditDevice):
        def launch(self, stream: Any, fn: Any, **declared: Any) -> None:
            if declared["name"] == name:
                declared[kind] = [r for r in declared[kind] if r.buffer.name != buffer]
            super().launch(stream, fn, **declared)

    return Forgetful()


def bytes_of(buffer: ArrayBuffer) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return buffer.array.reshape(-1).view(np.uint8)


def mask(buffer: ArrayBuffer, regions: Regions) -> np.ndarray[Any, np.dtype[np.bool_]]:
    out = np.zeros(buffer.nbytes, np.bool_)
    for region in regions:
        if region.buffer is buffer:
            out[region.lo : region.hi] = True
    return out


def run(device: AuditDevice, **options: Any) -> None:
    """Chunks, mixed and decode steps, each ended before the next is queued."""
    drafting, planned = options.pop("drafting", "mill"), options.pop("planned", False)
    bench = Bench(device, small_config(**options), drafting, planned, early_lengths=True)
    prompts = {1: [5, 6, 7, 8, 9], 2: [20, 21, 22], 3: [40] * 6}
    steps: list[dict[str, Any]] = [
        {
            "slots": bench.fill(1, [1, 2, 3, 11, 12, 13, 14]),
            "sampling": [(1, 0.5, 2**40 + 7)],
            "chunks": [(1, 1, 0, 3, 0)],
        },
        {"slots": bench.fill(2, [4, 5, 6, 21, 22, 23, 24]), "chunks": [(1, 1, 3, 2, 1), (2, 2, 0, 3, 1)]},
        {"decode": [2, 1]},
        {"decode": [1, 2], "slots": bench.fill(3, [7, 8, 31, 32, 33]), "chunks": [(3, 3, 0, 6, 1)]},
        {"decode": [1, 2, 3]},
        {"decode": [3, 1, 2]},
        {"decode": [2]},
    ]
    for row, prompt in prompts.items():
        bench.prompt(row, prompt)
    for step in steps:
        with device.one_at_a_time:
            bench.step(**step)
        device.synchronize()
    device.close()
    tokens = [step.tokens for step in bench.completed]
    if bench.config.window > 1:
        assert any(count > 1 for step in bench.completed for count in step.counts or []) or drafting == "ngram"
        return
    one, two, three = reference(prompts[1], 5, 0.5, 2**40 + 7), reference(prompts[2], 6), reference(prompts[3], 3)
    assert tokens == [
        [], [one[0], two[0]], [two[1], one[1]], [one[2], two[2], three[0]], [one[3], two[3], three[1]],
        [three[2], one[4], two[4]], [two[5]],
    ]  # fmt: skip


@pytest.mark.parametrize("poison", [False, True])
def test_the_step_program_touches_what_it_declares_and_nothing_else(poison: bool) -> None:
    device = AuditDevice()
    run(device, poison=poison)
    assert device.audited == {
        "upload", "slot writes", "sampling writes", "begin", "gather", "model", "sample", "accept", "stash", "end",
        "early lengths", "result",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("drafting", "names"),
    [
        ("mill", {"draft"}),
        ("ngram", {"look up", "note prompts", "note gains"}),
        ("standalone", {"draft", "draft prefill"}),
    ],
)
def test_so_do_drafters(drafting: str, names: set[str]) -> None:
    device = AuditDevice()
    run(device, drafting=drafting, window=3)
    assert names < device.audited


def test_so_does_a_plan() -> None:
    device = AuditDevice()
    run(device, planned=True)
    assert "plan" in device.audited


@pytest.mark.parametrize(
    ("name", "kind", "buffer", "options"),
    [
        ("plan", "writes", "plan", {"planned": True}),
        ("model", "reads", "plan", {"planned": True}),
        ("look up", "reads", "ngram.history", {"drafting": "ngram", "window": 3}),
        ("note gains", "writes", "ngram.known", {"drafting": "ngram", "window": 3}),
        ("draft", "reads", "draft.k_cache", {"drafting": "standalone", "window": 3}),
        ("draft", "writes", "batch.tokens", {"drafting": "standalone", "window": 3}),
    ],
)
def test_the_audit_sees_what_they_do_not_declare(name: str, kind: str, buffer: str, options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=name):
        run(forgetful(name, kind, buffer), **options)


@pytest.mark.parametrize(
    ("name", "kind", "buffer"),
    [
        ("gather", "reads", "slot_table"),
        ("gather", "reads", "relay.token"),
        ("gather", "writes", "batch.tokens"),
        ("upload", "reads", "ledger.tokens"),
        ("slot writes", "writes", "slot_table"),
        ("sampling writes", "reads", "descriptor0"),
        ("model", "reads", "v_cache"),
        ("model", "writes", "k_cache"),
        ("sample", "reads", "batch.places"),
        ("accept", "reads", "batch.targets"),
        ("stash", "writes", "relay.token"),
        ("result", "reads", "outcome1"),
        ("accept", "writes", "outcome0"),
    ],
)
def test_the_audit_sees_a_declaration_that_is_missing(name: str, kind: str, buffer: str) -> None:
    device = forgetful(name, kind, buffer)
    with pytest.raises(Exception, match=f"{name} {kind}"):
        run(device)
    device.close()


class Log:
    """An observer that keeps names and regions."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, str, int, int]] = []
        self.orders: list[tuple[str, str, str]] = []

    def launch(self, stream: Any, name: str, reads: Regions, writes: Regions) -> None:
        for region in (*reads, *writes):
            assert 0 <= region.lo < region.hi <= region.buffer.nbytes, (name, region)
        self.launches.append((stream.name, name, len(reads), len(writes)))

    def call(self, stream: Any, completion: Any, reads: Regions, writes: Regions) -> None:
        self.launch(stream, completion.name, reads, writes)

    def host_access(self, name: str, reads: Regions, writes: Regions) -> None: ...

    def host_saw(self, completion: Any) -> None: ...

    def record(self, stream: Any, event: Any) -> None:
        self.orders.append(("record", stream.name, event.name))

    def wait(self, stream: Any, event: Any) -> None:
        self.orders.append(("wait", stream.name, event.name))

    def graph_launch(self, stream: Any, graph: Any) -> None: ...

    def graph_end(self, stream: Any, graph: Any) -> None: ...

    def host_wait(self, event: Any, stream: Any) -> None: ...


def test_the_observer_hears_the_same_step_from_a_graph_as_from_single_launches() -> None:
    log = Log()
    device = HostDevice(observer=log)
    bench = Bench(device, small_config())
    bench.prompt(1, [5, 6, 7])
    heard = []
    for step in ({"slots": bench.fill(1, [1, 2]), "chunks": [(1, 1, 0, 3, 1)]}, {"decode": [1]}):
        log.launches.clear()
        log.orders.clear()
        bench.step(**step)
        heard.append((list(log.launches), [(kind, stream, event[:-1]) for kind, stream, event in log.orders]))
    device.close()
    mixed, decode = heard
    assert [what for what in mixed[0] if what[1] not in ("slot writes", "upload")] == [
        what for what in decode[0] if what[1] != "upload"
    ]
    assert mixed[1] == decode[1]
    assert mixed[1] == [
        ("wait", "schedule", "left"),
        ("wait", "schedule", "fence"),
        ("record", "schedule", "staged"),
        ("wait", "forward", "staged"),
        ("record", "forward", "fence"),
        ("record", "forward", "done"),
        ("wait", "copy", "done"),
        ("record", "copy", "left"),
    ]
    assert all(reads or writes for _, _, reads, writes in decode[0])
