"""A segment is one piece of shared memory: a sealed memfd, mapped by every process that was handed its descriptor.

Owns the memfd and the mapping, and the line at its start that says what lies in it. It may never be given a name in the
file system (so nothing can be left behind, whoever is killed), change its size, or hold a lock.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from shm.limits import PAGE_BYTES

VERSION = 1
_MAGIC, _VERSION, _SCHEMA = 0, 1, 2  # u64 words of the first line
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # the size stays what it is


class LayoutError(RuntimeError):
    """A segment does not hold what the attaching process expects."""


def schema_hash(description: str) -> int:
    """Return a u32 that changes with the textual description of a layout."""
    return zlib.crc32(description.encode())


def memory_available_bytes() -> int:
    """Return what the kernel thinks can be allocated without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise LayoutError("/proc/meminfo has no MemAvailable")


def check_sealed(fd: int, size: int, what: str) -> None:
    """Raise LayoutError, in which it is called `what`, unless `fd` is a memfd of `size` bytes, its size sealed."""
    actual = os.fstat(fd).st_size
    if actual != size:
        raise LayoutError(f"{what}: descriptor {fd} has {actual} bytes, expected {size} bytes")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise LayoutError(f"{what}: descriptor {fd} is no memfd") from error
    if seals & SEALS != SEALS:
        raise LayoutError(f"{what}: descriptor {fd} is not sealed")


class Segment:
    """Shared memory of `size` bytes behind the descriptor `fd`.

    `buf` is the bytes, `words` the same memory as u64 and `floats` as f64. A store of one element of `words` or
    `floats` is one aligned 8-byte store; a value that another process may read at the same time is stored that way.
    """

    def __init__(self, fd: int, size: int, name: str) -> None:
        self.fd = fd
        self.size = size
        self.name = name
        self._map = mmap.mmap(fd, size)
        self._closing: weakref.finalize[Any, Any] | None = None  # of the descriptor, where it is ours
        self.buf = memoryview(self._map)
        self.words = self.buf.cast("Q")
        self.floats = self.buf.cast("d")

    @classmethod
    def create(cls, name: str, size: int) -> Segment:
        """Make a zeroed segment of at least `size` bytes (whole pages) and seal its size.

        Memory is allocated here, so that too little of it is an OSError (ENOMEM) now, and not the out-of-memory killer
        or a SIGBUS later.
        """
        if size <= 0:
            raise ValueError(f"segment {name}: size must be positive, got {size}")
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        available = memory_available_bytes()
        if size > available:
            text = f"segment {name} needs {size >> 20} MiB of memory, {available >> 20} MiB are available"
            raise OSError(errno.ENOMEM, text)
        fd = os.memfd_create(f"stepahead-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            segment = cls(fd, size, name)
        except BaseException:
            os.close(fd)
            raise
        segment._closing = weakref.finalize(segment, os.close, fd)  # no later than the last reference goes
        return segment

    @classmethod
    def attach(cls, fd: int, size: int, name: str) -> Segment:
        """Map a segment made by another process. Raises LayoutError if it is not a sealed memfd of `size` bytes."""
        check_sealed(fd, size, f"segment {name}")
        return cls(fd, size, name)

    def array(self, dtype: npt.DTypeLike, count: int, offset: int = 0) -> npt.NDArray[Any]:
        """Return a writable view of `count` items of `dtype` at `offset` bytes, which must be aligned to the item."""
        assert offset % np.dtype(dtype).itemsize == 0, (self.name, offset, dtype)
        return np.frombuffer(self._map, dtype, count, offset)

    def format(self, kind: str, schema: int) -> None:
        """Declare what the segment holds: `kind` (at most 8 ASCII characters) and the hash of its layout."""
        self.words[_VERSION] = VERSION
        self.words[_SCHEMA] = schema
        self.words[_MAGIC] = _magic(kind)

    @property
    def formatted(self) -> bool:
        return self.words[_MAGIC] != 0

    def check(self, kind: str, schema: int) -> None:
        """Raise LayoutError, saying what differs, unless the segment was formatted with the same kind and layout."""
        found, version, found_schema = self.words[_MAGIC], self.words[_VERSION], self.words[_SCHEMA]
        if found != _magic(kind):
            text = found.to_bytes(8, "little").rstrip(b"\0").decode("ascii", "replace")
            raise LayoutError(f"segment {self.name}: expected {kind!r}, found {text!r}")
        if version != VERSION:
            raise LayoutError(f"segment {self.name}: layout version {version}, this program has {VERSION}")
        if found_schema != schema:
            raise LayoutError(f"segment {self.name}: layout {found_schema:08x}, this program has {schema:08x}")

    def close(self) -> None:
        """Close the descriptor. The memory stays mapped as long as a view of it is alive."""
        if self._closing is not None:
            self._closing.detach()
        os.close(self.fd)
        self.fd = -1


def _magic(kind: str) -> int:
    raw = kind.encode("ascii")
    assert 0 < len(raw) <= 8, kind
    return int.from_bytes(raw, "little")
