"""Where packed weights live: in the process's own memory, or in the server's, where a later process finds them.

Owns what both have in common for the models that are packed into them, and the digest that says what is in there. Who
asks for room asks for the same pieces in the same order every time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu.kernels.native import source_hash
from gpu.kernels.team import aligned
from shm.config import ModelInfo, ServerConfig
from shm.drafter_file import DrafterFile
from shm.weights_memory import WeightsMemory, is_packed


class PackedWeights(Protocol):
    """Room for packed weights. `is_complete`: they are there already, and nobody may write."""

    is_complete: bool

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """The next piece, which begins on a cache line: zeroed, or packed. Raises MemoryError."""

    def complete(self) -> None:
        """Every model has its pieces, and they are packed: from here on they are read alone."""


class OwnWeights:
    """In memory that ends with the process."""

    is_complete = False

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See `PackedWeights`."""
        return aligned(shape, dtype)

    def complete(self) -> None:
        """See `PackedWeights`."""


class SharedWeights:
    """In the server's memory."""

    def __init__(self, memory: WeightsMemory) -> None:
        self._memory = memory
        self.is_complete = memory.is_complete

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """See `PackedWeights`."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self._memory.take(nbytes).view(dtype).reshape(shape)

    def complete(self) -> None:
        """See `PackedWeights`."""
        self._memory.complete()


def weights_digest(config: ServerConfig, trained: DrafterFile | None) -> bytes:
    """Of all that decides what is packed, and how: another digest, other bytes.

    The code is part of it, since a server may outlive an update of its own files. The content of the model's files is
    not: the weights that a server began with stay the right ones for its requests, whatever becomes of the files.
    """
    parts = [source_hash().encode(), config.dtype.encode(), config.model.to_json(), _json(config.drafter)]
    if trained is not None:  # what is read anew from this file has to fit what was packed
        numbers = np.array([*trained.taps, trained.layers, trained.mask], np.int32)
        parts += [str(trained.path).encode(), trained.kind.encode(), numbers.tobytes(), trained.vocabulary.tobytes()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def open_packed(
    config: ServerConfig,
    trained: DrafterFile | None,
    shared: tuple[int, int] | None,
    own: Callable[[], None] = lambda: None,
) -> PackedWeights:
    """shared: descriptor and size of the server's memory for them, where it has one. own: called before anything is
    written to it, which another process may be reading until then.

    Raises LayoutError for a descriptor that is none, MemoryError if there is too little memory.
    """
    if shared is None:
        return OwnWeights()
    digest = weights_digest(config, trained)
    if not is_packed(*shared, digest):
        own()
    return SharedWeights(WeightsMemory(*shared, digest))


def _json(info: ModelInfo | None) -> bytes:
    return b"" if info is None else info.to_json()
