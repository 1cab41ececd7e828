"""The CUDA backend as a server opens it, on a fake GPU: who looks on, which attention, what is compiled and planned."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.cuda_backend import open_cuda
from gpu.device.guard_torch import TorchGuard
from gpu.device.order import OrderChecker
from gpu.device.protocol import DeviceError
from gpu.kernels import flashinfer_attention as fi
from gpu.kernels.triton_attention import PagedAttention
from gpu.kernels.triton_spec import kernel_modules, kernels_of
from gpu.lanes import LANES, ResultSlot, StepSlot
from gpu.models.weights import open_weights
from gpu.step import StepProgram
from gpu.warm_up import WarmUp
from procs.model_info import read_model_info
from shm.config import ServerConfig
from shm.records import STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout
from tests.compile import flashinfer_standin
from tests.compile.fake_driver import active
from tests.gpu.device.fake_cuda import FakeCuda
from tests.gpu.models.small_drafters import trained
from tests.model_factory import TinyLlama

ROWS = 6  # five rows are padded to six


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    folder = tmp_path_factory.mktemp("model")
    TinyLlama().write_hf(folder)
    return ServerConfig(
        model=read_model_info(folder), served_model_name="tiny", host="127.0.0.1", port=0, device="cuda",
        dtype="bfloat16", max_running=ROWS, max_queued=1, kv_tokens=256, max_len=32, prefill_chunk=8, threads=1,
    )  # fmt: skip


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> flashinfer_standin.Library:
    """FlashInfer, of which everything is taken for right."""
    found, difference = flashinfer_standin.Library(), fi.difference
    monkeypatch.setattr(fi, "load", lambda: (found, ""))
    monkeypatch.setattr(fi, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(fi, "PLAN_BYTES", 1 << 10)
    monkeypatch.setattr(fi, "HEAD_DIMS", (16, 64, 128))
    monkeypatch.setattr(fi, "difference", lambda *given: (difference(*given), 0.0)[1])
    return found


class Opened:
    """A program on the fake GPU, and steps for it."""

    def __init__(self, config: ServerConfig, fake: FakeCuda, guard: TorchGuard | None = None) -> None:
        self.config, self.checker, self.said = config, OrderChecker(), []
        plane = np.zeros((config.rows, config.max_len), np.int32)
        weights = open_weights(config.model)
        device, program = open_cuda(config, weights, plane, self.said.append, self.checker, guard, fake.api())
        self.device: Any = device
        self.program: StepProgram = program
        WarmUp(device, config, program).run()
        self.layout, self.results = StepLayout(config), ResultLayout(config)
        self.number = 0

    def step(self, decode: list[int], chunk: tuple[int, ...] | None = None, drafts: int = 0) -> None:
        payload, result = (np.zeros(layout.nbytes // 4, np.int32) for layout in (self.layout, self.results))
        self.number += 1
        slot = StepSlot.on(self.device, self.layout, payload, f"step {self.number}")
        kept = ResultSlot.on(self.device, self.results, result, f"result {self.number}", f" {self.number}")
        view = slot.view
        view.kind, view.n_decode = STEP_MIXED if chunk else STEP_DECODE, len(decode)
        view.decode_entries[: len(decode)], view.drafts = decode, drafts
        if chunk:
            view.n_chunks = 1
            view.chunks[:5, 0] = chunk
        done = self.program.enqueue(slot, kept, lambda: None)
        while not done.query():
            self.device.check()


def compiled() -> int:
    kernels = [kernel for module in kernel_modules().values() for kernel in kernels_of(module).values()]
    return sum(len(kernel.device_caches[0][0]) for kernel in kernels if kernel.device_caches)


def test_a_server_that_is_ready_compiles_nothing_more(config: ServerConfig) -> None:
    with active(90):
        opened = Opened(config, FakeCuda())
        before = compiled()
        assert before > 10
        opened.step([], (1, 0, 0, 5, 1))
        opened.step([1])
        opened.step([1, 2], (3, 0, 0, 8, 0))
        opened.step([1, 2, 3, 4, 5])
        assert compiled() == before
        opened.device.close()


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_with_a_trained_drafter_nothing_more_is_compiled_either(config: ServerConfig, library: Any, kind: str) -> None:
    """And the drafter's attention is our own, whatever the target's is."""
    file = trained(Path(config.model.path), kind, (1, 0)).file
    drafting = replace(config, speculate=kind, drafter_file=str(file), window=4)
    with active(90):
        opened = Opened(drafting, FakeCuda())
        drafter: Any = opened.program.drafter
        assert isinstance(drafter._model.attention, PagedAttention)
        assert not isinstance(opened.program._model.attention, PagedAttention)  # type: ignore[attr-defined]
        before = compiled()
        opened.step([], (1, 0, 0, 5, 0))
        opened.step([2], (1, 0, 5, 3, 1))
        opened.step([1])
        opened.step([1, 2], (3, 0, 0, 8, 0))
        opened.step([1, 2, 3, 4, 5])
        opened.step([1, 2], drafts=3)
        opened.step([1, 2, 3, 4, 5], (6, 0, 0, 3, 1), drafts=3)
        assert compiled() == before
        opened.device.close()


def test_who_shall_look_on_does(config: ServerConfig) -> None:
    with active(90):
        guard = TorchGuard()
        opened = Opened(config, FakeCuda(), guard)
        assert opened.device.observer is opened.checker and opened.checker.remembered > 0
        with guard.section(), pytest.raises(DeviceError, match="would wait"):
            opened.device.synchronize()
        with guard.section(), pytest.raises(DeviceError, match="would wait"):
            opened.program.relay.length.array.tolist()
        opened.device.close()


def test_attention_that_is_planned_is_told_of_every_pass(config: ServerConfig, library: Any) -> None:
    with active(80):
        opened = Opened(config, FakeCuda(capability=(8, 0)))
        assert any("FlashInfer 0.6.13, planned" in said for said in opened.said)
        made = len(library.wrappers)
        plans = sum(len(wrapper.plans) for wrapper in library.wrappers)
        opened.step([], (1, 0, 0, 5, 1))
        opened.step([1])
        for _ in range(LANES):
            opened.step([1, 2, 3, 4, 5])
        opened.step([1, 2], (3, 0, 0, 1, 1))  # one token a row, and nobody has planned for it
        told = [plan["lengths"] for wrapper in library.wrappers for plan in wrapper.plans]
        assert len(told) - plans == 1 + LANES, "and none for passes with chunks"
        assert [6] in told and [7, 1, 1, 1, 1, 1] in told and [9, 3, 3, 3, 3, 1] in told
        assert len(library.wrappers) == made, "nothing is allocated while serving"
        opened.device.close()


def test_attention_with_lengths_on_the_device_is_told_nothing(config: ServerConfig, library: Any) -> None:
    with active(90):
        opened = Opened(config, FakeCuda())
        assert any("device lengths" in said for said in opened.said) and opened.program.plans is None
        assert library.decodes and not library.wrappers
        opened.device.close()


def test_with_drafts_lengths_are_nowhere_but_on_the_device(config: ServerConfig, library: Any) -> None:
    drafting = replace(config, speculate="ngram", window=3)
    with active(80):
        opened = Opened(drafting, FakeCuda(capability=(8, 0)))
        assert any("lengths do not reach the CPU" in said for said in opened.said) and not library.wrappers
        opened.step([], (1, 0, 0, 5, 1))
        before = compiled()
        opened.step([1])
        opened.step([1, 2], (3, 0, 0, 8, 0))
        assert compiled() == before
        opened.device.close()


def test_there_are_as_many_plans_as_lanes() -> None:
    assert fi.PLANS == LANES
    assert torch.zeros(1).device.type == "cpu"
