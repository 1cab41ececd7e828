"""Pinned memory of the CUDA device: the host memory that is registered, so that copies to and from it are asynchronous.

Owns the table of registrations. CUDA refuses to register a byte twice, and a copy must lie inside one registration, so
what is registered is always a whole memory object: a mapping with all the slots of a ring in it, once, or all of an
array that owns its memory. Keeps every such object alive until it is released; never touches its contents.
"""

import mmap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu.device.protocol import DeviceError


class _Registration(NamedTuple):
    """Bytes [lo, hi) of the address space, and what keeps them where they are."""

    lo: int
    hi: int
    owner: NDArray[Any]


class PinnedMemory:
    """The registrations of one device. `runtime`: see `CudaApi`."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._registrations: list[_Registration] = []

    def register(self, array: NDArray[Any], name: str) -> None:
        """Have the memory object that `array` lies in registered. Raises DeviceError if CUDA refuses."""
        lo = array.ctypes.data
        if array.nbytes == 0 or any(known.lo <= lo and lo + array.nbytes <= known.hi for known in self._registrations):
            return
        owner = _memory_object(array)
        lo = owner.ctypes.data
        self._demand(self._runtime.cudaHostRegister(lo, owner.nbytes, 0), f"cannot pin {owner.nbytes} bytes for {name}")
        self._registrations.append(_Registration(lo, lo + owner.nbytes, owner))

    def release(self) -> None:
        """Undo every registration; nothing may be queued that touches them. Raises DeviceError if CUDA refuses."""
        while self._registrations:
            known = self._registrations.pop()
            self._demand(self._runtime.cudaHostUnregister(known.lo), f"cannot unpin {known.owner.nbytes} bytes")

    def _demand(self, result: Any, failure: str) -> None:
        if int(result) != 0:
            raise DeviceError(f"{failure}: {self._runtime.cudaGetErrorString(result)} (CUDA error {int(result)})")


def _memory_object(array: NDArray[Any]) -> NDArray[Any]:
    """All of the memory that `array` is a view of: the mapping if there is one, else the array that owns it."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    base = array.base.obj if isinstance(array.base, memoryview) else array.base
    return np.frombuffer(base, np.uint8) if isinstance(base, mmap.mmap) else array
