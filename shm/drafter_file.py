"""Files of trained drafters: what belongs to one, and for which models it was made.

Owns the format: safetensors, in which a matrix is int8 with a float32 scale for each of its rows (`NAME.weight`,
`NAME.scale`), or any floating type without scales, and everything else float32. `vocabulary` int32[D] has the target's
ids that can be drafted, ascending; `taps` int32 the target's layers whose states it reads; `mask` int32[1], which
dflash alone has, the id that stands for the first unknown token of a window, those behind it standing for the next
ones; `tokens` int32[8] which tokens the target's ids stand for, as a digest of all of them. `tools.train_drafter`
writes them. Never converts a tensor (gpu.models.drafter_weights does).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shm.config import ModelInfo
from shm.limits import WINDOW_MAX
from shm.safetensors_file import read_file
from shm.tensor_map import ModelError, TensorEntry

MTP, DFLASH = "mtp", "dflash"
MASKS_MAX = WINDOW_MAX - 1
FILE_NAME = "drafter.safetensors"
# How a layer's tensors are called in the file, by what a Llama calls them.
LAYER_NAMES = {
    "input_layernorm.weight": "input_norm.weight",
    "post_attention_layernorm.weight": "post_norm.weight",
    **{f"self_attn.{name}_proj.weight": f"{name}.weight" for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": f"{name}.weight" for name in ("gate", "up", "down")},
}


class DrafterFile:
    """One file, mapped. Raises ModelError if it holds no drafter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_file(path)
        self.vocabulary, self.taps = self._integers("vocabulary"), tuple(self._integers("taps").tolist())
        if (np.diff(self.vocabulary.astype(np.int64)) <= 0).any() or self.vocabulary[0] < 0:
            raise ModelError(f"{path}: its vocabulary is not a list of ids, each larger than the one before")
        if min(self.taps) < 0 or len(set(self.taps)) < len(self.taps):
            raise ModelError(f"{path}: its taps are not layers of a model")
        self.tokens = self._integers("tokens").tobytes()
        self.kind = DFLASH if "mask" in self._entries else MTP
        masks = self._integers("mask") if self.kind == DFLASH else np.zeros(1, np.int32)
        self.mask = int(masks[0])
        if len(masks) != 1 or self.mask < 0:
            raise ModelError(f"{path}: its mask is not the id of one token")
        numbers = {int(found[1]) for name in self._entries if (found := re.match(r"layers\.([0-9]{1,3})\.", name))}
        self.layers = len(numbers)
        if numbers != set(range(self.layers)) or not self.layers or (self.kind == MTP and self.layers > 1):
            raise ModelError(f"{path}: it has the layers {sorted(numbers)}, which no {self.kind} drafter has")

    def check(self, target: ModelInfo) -> None:
        """Raise ModelError, with the reason, if it is no drafter of such a model."""
        size, heads, kv = target.hidden_size, target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
        ffn = target.intermediate_size
        wanted: dict[str, tuple[int, ...]] = {
            "token_in.weight": (size, size),
            "target_in.matrix.weight": (size, len(self.taps) * size),
        }
        wanted |= {"norm.weight": (size,), "token_norm.weight": (size,), "target_in.norms": (len(self.taps), size)}
        wanted |= {"state_in.weight": (size, size), "state_norm.weight": (size,)}
        shapes = {"q": (heads, size), "k": (kv, size), "v": (kv, size), "o": (size, heads)}
        shapes |= {"gate": (ffn, size), "up": (ffn, size), "down": (size, ffn)}
        for layer in range(self.layers):
            wanted |= {f"layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
            wanted |= {f"layers.{layer}.{name}.weight": (size,) for name in ("input_norm", "post_norm")}
        for name, shape in wanted.items():
            if (found := self.entry(name).shape) != shape:
                raise self._refusal(target, f"its {name} is {list(found)}, but {list(shape)} is needed")
        if max(self.taps) >= target.num_layers:
            raise self._refusal(target, f"it reads layer {max(self.taps)} of a model, which has {target.num_layers}")
        if (largest := max(int(self.vocabulary[-1]), self.mask + MASKS_MAX - 1)) >= target.vocab_size:
            raise self._refusal(target, f"it knows ids up to {largest}, and the model has {target.vocab_size}")

    def entry(self, name: str) -> TensorEntry:
        """A tensor by its own name. Raises ModelError for one that is not there."""
        if name not in self._entries:
            raise ModelError(f"{self.path}: it is no trained drafter: it has no tensor {name}")
        return self._entries[name]

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._entries)

    def _refusal(self, target: ModelInfo, reason: str) -> ModelError:
        return ModelError(f"{self.path}: it is the drafter of another model than {target.name}: {reason}")

    def _integers(self, name: str) -> NDArray[np.int32]:
        entry = self.entry(name)
        if entry.kind != "I32" or len(entry.shape) != 1 or entry.data.size != 4 * entry.shape[0] or not entry.shape[0]:
            raise ModelError(f"{self.path}: its {name} is not a list of int32")
        return np.frombuffer(entry.data.tobytes(), np.int32).copy()
