"""The weights of a trained drafter, tensor by tensor, as float32 under a Llama's names or their own.

Owns their conversion. See `shm.drafter_file` for the file.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpu.models.weights_dequantize import to_float32
from shm.drafter_file import LAYER_NAMES, DrafterFile
from shm.tensor_map import FINAL_NORM, ModelError


class DrafterWeights:
    """Of one file."""

    def __init__(self, file: DrafterFile) -> None:
        self._file = file

    def tensor(self, name: str, /) -> NDArray[np.float32]:
        """float32[...], new. Raises ModelError for a name that is unknown, or a tensor that is broken."""
        entry = self._file.entry(_own_name(name))
        try:
            if entry.kind != "I8":
                return _finite(to_float32(entry.kind, entry.shape, entry.data))
            scale = self._file.entry(entry.name.removesuffix(".weight") + ".scale")
            if scale.kind != "F32":
                raise ValueError("has scales that are not float32")
            scales = _finite(to_float32(scale.kind, scale.shape, scale.data))
            if scales.shape != entry.shape[:1] or entry.data.size != np.prod(entry.shape):
                raise ValueError("and its scales do not fit together")
            with np.errstate(over="ignore"):
                return _finite(entry.data.view(np.int8).reshape(entry.shape) * scales[:, None])
        except (ValueError, KeyError) as error:
            raise ModelError(f"{self._file.path}: tensor {entry.name} {error}") from None

    def names(self) -> list[str]:
        """All, by their own names."""
        return self._file.names()


def _finite(values: NDArray[np.float32]) -> NDArray[np.float32]:
    if not np.isfinite(values).all():
        raise ValueError("has values that are no numbers")
    return values


def _own_name(name: str) -> str:
    if name == FINAL_NORM:
        return "norm.weight"
    if not name.startswith("model.layers."):
        return name
    _, _, number, rest = name.split(".", 3)
    return f"layers.{number}.{LAYER_NAMES[rest]}"
