"""The backend: the device that was configured, the model on it, and its step program, put together.

Owns the choice between the devices, and what `--check-order` switches on with either: the order checker, the guard
against blocking calls, the audit of descriptors. What belongs to one device is imported only when that device is
wanted. It launches nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.descriptor_audit import DescriptorAudit
from gpu.device.guard import LaunchGuard
from gpu.device.order import OrderChecker
from gpu.device.protocol import Device, Observer
from gpu.drafters.drafter import Drafter
from gpu.kernels.step_kernels import Array
from gpu.models.weights import LateWeights, open_weights
from gpu.step import StepProgram
from shm.clocked_file import ClockedFile
from shm.config import ModelInfo, ServerConfig
from shm.drafter_file import DFLASH, DrafterFile
from shm.records import ResultLayout, StepView

if TYPE_CHECKING:
    from gpu.models.caches import Caches

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


def _no_rehearsal() -> AbstractContextManager[None]:
    raise AssertionError("whoever has opened a GPU is no standby any more")


@dataclass(frozen=True)
class Backend:
    """What the gpu process works with."""

    device: Device
    program: StepProgram
    checks: Checks
    caches: Caches | None = None  # None: they end with the process
    rehearsal: Callable[[], AbstractContextManager[None]] = _no_rehearsal  # inside, passes of models touch no memory

    def settle(self, is_kept: bool) -> None:
        """Serve from here on. is_kept: the KV caches hold what another process has left. Raises LayoutError."""
        if self.caches is not None:
            self.caches.settle(is_kept)
        if is_kept and self.checks.audit is not None:
            self.checks.audit.inherit()

    def tend(self) -> None:
        """For a thread of its own: look after the memory of the KV caches. May return at any time."""
        if self.caches is not None:
            self.caches.tend()


def open_backend(
    config: ServerConfig,
    ledger_tokens: Array,
    progress: Progress,
    shared: tuple[int, int] | None = None,
    shared_kv: tuple[int, int] | None = None,
    own: Callable[[], None] = lambda: None,
) -> Backend:
    """Open the device and the weights, and make the program. ledger_tokens: plane i32[rows, max_len] of the ledger.
    shared: descriptor and size of the server's memory for packed weights, see `shm.weights_memory`; shared_kv: the
    same for KV caches, see `shm.kv_memory`. own: called before anything that only one gpu process at a time may do:
    packing into the memory for weights, opening a GPU.

    Raises DeviceError if there is no such device, ModelError, OSError or ValueError for a model that cannot be served,
    MemoryError if it does not fit.
    """
    if config.device == "cuda":
        from gpu.cuda_backend import open_cuda
        from gpu.device.guard_torch import TorchGuard

        own()
        checks = _checks(config, partial(TorchGuard, cuda=True))
        weights = open_weights(config.model)
        device, program = open_cuda(config, weights, ledger_tokens, progress, checks.observer, checks.guard)
        return Backend(device, program, checks)
    checks = _checks(config, LaunchGuard)
    if config.model.format == "clocked":
        return _open_clocked(config, ledger_tokens, checks, shared_kv)
    return _open_host(config, ledger_tokens, progress, checks, shared, shared_kv, own)


def _checks(config: ServerConfig, guard: Callable[[], LaunchGuard]) -> Checks:
    return Checks(OrderChecker(), guard(), DescriptorAudit(config)) if config.check_order else Checks()


def _open_host(
    config: ServerConfig,
    ledger_tokens: Array,
    progress: Progress,
    checks: Checks,
    shared: tuple[int, int] | None,
    shared_kv: tuple[int, int] | None,
    own: Callable[[], None],
) -> Backend:
    from gpu.device.host import HostDevice
    from gpu.kernels.host_step import HostStepKernels
    from gpu.kernels.sampling import sample
    from gpu.kernels.team import Team
    from gpu.models.caches import open_caches
    from gpu.models.llama import HostLlama
    from gpu.models.packed_weights import open_packed

    trained = None if config.drafter_file is None else DrafterFile(Path(config.drafter_file))
    caches = open_caches(config, trained, shared_kv)
    weights, packed = LateWeights(config.model), open_packed(config, trained, shared, own)

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
            caches=caches,
        )

    model = load(config.model, None, trained.taps if trained else ())
    device = HostDevice(checks.observer, checks.guard)
    sampler: Any = partial(sample, team=model.team)
    if trained is not None:
        drafter: Drafter | None = _trained_drafter(device, config, model, trained, (weights, packed, caches))
    else:
        drafter = _untrained_drafter(device, config, lambda info: load(info, model.team))
    packed.complete()
    kernels = HostStepKernels.of(config)
    program = StepProgram(device, config, model, kernels, sampler, ledger_tokens, drafter=drafter)
    return Backend(device, program, checks, caches, model.team.rest)


def _open_clocked(
    config: ServerConfig, ledger_tokens: Array, checks: Checks, shared_kv: tuple[int, int] | None
) -> Backend:
    from gpu.device.host import HostDevice
    from gpu.drafters.clocked import ClockedDrafter
    from gpu.drafters.ngram import NgramDrafter
    from gpu.kernels.host_step import HostStepKernels
    from gpu.kernels.ngram import HostNgramKernels
    from gpu.models.caches import open_caches
    from gpu.models.clocked import ClockedModel, clocked_sample

    caches = open_caches(config, None, shared_kv)
    model = ClockedModel(config, ClockedFile.read(Path(config.model.path)), caches)
    device = HostDevice(checks.observer, checks.guard)
    drafter: Drafter | None = None
    if config.speculate == "ngram":
        drafter = NgramDrafter(device, config, HostNgramKernels(), shared=config.ngram_shared)
    elif config.speculate == "clocked":
        drafter = ClockedDrafter(device, config, model)
    kernels = HostStepKernels.of(config)
    program = StepProgram(device, config, model, kernels, clocked_sample, ledger_tokens, drafter=drafter)
    return Backend(device, program, checks, caches, nullcontext)  # its passes touch the page of padding alone


def _trained_drafter(device: Device, config: ServerConfig, model: Any, file: DrafterFile, memory: Any) -> Drafter:
    """memory: the target's weights, and where packed weights and caches go."""
    from gpu.drafters.dflash import DflashDrafter
    from gpu.drafters.mtp import MtpDrafter
    from gpu.kernels.trained import HostTrainedKernels
    from gpu.models.host_drafters import HostDflash, HostMtp

    weights, packed, caches = memory
    if file.kind == DFLASH:
        block_model = HostDflash(model, weights, file, packed, caches)
        return DflashDrafter(device, config, block_model, model.tapped, HostTrainedKernels())
    next_model = HostMtp(model, weights, file, packed, caches)
    return MtpDrafter(device, config, next_model, model.tapped, HostTrainedKernels())


def _untrained_drafter(device: Device, config: ServerConfig, load: Callable[[ModelInfo], Any]) -> Drafter | None:
    """load: opens a model beside the target."""
    from gpu.drafters.ngram import NgramDrafter
    from gpu.drafters.standalone import StandaloneDrafter
    from gpu.kernels.columns import HostColumns
    from gpu.kernels.ngram import HostNgramKernels

    if config.speculate == "ngram":
        return NgramDrafter(device, config, HostNgramKernels(), shared=config.ngram_shared)
    if config.drafter is not None:
        return StandaloneDrafter(device, config, load(config.drafter), HostColumns())
    return None
