"""The step as a server on CUDA runs it, on torch memory: its own model, sampler and drafter, traced byte by byte.

What is declared for "model" and "sample" is compared with what production code touches, not with a stand-in.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.cuda_backend import make_drafter, make_parts
from gpu.device.policies import Eager
from gpu.device.protocol import DeviceError
from gpu.lanes import ResultSlot, StepSlot
from gpu.models.weights import open_weights
from gpu.step import StepProgram
from procs.model_info import read_model_info
from shm.config import ServerConfig
from shm.records import STEP_DECODE, STEP_MIXED, ResultLayout, StepLayout
from tests.gpu.models.small_drafters import trained
from tests.interpret.test_whole_step import TracedDevice
from tests.model_factory import TinyLlama

PROMPT = [5, 9, 17, 5, 9]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    folder = tmp_path_factory.mktemp("model")
    TinyLlama(layers=1).write_hf(folder)
    return ServerConfig(
        model=read_model_info(folder), served_model_name="tiny", host="127.0.0.1", port=0, device="cuda",
        dtype="float32", max_running=2, max_queued=1, kv_tokens=64, max_len=24, prefill_chunk=8, threads=1, poison=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def files(config: ServerConfig) -> dict[str, str]:
    """Trained drafters by kind, which have learnt nothing."""
    return {kind: str(trained(Path(config.model.path), kind, (0,), layers=1).file) for kind in ("mtp", "dflash")}


def drafting(config: ServerConfig, speculate: str, files: dict[str, str]) -> ServerConfig:
    if speculate == "off":
        return config
    drafter = config.model if speculate == "standalone" else None
    shared, file = speculate == "ngram", files.get(speculate)
    return replace(config, window=3, speculate=speculate, drafter=drafter, drafter_file=file, ngram_shared=shared)


def tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    """All tensors that a model or its parts hold."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors_of(part)
    elif is_dataclass(thing):
        yield from tensors_of([getattr(thing, field.name) for field in fields(thing)])


class Served:
    """A program of production parts on a device that traces each operation."""

    def __init__(self, config: ServerConfig, device: TracedDevice) -> None:
        self.config, self.device = config, device
        parts = make_parts(config, open_weights(config.model), None, "cpu")
        for tensor in tensors_of([*vars(parts.model).values(), *parts.sampler.keywords.values()]):  # type: ignore[attr-defined]
            device._guard_inside.watch(tensor)
        drafter = make_drafter(config, device, "cpu", None, parts.model)
        for part in (getattr(drafter, "_kernels", None), getattr(drafter, "_model", None)):
            for tensor in tensors_of(list(vars(part).values()) if part is not None else []):
                device._guard_inside.watch(tensor)
        self.plane = np.zeros((config.rows, config.max_len), np.int32)
        self.plane[0, : len(PROMPT)] = PROMPT
        self.program = StepProgram(
            device, config, parts.model, parts.kernels, parts.sampler, self.plane, drafter=drafter
        )
        self.text: list[int] = []

    def step(self, **header: Any) -> None:
        config, layout, results = self.config, StepLayout(self.config), ResultLayout(self.config)
        slot = StepSlot.on(self.device, layout, np.zeros(layout.nbytes // 4, np.int32), "step")
        kept = ResultSlot.on(self.device, results, np.zeros(results.nbytes // 4, np.int32), "result")
        view = slot.view
        view.kind, view.drafts = STEP_DECODE, config.drafts
        if header.get("prompt"):
            view.kind, view.n_chunks, view.n_slot_writes, view.n_sampling = STEP_MIXED, 1, 2, 1
            view.chunks[:5, 0] = 1, 0, 0, len(PROMPT), 1
            view.slot_writes[:, 0], view.slot_writes[:, 1] = (1, 0, 1), (1, 1, 2)
            view.set_sampling(0, 1, header["temperature"], 0.9, 0.05, 20, 3)
        else:
            view.n_decode, view.decode_entries[0] = 1, header.get("entry", 1)
        self.program.enqueue(slot, kept, lambda: self._complete(kept))
        self.device.synchronize()

    def _complete(self, kept: ResultSlot) -> None:
        view = kept.view
        self.text += view.tokens[: view.counts[0], 0].tolist()


def run(config: ServerConfig, device: TracedDevice, steps: int = 2, temperature: float = 0.8) -> list[int]:
    """A prompt and decode steps, sampled with every filter. Returns the output."""
    served = Served(config, device)
    served.program.capture()
    served.step(prompt=True, temperature=temperature)
    for _ in range(steps):
        served.step()
    return served.text


@pytest.fixture(scope="module")
def plain(config: ServerConfig) -> list[int]:
    """The output without drafts."""
    return run(config, TracedDevice(Eager()))


OWN = {
    "off": set(),
    "ngram": {"look up", "note prompts", "note gains"},
    "standalone": {"draft", "draft prefill"},
    "mtp": {"draft", "note tails", "draft extend"},
    "dflash": {"draft", "draft extend"},
}


@pytest.mark.parametrize("speculate", OWN)
def test_production_code_touches_what_is_declared_for_it(
    config: ServerConfig, files: dict[str, str], plain: list[int], speculate: str
) -> None:
    device = TracedDevice(Eager())
    text = run(drafting(config, speculate, files), device)
    assert {"model", "sample", "accept"} <= device.traced.keys()
    assert any("attention" in name for name in device.traced["model"])
    assert OWN[speculate] <= device.traced.keys()
    if speculate in files:
        operators = {name for own in OWN[speculate] for name in device.traced[own] if not name.endswith("_kernel")}
        assert operators <= {"mm", "copy_", "fill_", "add", "add_", "clamp_", "arange"}, "what allocates nothing"
    assert text[:3] == plain[:3], "drafts change nothing"


def test_the_target_as_its_own_draft_model_gains_whole_windows(config: ServerConfig) -> None:
    drafting = replace(config, window=3, speculate="standalone", drafter=config.model)
    assert len(run(drafting, TracedDevice(Eager()), temperature=0.0)) == 1 + 2 * 3


@pytest.mark.parametrize(
    ("speculate", "name", "kind", "buffer"),
    [
        ("ngram", "model", "writes", "k_cache"),
        ("ngram", "model", "reads", "batch.pages"),
        ("ngram", "sample", "writes", "batch.targets"),
        ("ngram", "sample", "reads", "batch.top_k"),
        ("ngram", "look up", "reads", "ngram.history"),
        ("ngram", "note gains", "writes", "ngram.known"),
        ("mtp", "model", "writes", "target.states"),
        ("mtp", "note tails", "writes", "mtp.tails"),
        ("mtp", "draft extend", "reads", "target.states"),
        ("mtp", "draft extend", "reads", "batch.targets"),
        ("mtp", "draft", "writes", "batch.tokens"),
        ("dflash", "draft", "reads", "batch.ends"),
        ("dflash", "draft extend", "reads", "target.states"),
        ("dflash", "draft extend", "writes", "dflash.v_cache"),
    ],
)
def test_what_it_touches_beyond_that_is_seen(
    config: ServerConfig, files: dict[str, str], speculate: str, name: str, kind: str, buffer: str
) -> None:
    class Forgetful(TracedDevice):
        def launch(self, stream: Any, fn: Callable[[], None], **declared: Any) -> None:
            if declared["name"] == name:
                for one in ("reads", "writes") if kind == "reads" else ("writes",):  # a write covers a read
                    declared[one] = [r for r in declared[one] if r.buffer.name != buffer]
            super().launch(stream, fn, **declared)

    with pytest.raises((DeviceError, AssertionError), match=rf"{name} .*{kind} {buffer}\["):
        run(drafting(config, speculate, files), Forgetful(Eager()), steps=1)


def test_a_fault_that_a_kernel_leaves_is_declared_and_told(config: ServerConfig) -> None:
    """An entry that nobody has filled: the gather writes its code, the result carries it."""
    served = Served(config, TracedDevice(Eager()))
    served.program.capture()
    with pytest.raises(DeviceError, match="entry 2"):
        served.step(entry=2)
