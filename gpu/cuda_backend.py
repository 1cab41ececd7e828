"""The CUDA backend: the CUDA device, the model on it, its kernels and its sampler, put together.

Owns what only CUDA needs: scratch memory, and the choice of an attention. `make_parts` runs on CPU tensors as well,
where Triton interprets its kernels, so that all of it can be tested without a GPU.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu.device.cuda import CudaDevice
from gpu.device.cuda_api import CudaApi
from gpu.device.guard import LaunchGuard
from gpu.device.protocol import Device, Observer
from gpu.drafters.dflash import DflashDrafter
from gpu.drafters.drafter import Drafter
from gpu.drafters.mtp import MtpDrafter
from gpu.drafters.ngram import NgramDrafter
from gpu.drafters.standalone import StandaloneDrafter
from gpu.kernels.cuda_columns import TorchColumns
from gpu.kernels.cuda_sampling_work import CHUNK, scratch_words
from gpu.kernels.flashinfer_attention import Shape, choose
from gpu.kernels.step_kernels import Array
from gpu.kernels.triton_ngram import TritonNgramKernels
from gpu.kernels.triton_sampling import sample
from gpu.kernels.triton_step import TritonStepKernels
from gpu.kernels.triton_trained import TritonTrainedKernels
from gpu.models.cuda_drafters import CudaDflash, CudaMtp
from gpu.models.cuda_llama import CudaLlama, Weights
from gpu.models.weights import open_weights
from gpu.step import Sampler, StepProgram
from shm.config import ModelInfo, ServerConfig
from shm.drafter_file import DFLASH, DrafterFile
from shm.records import ResultLayout


class Parts(NamedTuple):
    """What a step program needs beside its device."""

    model: CudaLlama
    kernels: TritonStepKernels
    sampler: Sampler


def make_parts(
    config: ServerConfig,
    weights: Weights,
    progress: Any,
    device: str,
    capability: tuple[int, int] | None = None,
) -> Parts:
    """Load the model and allocate all that a step works in. device: torch's name of it.

    capability: of the GPU, so that FlashInfer can be taken where it is installed and fits; None for our own attention.
    Raises ValueError for a model that the kernels do not support, MemoryError if the device is too small.
    """
    samples = ResultLayout(config).max_rows * config.window
    taps = DrafterFile(Path(config.drafter_file)).taps if config.drafter_file else ()
    model = load_model(config, config.model, weights, progress, device, taps)
    if capability is not None:
        info, kind = config.model, model.k_cache.dtype
        heads = (info.num_heads, info.num_kv_heads, info.head_dim)
        shape = Shape(*heads, config.page_size, config.pages_per_row, kind, model.k_cache.device)
        # See PassPlans: with drafts nobody but the device knows how long a row is.
        choice = choose(model.attention, shape, capability, host_lengths=config.window == 1)
        model.attention = choice.attention
        if progress is not None:
            progress(f"attention: {choice.reason}")
    words = scratch_words(samples, config.model.vocab_size, CHUNK)
    scratch = torch.zeros(words, dtype=torch.int64, device=device)
    sampler: Any = partial(sample, scratch=scratch)
    return Parts(model, TritonStepKernels.of(config), sampler)


def load_model(
    config: ServerConfig, info: ModelInfo, weights: Weights, progress: Any, device: str, taps: tuple[int, ...] = ()
) -> CudaLlama:
    """A model with the pages of the server's cache, for passes as large as the server's."""
    return CudaLlama(
        info,
        weights,
        dtype=config.dtype,
        page_size=config.page_size,
        pages=config.pages,
        pages_per_row=config.pages_per_row,
        max_tokens=config.pass_tokens,
        max_seqs=ResultLayout(config).max_rows * config.window,
        device=device,
        progress=progress,
        taps=taps,
    )


def make_drafter(config: ServerConfig, device: Device, place: str, progress: Any, target: CudaLlama) -> Drafter | None:
    """What drafts for `target`, if anything does. place: torch's name of the device."""
    if config.speculate == "ngram":
        return NgramDrafter(device, config, TritonNgramKernels.of(config, place), shared=config.ngram_shared)
    if config.drafter_file is not None:
        return _trained_drafter(config, device, progress, target)
    if config.drafter is None:
        return None
    model = load_model(config, config.drafter, open_weights(config.drafter), progress, place)
    model.warm()
    return StandaloneDrafter(device, config, model, TorchColumns())


def _trained_drafter(config: ServerConfig, device: Device, progress: Any, target: CudaLlama) -> Drafter:
    assert config.drafter_file is not None
    file, kernels = DrafterFile(Path(config.drafter_file)), TritonTrainedKernels()
    if file.kind == DFLASH:
        dflash = CudaDflash(target, file, progress)
        dflash.warm()
        return DflashDrafter(device, config, dflash, target.tapped, kernels)
    mtp = CudaMtp(target, file, progress)
    mtp.warm()
    return MtpDrafter(device, config, mtp, target.tapped, kernels)


def open_cuda(
    config: ServerConfig,
    weights: Weights,
    ledger_tokens: Array,
    progress: Any,
    observer: Observer | None,
    guard: LaunchGuard | None,
    api: CudaApi | None = None,
) -> tuple[Device, StepProgram]:
    """Open the GPU and make the program. api: see `CudaDevice`. Raises DeviceError if there is no GPU; see also
    `make_parts`.
    """
    device = CudaDevice(observer, guard=guard, api=api)  # first: without a GPU this is the clearest error
    parts = make_parts(config, weights, progress, str(device.api.place), device.api.capability)
    if progress is not None:
        progress("compiling kernels")
    parts.model.warm()
    attention = parts.model.attention
    plan = attention.plan if attention.needs_host_lengths else None
    drafter = make_drafter(config, device, str(device.api.place), progress, parts.model)
    program = StepProgram(
        *(device, config, parts.model, parts.kernels, parts.sampler, ledger_tokens), drafter=drafter, plan=plan
    )
    return device, program
