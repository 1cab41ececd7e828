"""The whole step on CUDA's kernels: every launch touches what it declares and nothing else, and never waits.

Each operation of the step program runs traced on torch memory, Triton's kernels in the interpreter and torch's own
operators under a dispatch mode: what it touches, byte by byte, races inside a kernel, accesses out of bounds, and
torch calls that would wait for the device.
"""

from collections.abc import Callable
from typing import Any

import pytest

from gpu.device.adversary import AdversaryDevice
from gpu.device.guard_torch import TorchGuard
from gpu.device.policies import Eager, Policy, Seeded
from gpu.device.protocol import DeviceError, Regions
from tests.interpret.access import trace
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here
from tests.interpret.test_any_order import STEPS, TOKENS, WINDOWED, TorchBench, check_windowed

CLOCKS = {"begin", "end"}  # the adversary's own, and no torch
OPERATIONS = {"upload", "slot writes", "sampling writes", "gather", "model", "sample", "accept", "stash", "result"}


class TracedDevice(AdversaryDevice):
    """Checks each operation against what it declared, when it runs."""

    def __init__(self, policy: Policy | None = None) -> None:
        super().__init__(policy or Eager(), memory="torch")
        self.traced: dict[str, list[str]] = {}  # operation: its kernels and operators
        self._guard_inside = TorchGuard()

    def buffer(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(super().buffer(*args, **kwargs))

    def adopt(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch(super().adopt(*args, **kwargs))

    def pinned(self, *args: Any, **kwargs: Any) -> Any:
        buffer = super().pinned(*args, **kwargs)
        self._guard_inside.pin(buffer.array)
        return buffer

    def _watch(self, buffer: Any) -> Any:
        self._guard_inside.watch(buffer.array)
        return buffer

    def launch(self, stream: Any, fn: Callable[[], None], *, reads: Regions, writes: Regions, name: str) -> None:
        def traced() -> None:
            with trace(self._guard_inside) as seen:
                fn()
            wrong = seen.undeclared(self.buffers, reads, writes)
            assert not wrong, f"{name} {'; '.join(wrong)}"
            self.traced.setdefault(name, []).extend(seen.kernels + seen.operators)

        super().launch(stream, fn if name in CLOCKS else traced, reads=reads, writes=writes, name=name)


def run(device: TracedDevice, change: Callable[[Any], None] = lambda _: None) -> list[list[int] | None]:
    bench = TorchBench(device)
    device._guard_inside.watch(bench.program._model.positions)  # type: ignore[attr-defined]
    change(bench.program)
    issued = bench.queue(STEPS)
    device.synchronize()
    return [step.tokens for step in issued]


@pytest.mark.parametrize("policy", [Eager(), Seeded(3)], ids=["eager", "seeded"])
def test_every_operation_touches_what_it_declares_and_waits_for_nothing(policy: Policy) -> None:
    device = TracedDevice(policy)
    assert run(device) == TOKENS
    assert device.traced.keys() == OPERATIONS
    assert "gather_decode_kernel" in device.traced["gather"]
    assert "gather_chunks_kernel" in device.traced["gather"]
    assert "copy_" in device.traced["upload"]


@pytest.mark.parametrize(
    ("speculate", "operations"), [("mill", {"draft"}), ("ngram", {"look up", "note prompts", "note gains"})]
)
def test_drafts_touch_what_they_declare_and_wait_for_nothing(speculate: str, operations: set[str]) -> None:
    device = TracedDevice(Seeded(3))
    bench = TorchBench(device, speculate)
    device._guard_inside.watch(bench.program._model.positions)  # type: ignore[attr-defined]
    bench.queue(WINDOWED)
    device.synchronize()
    check_windowed(bench)
    assert device.traced.keys() == OPERATIONS | operations
    if speculate == "ngram":
        assert set(device.traced["look up"]) == {"search_kernel", "draft_kernel"}
        assert set(device.traced["note gains"]) == {"note_kernel"}
        assert set(device.traced["note prompts"]) == {"copy_", "fill_"}


@pytest.mark.parametrize(
    ("name", "kind", "buffer"),
    [
        ("gather", "reads", "slot_table"),  # Triton
        ("gather", "writes", "batch.starts"),
        ("gather", "writes", "relay.token"),
        ("slot writes", "writes", "slot_table"),
        ("stash", "reads", "batch.entries"),
        ("upload", "writes", "descriptor0"),  # torch
        ("upload", "reads", "ledger.tokens"),
        ("model", "writes", "v_cache"),
        ("sample", "reads", "batch.logits"),
        ("result", "reads", "outcome0"),
    ],
)
def test_a_declaration_that_is_missing_is_seen(name: str, kind: str, buffer: str) -> None:
    class Forgetful(TracedDevice):
        def launch(self, stream: Any, fn: Any, **declared: Any) -> None:
            if declared["name"] == name:
                kinds = ("reads", "writes") if kind == "reads" else ("writes",)  # a write covers a read
                for one in kinds:
                    declared[one] = [r for r in declared[one] if r.buffer.name != buffer]
            super().launch(stream, fn, **declared)

    with pytest.raises((DeviceError, AssertionError), match=rf"{name} .*{kind} {buffer}\["):
        run(Forgetful())


def test_a_model_that_waits_for_the_device_is_refused() -> None:
    def curious(program: Any) -> None:
        forward = program._model.forward

        def peek(tokens: Any, *rest: Any) -> None:
            tokens[0].item()
            forward(tokens, *rest)

        program._model.forward = peek

    with pytest.raises(DeviceError, match="would wait for the device"):
        run(TracedDevice(), curious)
