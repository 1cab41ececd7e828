"""Where KV caches live: in the process's own memory, or in the server's, where a later process finds them.

Owns what both have in common for the models that keep caches, and the digest that says what the bytes mean. Whatever a
model or a drafter keeps of a *page* is a cache, and comes from here; what it keeps of a row is made again when the row
is admitted. Who asks for room asks for the same pieces in the same order every time.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu.kernels.team import aligned
from gpu.models.packed_weights import weights_digest
from shm.config import ServerConfig
from shm.drafter_file import DrafterFile
from shm.kv_memory import KvMemory


class Caches(Protocol):
    """Room for KV caches."""

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The next piece, which begins on a cache line, with anything in it. Raises MemoryError."""

    def settle(self, is_kept: bool) -> None:
        """The process serves from here on. is_kept: with what another one left. Raises LayoutError if it cannot."""

    def tend(self) -> None:
        """For a thread of its own: what makes the memory faster to read while it is used. May return at any time."""


class OwnCaches:
    """In memory that ends with the process."""

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See `Caches`."""
        return aligned(shape, dtype)

    def settle(self, is_kept: bool) -> None:
        """See `Caches`."""

    def tend(self) -> None:
        """See `Caches`: nothing."""


def open_caches(config: ServerConfig, trained: DrafterFile | None, shared: tuple[int, int] | None) -> Caches:
    """shared: descriptor and size of the server's memory for them, where it has one.

    Raises LayoutError for a descriptor that is none, MemoryError if it cannot be mapped.
    """
    if shared is None:
        return OwnCaches()
    sizes = np.array([config.pages, config.page_size], np.int64)
    # The same weights, made by the same code, and pages of the same size: then a page says the same.
    digest = hashlib.sha256(weights_digest(config, trained) + sizes.tobytes())
    return KvMemory(*shared, digest.digest())
