"""The backend: what --check-order switches on, and that it looks on in earnest."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu import cuda_backend
from gpu.backend import Checks, open_backend
from gpu.descriptor_audit import DescriptorAudit
from gpu.device.guard import LaunchGuard
from gpu.device.order import OrderChecker
from gpu.device.protocol import DeviceError
from gpu.kernels.flashinfer_attention import Choice
from gpu.kernels.native import KernelCache
from gpu.models.llama import HostLlama
from gpu.models.weights import open_weights
from gpu.warm_up import WarmUp
from procs.model_info import read_model_info
from shm.config import ServerConfig
from shm.records import STEP_DECODE, StepLayout
from tests.gpu.models.small_drafters import trained
from tests.model_factory import TinyLlama


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    folder = tmp_path_factory.mktemp("model")
    TinyLlama().write_hf(folder)
    return ServerConfig(
        model=read_model_info(folder), served_model_name="tiny", host="127.0.0.1", port=0, dtype="float32",
        max_running=2, max_queued=1, kv_tokens=128, max_len=32, prefill_chunk=8, threads=1,
    )  # fmt: skip


def plane(config: ServerConfig) -> Any:
    return np.zeros((config.rows, config.max_len), np.int32)


def test_check_order_switches_on_all_three_checks(config: ServerConfig) -> None:
    backend = open_backend(replace(config, check_order=True), plane(config), None)
    try:
        device: Any = backend.device
        assert isinstance(device.observer, OrderChecker) and device.observer is backend.checks.observer
        assert isinstance(backend.checks.guard, LaunchGuard) and isinstance(backend.checks.audit, DescriptorAudit)
        with backend.checks.launch_loop(), pytest.raises(DeviceError, match="would wait"):
            device.synchronize()
        view = StepLayout(config).view(np.zeros(StepLayout(config).nbytes // 4, np.int32))
        view.kind, view.n_decode = STEP_DECODE, 1
        view.decode_entries[0] = 1  # decodes before it has a prompt
        with pytest.raises(DeviceError):
            backend.checks.descriptor(view)
    finally:
        backend.device.close()


@pytest.mark.unordered
def test_without_it_nothing_looks_on(config: ServerConfig) -> None:
    backend = open_backend(config, plane(config), None)
    try:
        device: Any = backend.device
        assert backend.checks == Checks() and device.observer is None
        with backend.checks.launch_loop():
            device.synchronize()
    finally:
        backend.device.close()


@pytest.mark.parametrize("speculate", ["off", "standalone", "mtp", "dflash"])
def test_a_rehearsal_leaves_the_caches_alone_and_no_kernel_for_later(
    config: ServerConfig, speculate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {} if speculate == "off" else {"speculate": speculate, "window": 3}
    if speculate == "standalone":
        changes["drafter"] = config.model
    if speculate in ("mtp", "dflash"):
        changes["drafter_file"] = str(trained(Path(config.model.path), speculate, (0, 1)).file)
    config = replace(config, **changes)
    caches: list[Any] = []
    allocate = HostLlama._allocate

    def watched(model: HostLlama, *given: Any) -> None:
        allocate(model, *given)
        caches.extend((model.k_cache, model.v_cache))

    monkeypatch.setattr(HostLlama, "_allocate", watched)
    backend = open_backend(config, plane(config), None)
    try:
        with backend.rehearsal():
            WarmUp(backend.device, config, backend.program).run()
        assert len(caches) == (2 if speculate == "off" else 4)
        assert not any(cache.any() for cache in caches)
        called: list[str] = []
        load = KernelCache.attempt
        monkeypatch.setattr(KernelCache, "attempt", lambda *given: (called.append("load"), load(*given))[1])
        WarmUp(backend.device, config, backend.program).run_steps()
        assert not called, "nothing is compiled or loaded when the first step comes"
        assert all(cache.any() for cache in caches), "and without a rehearsal they are written"
    finally:
        backend.device.close()


def test_a_gpu_is_opened_only_by_whoever_owns_it(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def opened(*_given: Any) -> tuple[Any, Any]:
        done.append("open")
        return None, None

    monkeypatch.setattr(cuda_backend, "open_cuda", opened)
    backend = open_backend(replace(config, device="cuda"), plane(config), None, own=lambda: done.append("own"))
    assert done == ["own", "open"]
    with pytest.raises(AssertionError):
        backend.rehearsal()


def test_on_cuda_flashinfer_is_asked_and_its_answer_taken(
    config: ServerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    other: Any = object()

    def choose(own: Any, shape: Any, capability: Any, *, host_lengths: bool) -> Choice:
        asked.append((shape, capability, host_lengths))
        return Choice(other, "because")

    monkeypatch.setattr(cuda_backend, "choose", choose)
    said: list[str] = []
    weights = open_weights(config.model)
    parts = cuda_backend.make_parts(config, weights, said.append, "cpu", (9, 0))
    assert parts.model.attention is other and "attention: because" in said
    shape, capability, host_lengths = asked[0]
    assert (shape.heads, shape.dtype, capability) == (config.model.num_heads, torch.float32, (9, 0))
    assert host_lengths, "they follow from descriptors"
    plain = cuda_backend.make_parts(config, weights, None, "cpu")
    assert plain.model.attention is not other and len(asked) == 1
