"""Specifications of Triton kernels for compilation ahead of time: which variants of a kernel the server will run.

Owns their form and how they are collected. Every module `triton_*` of this package lists its variants in `SPECS`.
Importing this module imports neither Triton nor any of those; it never compiles anything, see `triton_compile`.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gpu.kernels

PREFIX = "triton_"
WITHOUT_KERNELS = ("triton_spec", "triton_compile")


@dataclass(frozen=True)
class KernelSpec:
    """One variant of a kernel, as a launch would specialise it."""

    kernel: Any  # triton.JITFunction
    signature: Mapping[str, str]  # Triton's type of every argument that is no constant: "*bf16", "i32", "fp32", ...
    constants: Mapping[
        str, int | float | bool | str | None
    ]  # every constexpr, and arguments that Triton makes constant
    aligned: tuple[str, ...] = ()  # pointers, and integers, that are multiples of 16
    options: Mapping[str, Any] = field(default_factory=dict)  # num_warps, num_stages, ... as given to the launch

    @property
    def name(self) -> str:
        """The kernel and what tells its variants apart."""
        types = {kind.lstrip("*") for kind in self.signature.values() if kind.startswith("*")} - {"i32"}
        return "-".join([self.kernel.__name__, *sorted(types), *(f"{k}={v}" for k, v in self.constants.items())])


def kernel_modules() -> dict[str, Any]:
    """All modules of Triton kernels by name. Imports them, and with them Triton."""
    names = sorted(module.name for module in pkgutil.iter_modules(gpu.kernels.__path__))
    kept = [name for name in names if name.startswith(PREFIX) and name not in WITHOUT_KERNELS]
    return {name: importlib.import_module(f"{gpu.kernels.__name__}.{name}") for name in kept}


def kernels_of(module: Any) -> dict[str, Any]:
    """The kernels that `module` defines, by name. Jitted functions with a leading underscore are parts of kernels."""
    jitted = {name: thing for name, thing in vars(module).items() if hasattr(thing, "arg_names")}
    return {
        name: thing
        for name, thing in jitted.items()
        if not name.startswith("_") and thing.__module__ == module.__name__
    }


def collect_specs() -> list[KernelSpec]:
    """The specs of all kernels, module by module. Imports Triton. A module without any has none."""
    return [spec for module in kernel_modules().values() for spec in getattr(module, "SPECS", ())]
