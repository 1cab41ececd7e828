"""Mappings of a memfd that begin where a huge page does, so that the kernel can put their memory into huge pages.

Owns the memfd's making, the mapping, and the calls of the C library that it takes. It knows nothing of what the bytes
are. Whoever streams through much memory for every token feels small pages.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from typing import Any

from shm.segment import SEALS

HUGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_MAP_FIXED, _MAP_POPULATE, _MAP_NORESERVE = 0x10, 0x8000, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


def create_fd(name: str, nbytes: int) -> tuple[int, int]:
    """Return a memfd for `nbytes`, in whole huge pages, its size sealed, and that size. It takes no memory yet."""
    size = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
    fd = os.memfd_create(f"stepahead-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, size


class HugeMapping:
    """The bytes of a memfd as an array interface; unmapped with the last array on them.

    populate: have the pages that are there at hand at once, and take those that are not. Raises MemoryError.
    """

    def __init__(self, fd: int, size: int, writable: bool, populate: bool = False) -> None:
        room = size + HUGE_BYTES
        reserved = _map(0, room, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._unmap = weakref.finalize(self, _libc.munmap, reserved, room)
        self._unmap.atexit = False  # threads in native code may still read it then
        self._address = -(-reserved // HUGE_BYTES) * HUGE_BYTES
        self._size = size
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        _map(self._address, size, access, mmap.MAP_SHARED | _MAP_FIXED | (_MAP_POPULATE if populate else 0), fd)
        self.__array_interface__: dict[str, Any] = {
            "data": (self._address, not writable), "shape": (size,), "typestr": "|u1", "version": 3,
        }  # fmt: skip

    def collapse(self, begin: int, nbytes: int) -> int:
        """Put a stretch into huge pages, whatever is in it and whoever uses it meanwhile. Returns 0, or the errno.

        EINVAL: nothing is there yet, or the kernel cannot do it. ENOMEM: no huge page is to be had, memory is in
        pieces. Others: not now.
        """
        if _libc.madvise(self._address + begin, nbytes, _MADV_COLLAPSE) == 0:
            return 0
        return ctypes.get_errno()

    def protect(self) -> None:
        """Make a write by this process its end, native code's included."""
        if _libc.mprotect(self._address, self._size, mmap.PROT_READ) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")


def _map(address: int, size: int, access: int, flags: int, fd: int) -> int:
    made = _libc.mmap(address, size, access, flags, fd, 0)
    if made is None or made == _FAILED:
        raise MemoryError(f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    assert isinstance(made, int)
    return made
