"""The backend: the device that was configured, the model on it, and its step program, put together.

Owns the choice between the devices, and what `--check-order` switches on with either: the order checker, the guard
against blocking calls, the audit of descriptors. What belongs to one device is imported only when that device is
wanted. It launches nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu.descriptor_audit import DescriptorAudit
from gpu.device.guard import LaunchGuard
from gpu.device.order import OrderChecker
from gpu.device.protocol import Device, Observer
from gpu.kernels.step_kernels import Array
from gpu.models.weights import LateWeights, open_weights
from gpu.step import StepProgram
from shm.clocked_file import ClockedFile
from shm.config import ModelInfo, ServerConfig
from shm.drafter_file import DFLASH, DrafterFile
from shm.records import ResultLayout, StepView

Progress = Any  # Callable[[str], None] | None


@dataclass(frozen=True)
class Checks:
    """What looks on while the program runs; nothing unless it was asked for."""

    observer: Observer | None = None
    guard: LaunchGuard | None = None
    audit: DescriptorAudit | None = None

    def descriptor(self, step: StepView) -> None:
        """Look at a descriptor before it is queued. Raises DeviceError."""
        if self.audit is not None:
            self.audit.check(step)

    def launch_loop(self) -> AbstractContextManager[None]:
        """Inside of it, whatever would wait for the device raises DeviceError."""
        return nullcontext() if self.guard is None else self.guard.section()


@dataclass(frozen=True)
class Backend:
    """What the gpu process works with."""

    device: Device
    program: StepProgram
    checks: Checks


def open_backend(
    config: ServerConfig, ledger_tokens: Array, progress: Progress, shared: tuple[int, int] | None = None
) -> Backend:
    """Open the device and the weights, and make the program. ledger_tokens: plane i32[rows, max_len] of the ledger.
    shared: descriptor and size of the server's memory for packed weights, see `shm.weights_memory`.

    Raises DeviceError if there is no such device, ModelError, OSError or ValueError for a model that cannot be served,
    MemoryError if it does not fit.
    """
    if config.device == "cuda":
        from gpu.cuda_backend import open_cuda
        from gpu.device.guard_torch import TorchGuard

        checks = _checks(config, partial(TorchGuard, cuda=True))
        weights = open_weights(config.model)
        device, program = open_cuda(config, weights, ledger_tokens, progress, checks.observer, checks.guard)
    elif config.model.format == "clocked":
        checks = _checks(config, LaunchGuard)
        device, program = _open_clocked(config, ledger_tokens, checks)
    else:
        checks = _checks(config, LaunchGuard)
        device, program = _open_host(config, ledger_tokens, progress, checks, shared)
    return Backend(device, program, checks)


def _checks(config: ServerConfig, guard: Callable[[], LaunchGuard]) -> Checks:
    return Checks(OrderChecker(), guard(), DescriptorAudit(config)) if config.check_order else Checks()


def _open_host(
    config: ServerConfig,
    ledger_tokens: Array,
    progress: Progress,
    checks: Checks,
    shared: tuple[int, int] | None,
) -> tuple[Device, StepProgram]:
    from gpu.device.host import HostDevice
    from gpu.drafters.dflash import DflashDrafter
    from gpu.drafters.drafter import Drafter
    from gpu.drafters.mtp import MtpDrafter
    from gpu.drafters.ngram import NgramDrafter
    from gpu.drafters.standalone import StandaloneDrafter
    from gpu.kernels.columns import HostColumns
    from gpu.kernels.host_step import HostStepKernels
    from gpu.kernels.ngram import HostNgramKernels
    from gpu.kernels.sampling import sample
    from gpu.kernels.team import Team
    from gpu.kernels.trained import HostTrainedKernels
    from gpu.models.host_drafters import HostDflash, HostMtp
    from gpu.models.llama import HostLlama
    from gpu.models.packed_weights import open_packed

    trained = None if config.drafter_file is None else DrafterFile(Path(config.drafter_file))
    weights, packed = LateWeights(config.model), open_packed(config, trained, shared)

    def load(info: ModelInfo, team: Team | None, taps: tuple[int, ...] = ()) -> HostLlama:
        return HostLlama(
            info,
            weights if info is config.model else LateWeights(info),
            dtype=config.dtype,
            page_size=config.page_size,
            pages=config.pages,
            pages_per_row=config.pages_per_row,
            max_tokens=config.pass_tokens,
            max_seqs=ResultLayout(config).max_rows * config.window,
            threads=config.threads,
            progress=progress,
            team=team,
            taps=taps,
            packed=packed,
        )

    model = load(config.model, None, trained.taps if trained else ())
    device = HostDevice(checks.observer, checks.guard)
    sampler: Any = partial(sample, team=model.team)
    drafter: Drafter | None = None
    if config.speculate == "ngram":
        drafter = NgramDrafter(device, config, HostNgramKernels(), shared=config.ngram_shared)
    elif trained is not None and trained.kind == DFLASH:
        block_model = HostDflash(model, weights, trained, packed)
        drafter = DflashDrafter(device, config, block_model, model.tapped, HostTrainedKernels())
    elif trained is not None:
        next_model = HostMtp(model, weights, trained, packed)
        drafter = MtpDrafter(device, config, next_model, model.tapped, HostTrainedKernels())
    elif config.drafter is not None:
        draft_model = load(config.drafter, model.team)
        drafter = StandaloneDrafter(device, config, draft_model, HostColumns())
    packed.complete()
    kernels = HostStepKernels.of(config)
    return device, StepProgram(device, config, model, kernels, sampler, ledger_tokens, drafter=drafter)


def _open_clocked(config: ServerConfig, ledger_tokens: Array, checks: Checks) -> tuple[Device, StepProgram]:
    from gpu.device.host import HostDevice
    from gpu.drafters.clocked import ClockedDrafter
    from gpu.drafters.drafter import Drafter
    from gpu.drafters.ngram import NgramDrafter
    from gpu.kernels.host_step import HostStepKernels
    from gpu.kernels.ngram import HostNgramKernels
    from gpu.models.clocked import ClockedModel, clocked_sample

    model = ClockedModel(config, ClockedFile.read(Path(config.model.path)))
    device = HostDevice(checks.observer, checks.guard)
    drafter: Drafter | None = None
    if config.speculate == "ngram":
        drafter = NgramDrafter(device, config, HostNgramKernels(), shared=config.ngram_shared)
    elif config.speculate == "clocked":
        drafter = ClockedDrafter(device, config, model)
    kernels = HostStepKernels.of(config)
    return device, StepProgram(device, config, model, kernels, clocked_sample, ledger_tokens, drafter=drafter)
