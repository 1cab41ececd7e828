"""A driver for Triton without a GPU: the real launch path runs, compiled code is loaded and checked, never executed.

Between a call of a kernel and the GPU, Triton binds arguments, specialises and compiles, loads, and hands a list of
arguments to a launcher. All of it is Triton's own here but the last two: loading reads what the code takes, and the
launcher checks what CUDA, or the compiled code, would trust: claims of alignment, types, ranges, the grid.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver

from gpu.kernels.triton_compile import REGISTERS, SHARED_BYTES, THREADS, WARP, read_cubin
from gpu.kernels.triton_spec import KernelSpec, kernel_modules, kernels_of

GRID_LIMITS = (2**31 - 1, 65535, 65535)
INTEGERS = {"i1": (0, 1), "i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1), "u64": (0, 2**64 - 1)}
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


class LaunchError(Exception):
    """A launch that a GPU would refuse, or run on what it was not compiled for."""


@dataclass(frozen=True)
class Launch:
    """One launch as it reached the driver."""

    kernel: Any  # triton.JITFunction
    grid: tuple[int, int, int]
    stream: int
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: frozenset[str]
    warps: int
    stages: int

    def is_variant_of(self, spec: KernelSpec, varied: frozenset[str] = frozenset()) -> bool:
        """Whether this very variant is what `spec` compiles, but for what is `varied`: constants, arguments, options.

        A spec that claims less alignment is another variant.
        """
        types = {name: kind for name, kind in self.signature.items() if kind != "constexpr"}
        launched = {**types, **self.constants, "num_warps": self.warps, "num_stages": self.stages}
        specified = {"num_warps": 4, "num_stages": 3, **spec.signature, **spec.constants, **spec.options}
        return (
            self.kernel is spec.kernel
            and self.aligned == set(spec.aligned)
            and all(launched.get(name) == specified.get(name) for name in {*launched, *specified} - varied)
        )


class _Utils:
    """What Triton asks of a device when it loads code."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self._capability], "max_num_regs": REGISTERS, "warpSize": WARP}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
        """Module, function, registers, spilled bytes, and threads that a block may have with so many registers."""
        registers, stack, local, spills = read_cubin(cubin)
        if stack or local or spills:
            raise LaunchError(f"{name} spills: stack {stack} B, local {local} B, {spills} instructions")
        return object(), object(), registers, stack, min(THREADS, REGISTERS // registers // WARP * WARP)


class FakeDriver(GPUDriver):
    """The active driver of Triton while `active` runs."""

    def __init__(self, capability: int) -> None:
        # Not GPUDriver's: it asks torch.cuda for the device and the stream.
        self.capability = capability
        self.stream = 0
        self.launches: list[Launch] = []
        self.utils = _Utils(capability)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """What launches one compiled kernel."""

        def launch(x: int, y: int, z: int, stream: int, function: object, *rest: Any) -> None:
            _, _, _, _, *arguments = rest  # packed metadata, launch metadata, two hooks
            checked = _checked(source, metadata, (x, y, z), stream, arguments)
            if x * y * z:
                self.launches.append(checked)

        return launch

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        raise AssertionError("a launch has no reason to change the device")

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return divmod(self.capability, 10)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, WARP)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise AssertionError("only Triton's own launcher asks for this")

    def get_benchmarker(self) -> Any:
        raise AssertionError("nothing may be tuned at run time")


@contextlib.contextmanager
def active(capability: int, *kernels: Any) -> Iterator[FakeDriver]:
    """All kernels of this project, and `kernels`, are launched on a fake GPU of `capability`."""
    every = [*kernels, *(kernel for module in kernel_modules().values() for kernel in kernels_of(module).values())]
    driver = FakeDriver(capability)
    for kernel in every:
        kernel.device_caches.clear()
    previous = triton.runtime.driver._active  # what is public, resetting it, fails where there is no GPU
    triton.runtime.driver.set_active(driver)
    try:
        yield driver
    finally:
        triton.runtime.driver._active = previous
        for kernel in every:
            kernel.device_caches.clear()


def _checked(source: Any, metadata: Any, grid: tuple[int, int, int], stream: int, arguments: list[Any]) -> Launch:
    """The launch, if a GPU would take it."""
    names = source.fn.arg_names
    if len(arguments) != len(names):
        raise LaunchError(f"{source.fn.__name__}: {len(arguments)} arguments for {len(names)} parameters")
    for size, limit in zip(grid, GRID_LIMITS, strict=True):
        if type(size) is not int or not 0 <= size <= limit:  # Triton's own launcher leaves out a grid without programs
            raise LaunchError(f"{source.fn.__name__}: grid {grid} is outside of {GRID_LIMITS}")
    aligned = {
        names[path[0]] for path, attribute in source.attrs.items() if ["tt.divisibility", 16] in map(list, attribute)
    }
    for name, value in zip(names, arguments, strict=True):
        kind = source.signature[name]
        if kind != "constexpr":
            _check(f"{source.fn.__name__}: {name}", kind, value, name in aligned)
    constants = {names[path[0]]: value for path, value in source.constants.items()}
    return Launch(
        source.fn,
        grid,
        stream,
        dict(source.signature),
        constants,
        frozenset(aligned),
        metadata.num_warps,
        metadata.num_stages,
    )


def _check(what: str, kind: str, value: Any, aligned: bool) -> None:
    """One argument against the type that the code was compiled for."""
    if kind.startswith("*"):
        if not isinstance(value, torch.Tensor) or POINTERS.get(value.dtype) != kind:
            raise LaunchError(f"{what} is compiled as {kind}, and is {getattr(value, 'dtype', value)}")
        place = value.data_ptr()
    elif kind in INTEGERS:
        low, high = INTEGERS[kind]
        if isinstance(value, torch.Tensor) or not low <= value <= high:
            raise LaunchError(f"{what} = {value} does not fit {kind}")
        place = value
    elif kind in {"fp32", "fp64"}:
        if not isinstance(value, int | float):
            raise LaunchError(f"{what} = {value!r} is no number")
        place = 0
    else:
        raise LaunchError(f"{what} has a type that no kernel here needs: {kind}")
    if aligned and place % 16:
        raise LaunchError(f"{what} is compiled as a multiple of 16, and is {place}")
