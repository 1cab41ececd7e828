"""Trained drafters in the step program on CUDA's code: step by step they draft and keep what the host's do.

The target's choice is forced, so that windows gain one to four tokens, and drafts of a drafter that has learnt
nothing are taken.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.backend import open_backend
from gpu.cuda_backend import make_drafter, make_parts
from gpu.device.adversary import AdversaryDevice
from gpu.device.policies import Eager, Policy, Seeded
from gpu.models.weights import open_weights
from gpu.step import StepProgram
from procs.model_info import read_model_info
from shm.config import ServerConfig
from shm.records import ResultLayout, StepLayout
from tests.gpu.models.small_drafters import trained
from tests.gpu.paged_mill import Bench, Issued
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here
from tests.model_factory import TinyLlama

WINDOW = 4
PROMPTS = [[5, 9, 17, 5, 9, 200, 31, 8, 8, 60], [7, 77, 150, 3, 3, 90, 12]]
STEPS: list[dict[str, Any]] = [
    {"slots": [(1, 0, 2), (1, 1, 5), (1, 2, 3)], "chunks": [(1, 0, 0, 6, 0)]},
    {"slots": [(2, 0, 4), (2, 1, 1), (2, 2, 6)], "chunks": [(1, 0, 6, 4, 1), (2, 1, 0, 3, 0)]},
    {"decode": [1], "chunks": [(2, 1, 3, 4, 1)]},
    *[{"decode": [2, 1]}] * 3,
    {"decode": [1, 2], "drafts": 0},
    {"decode": [1]},
    *[{"decode": [1, 2]}] * 2,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TinyLlama().write_hf(folder)
    return folder


def config_of(model: Path, kind: str) -> ServerConfig:
    file = trained(model, kind, (0, 1)).file
    return ServerConfig(
        model=read_model_info(model), served_model_name="tiny", host="127.0.0.1", port=0, device="cuda",
        dtype="float32", max_running=2, max_queued=1, kv_tokens=112, max_len=40, prefill_chunk=8, threads=1,
        speculate=kind, drafter_file=str(file), window=WINDOW,
    )  # fmt: skip


class TrainedBench(Bench):
    """One program, on the host or as CUDA has it, with the prompts in its ledger."""

    def __init__(self, config: ServerConfig, policy: Policy | None = None) -> None:
        self.config, self.completed = config, []
        self._layout, self._result_layout = StepLayout(config), ResultLayout(config)
        self.ledger = np.zeros((config.rows, config.max_len), np.int32)
        for row, prompt in enumerate(PROMPTS):
            self.prompt(row, prompt)
        if config.device == "host":
            backend = open_backend(config, self.ledger, None)
            self.device, self.program = backend.device, backend.program
        else:
            self.device = AdversaryDevice(policy or Eager(), memory="torch")
            parts = make_parts(config, open_weights(config.model), None, "cpu")
            drafter = make_drafter(config, self.device, "cpu", None, parts.model)
            self.program = StepProgram(
                *(self.device, config, parts.model, parts.kernels, parts.sampler, self.ledger), drafter=drafter
            )
        self.program._sample = self._choose
        self.program.capture()

    def _choose(self, *arrays: Any) -> None:
        """A draft at three of four places, and otherwise a token that nobody foresees."""
        *_, places, targets = (np.asarray(array) for array in arrays)
        tokens = np.asarray(self.program.batch.tokens.array)
        for t, place in enumerate(places.tolist()):
            is_taken = t % WINDOW < WINDOW - 1 and place % 4
            targets[t] = tokens[t + 1] if is_taken else (11 * place + 5) % 290 + 3

    def put(self, step: dict[str, Any]) -> Issued:
        what = dict(step)
        drafts = what.pop("drafts", WINDOW - 1)
        slot = self.describe(**what)
        slot.view.drafts = drafts
        return self.enqueue(slot)

    def run(self) -> list[dict[str, Any]]:
        """What is there behind each step, one by one."""
        seen = []
        for step in STEPS:
            issued = self.put(step)
            self.device.synchronize()
            count = len(step.get("decode", ())) * (1 + step.get("drafts", WINDOW - 1))
            drafter: Any = self.program.drafter
            seen.append({
                "tokens": copied(self.program.batch.tokens.array)[:count].tolist(),
                "gained": (issued.tokens, issued.counts),
                "states": copied(drafter._state.array)[1:],
            })  # fmt: skip
        self.device.close()
        return seen


def copied(array: Any) -> Any:
    return torch.as_tensor(array).clone().numpy()


Found = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def one_by_one(model: Path) -> Found:
    """What CUDA's code leaves behind each step, by the kind of its drafter."""
    return functools.cache(lambda kind: TrainedBench(config_of(model, kind)).run())


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_it_drafts_and_keeps_what_the_host_does(model: Path, one_by_one: Found, kind: str) -> None:
    config, found = config_of(model, kind), one_by_one(kind)
    wanted = TrainedBench(replace(config, device="host")).run()
    gains: set[int] = set()
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for name in ("tokens", "gained"):
            assert one[name] == other[name], (step, name)
        live = slice(0, 1 if step < 2 else 2)  # nothing was kept for the second one yet
        np.testing.assert_allclose(one["states"][live], other["states"][live], rtol=0, atol=1e-3)
        gains |= set(one["gained"][1])
    assert gains == {1, 2, 3, 4}
    drafts = [draft for step in found for draft in step["tokens"][1:]]
    assert len(set(drafts)) > 8, "it says something"


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_rows_gain_the_same_in_any_order(model: Path, one_by_one: Found, kind: str) -> None:
    """All steps are queued before the first of them has to end; or each has ended before the next one is queued."""
    bench = TrainedBench(config_of(model, kind), Seeded(1))
    issued = [bench.put(step) for step in STEPS]
    bench.device.synchronize()
    bench.device.close()
    assert [(step.tokens, step.counts) for step in issued] == [step["gained"] for step in one_by_one(kind)]
