"""The step program with its Triton kernels on torch memory, in any order that CUDA permits, and without a wait."""

from typing import Any

import numpy as np
import pytest

from gpu.device.adversary import AdversaryDevice
from gpu.device.enumeration import all_orders, wrong_orders
from gpu.device.guard_torch import TorchGuard
from gpu.device.policies import Eager, Lazy, Policy, Seeded, Starving
from gpu.device.protocol import DeviceError
from gpu.drafters.ngram import NgramDrafter
from gpu.kernels.triton_ngram import TritonNgramKernels
from gpu.kernels.triton_step import TritonStepKernels
from gpu.step import StepProgram
from shm.records import ResultLayout, StepLayout
from tests.gpu.paged_mill import Bench, Issued, reference, small_config
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here
from tools.torch_mill import TorchMill, TorchMillDrafter, mill_sample

PROMPTS = [[5, 6, 7], [11, 12, 13, 14, 15, 16]]
STEPS: list[dict[str, Any]] = [
    {"fill": {1: [1, 2]}, "chunks": [(1, 0, 0, 3, 1)]},
    {"decode": [1], "fill": {2: [3, 4]}, "chunks": [(2, 1, 0, 6, 1)]},
    {"decode": [2, 1]},
    {"decode": [2], "fill": {1: [2, 1]}, "chunks": [(1, 1, 0, 6, 1)]},  # the entry and pages of a row that ended
    {"decode": [1]},
]
ONE, TWO = (reference(prompt, 4) for prompt in PROMPTS)
TOKENS = [[ONE[0]], [ONE[1], TWO[0]], [TWO[1], ONE[2]], [TWO[2], TWO[0]], [TWO[1]]]


class TorchBench(Bench):
    """The bench on torch memory, with the kernels that CUDA runs."""

    def __init__(self, device: AdversaryDevice, speculate: str = "") -> None:
        """speculate: who drafts, the mill itself or "ngram"."""
        small = {"max_running": 2, "max_queued": 1, "kv_tokens": 40, "max_len": 12, "prefill_chunk": 8, "poison": True}
        self.config = config = small_config(**small | ({"window": 3, "kv_tokens": 64} if speculate else {}))
        self.device = device
        self._layout, self._result_layout = StepLayout(config), ResultLayout(config)
        self.ledger = np.zeros((config.rows, config.max_len), np.int32)
        kernels = TritonStepKernels.of(config)
        model: Any = TorchMill(config.pages, config.page_size, config.pages_per_row * config.page_size, "cpu")
        mills, drafter = TorchMillDrafter(model), None
        if speculate:
            looks_up = speculate == "ngram"
            drafter = NgramDrafter(device, config, TritonNgramKernels.of(config, "cpu")) if looks_up else mills
        self.program = StepProgram(device, config, model, kernels, mill_sample, self.ledger, drafter=drafter)
        mills.caches = self.program.caches
        self.program.capture()
        self.completed = []

    def queue(self, steps: list[dict[str, Any]]) -> list[Issued]:
        for row, prompt in enumerate(PROMPTS):
            self.prompt(row, prompt)
        issued = []
        for step in steps:
            slots = [write for entry, pages in step.get("fill", {}).items() for write in self.fill(entry, pages)]
            sampling = [(entry, 0.0, 7) for entry in step.get("fill", {})]
            rest = {name: value for name, value in step.items() if name != "fill"}
            issued.append(self.step(slots=slots, sampling=sampling, **rest))
        return issued


WINDOWED: list[dict[str, Any]] = [
    {"fill": {1: [1, 2, 3], 2: [4, 5, 6, 7, 8]}, "chunks": [(1, 0, 0, 3, 1)]},
    {"decode": [1], "chunks": [(2, 1, 0, 6, 1)]},
    {"decode": [2, 1]},
    {"decode": [2]},
]


def check_windowed(bench: TorchBench) -> int:
    """Assert that each row has gained its own tokens. Returns how many all of them have."""
    texts: dict[int, list[int]] = {1: [], 2: []}
    for number, step in enumerate(bench.completed):
        what, view = WINDOWED[number], step.result.view
        rows = [*what.get("decode", ()), *(chunk[0] for chunk in what.get("chunks", ()))]
        for i, entry in enumerate(rows):
            texts[entry] += view.tokens[: view.counts[i], i].tolist()
    for entry, text in texts.items():
        assert text == reference(PROMPTS[entry - 1], len(text))
    return sum(map(len, texts.values()))


@pytest.mark.parametrize("speculate", ["mill", "ngram"])
def test_drafts_change_no_token_in_any_order(speculate: str) -> None:
    gained = set()
    for policy in (Eager(), Starving("forward"), Seeded(1)):
        device = AdversaryDevice(policy, memory="torch")
        bench = TorchBench(device, speculate)
        bench.queue(WINDOWED)
        device.synchronize()
        gained.add(check_windowed(bench))
    assert len(gained) == 1, "in every order the same drafts are taken"
    assert speculate == "ngram" or gained.pop() > 6


def run(device: AdversaryDevice, fenced: bool = True) -> list[list[int] | None]:
    bench = TorchBench(device)
    if not fenced:
        bench.program.fence.hold = lambda *_: None  # type: ignore[method-assign]
    bench.queue(STEPS)
    device.synchronize()
    return [issued.tokens for issued in bench.completed]


@pytest.mark.parametrize(
    "policy",
    [Eager(), Lazy("schedule"), Starving("forward"), Starving("schedule"), Seeded(1), Seeded(2)],
    ids=lambda p: p.name,
)
def test_triton_kernels_give_the_same_tokens_in_every_order(policy: Policy) -> None:
    assert run(AdversaryDevice(policy, memory="torch")) == TOKENS


def test_the_launch_loop_does_not_wait_on_torch_memory() -> None:
    guard = TorchGuard()
    device = AdversaryDevice(Seeded(3), memory="torch", guard=guard)
    bench = TorchBench(device)
    with guard.section():
        bench.queue(STEPS)
        with pytest.raises(DeviceError, match="would wait for the device"):
            bench.program.relay.length.array.tolist()
    device.synchronize()
    assert [issued.tokens for issued in bench.completed] == TOKENS


@pytest.mark.unordered
def test_without_the_fence_an_order_is_wrong() -> None:
    """Control."""
    policies = [Lazy("schedule"), Starving("forward")]
    assert wrong_orders(lambda device: run(device, fenced=False), TOKENS, policies, memory="torch") > 0


def test_every_order_of_two_steps() -> None:
    device = AdversaryDevice(memory="torch")
    views = [issued.result.view for issued in TorchBench(device).queue(STEPS[:2])]
    found = all_orders(device, lambda: [v.tokens[0, : v.n_rows].tolist() for v in views] == TOKENS[:2])
    print(f"\n{found.total} orders, {found.states} states")
    assert found.wrong == 0
    assert found.total > 1000
