"""The weights of a model, tensor by tensor, as float32 under their Hugging Face names.

Owns what differs between the formats: names, sharding, element types, and the row order of q and k. Files stay mapped
and read-only; one tensor is converted at a time, so the float32 copy of a whole model never exists here. Never casts
to another precision, never imports torch.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpu.models.weights_dequantize import to_float32
from shm.config import ModelInfo
from shm.gguf_file import GgufFile
from shm.safetensors_file import read_folder
from shm.tensor_map import EMBEDDING, HEAD, ModelError, TensorEntry, check_tensors, gguf_name, llama_tensors


class WeightSource:
    """All tensors of one model. Made by `open_weights`."""

    def __init__(self, info: ModelInfo, entries: dict[str, TensorEntry]) -> None:
        """entries: by the names of the file's own format. Raises ModelError if a tensor is missing or has a wrong
        shape.
        """
        check_tensors(info, entries)
        self._info = info
        self._entries = entries

    def names(self) -> list[str]:
        """HF names of the model's tensors, in the order of the layers; no lm_head.weight where the embedding serves
        as it.
        """
        return list(llama_tensors(self._info))

    def tensor(self, hf_name: str) -> NDArray[np.float32]:
        """One tensor: float32[rows, columns] or float32[size], C-contiguous, in HF layout, new and owned by the caller.

        lm_head.weight of a model that ties it gives the embedding. Raises ModelError for a name that the model lacks.
        """
        if hf_name == HEAD and self._info.tie_word_embeddings:
            hf_name = EMBEDDING
        entry = self._entry(hf_name)
        data = entry.data
        if self._info.format == "gguf":
            heads = {"q_proj": self._info.num_heads, "k_proj": self._info.num_kv_heads}.get(hf_name.split(".")[-2])
            if heads is not None:
                data = _restore_halves(data, heads, self._info.head_dim)
        try:
            return to_float32(entry.kind, entry.shape, data)
        except ValueError as error:
            raise ModelError(f"{self._info.path}: tensor {entry.name} {error}") from None

    def _entry(self, hf_name: str) -> TensorEntry:
        try:
            return self._entries[gguf_name(hf_name) if self._info.format == "gguf" else hf_name]
        except (KeyError, ValueError):
            raise ModelError(f"{self._info.path}: it has no tensor {hf_name}") from None


def open_weights(info: ModelInfo) -> WeightSource:
    """Map the files of the model at info.path and check all of its tensors. Raises ModelError, naming the tensor."""
    path = Path(info.path)
    return WeightSource(info, GgufFile(path).tensors if info.format == "gguf" else read_folder(path))


class LateWeights:
    """All tensors of the model at info.path, whose files are opened when the first of them is asked for."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    def names(self) -> list[str]:
        """See `WeightSource.names`."""
        return list(llama_tensors(self._info))

    def tensor(self, hf_name: str) -> NDArray[np.float32]:
        """See `WeightSource.tensor`; raises what `open_weights` raises, too."""
        return self._source.tensor(hf_name)

    @cached_property
    def _source(self) -> WeightSource:
        return open_weights(self._info)


def _restore_halves(data: NDArray[np.uint8], heads: int, head_dim: int) -> NDArray[np.uint8]:
    """Put the rows of q or k into HF order; raw bytes suffice, because no block reaches across a row.

    GGUF interleaves the two halves of each head (row 2i: element i, row 2i + 1: element i + head_dim / 2), HF has
    them one after the other.
    """
    rows = data.reshape(heads, head_dim // 2, 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
