"""The mtp drafter's model on the host: one decoder layer over the target's state and the token behind it.

Owns the drafter's weights, its cache and its working memory; the embedding is the target's own. At place i of a row it
takes the target's state there and the token at i + 1, and says which token comes at i + 2. What it says is an index
into the draft vocabulary. See `tools.drafter_model` for the arithmetic as it is trained.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.models import passes, words
from gpu.models.llama import HostLlama, Int32, Progress
from gpu.models.weights_dequantize import to_float32
from shm.safetensors_file import read_file
from shm.tensor_map import ModelError

FORMAT = "stepahead-mtp"
# Of a model with one layer, by the names under which a Llama has them.
NAMES = {
    "model.layers.0.input_layernorm.weight": "input_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "post_norm.weight",
    "model.norm.weight": "norm.weight",
    **{f"model.layers.0.self_attn.{name}_proj.weight": f"{name}.weight" for name in "qkvo"},
    **{f"model.layers.0.mlp.{name}_proj.weight": f"{name}.weight" for name in ("gate", "up", "down")},
}


class MtpWeights:
    """A file that `tools.train_drafter` has written."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if it is no such file."""
        self._path = path
        self._entries = read_file(path)
        if "vocabulary" not in self._entries or "state_in.weight" not in self._entries:
            raise ModelError(f"{path}: it is no mtp drafter")

    def vocabulary(self) -> Int32:
        """i32[D]: the target's ids that it can draft, ascending."""
        entry = self._entries["vocabulary"]
        return np.frombuffer(entry.data.tobytes(), np.int32).copy()

    def tensor(self, name: str, /) -> npt.NDArray[np.float32]:
        """The tensor of that name, by a Llama's names or its own. Raises ModelError for an unknown one."""
        name = NAMES.get(name, name)
        if name not in self._entries:
            raise ModelError(f"{self._path}: it has no tensor {name}")
        entry = self._entries[name]
        return to_float32(entry.kind, entry.shape, entry.data)

    def names(self) -> list[str]:
        """All names."""
        return list(self._entries)


class HostMtp(HostLlama):
    """The drafter of `target`, with its pages and for passes as large as its own."""

    def __init__(self, target: HostLlama, target_head: npt.NDArray[np.float32], weights: MtpWeights) -> None:
        """target_head: float32 [vocab, hidden], of which the rows of the draft vocabulary are kept.

        Raises ModelError, naming the tensor, for a drafter of another model.
        """
        self._target = target
        self.vocabulary = weights.vocabulary()
        if not len(self.vocabulary) or self.vocabulary[-1] >= target.info.vocab_size:
            raise ModelError("the drafter's vocabulary is not one of this model's")
        self._head = target_head[self.vocabulary]
        super().__init__(
            replace(target.info, num_layers=1, qk_norm=False),
            weights,
            dtype=target.dtype,
            page_size=target.page_size,
            pages=target.pages,
            pages_per_row=target.pages_per_row,
            max_tokens=target.max_tokens,
            max_seqs=target.max_seqs,
            threads=target.team.threads,
            team=target.team,
        )
        self._pass = passes.DRAFT_PASSES[target.dtype]
        self._pass.compile()

    def _load(self, weights: Any, progress: Progress | None) -> None:
        info, hidden = self.info, self.info.hidden_size
        norms = self._buffer(words.NORMS, (2 * info.num_layers + 3, hidden), np.float32)
        try:
            self._load_layers(weights, norms, progress)
            for index, name in ((words.TOKEN_IN, "token_in.weight"), (words.STATE_IN, "state_in.weight")):
                self._set_matrix(index, self._pack(weights, [name], [hidden], hidden))
        except ValueError as error:
            raise ModelError(f"the drafter is not one of {info.name}: {error}") from None
        for number, name in enumerate(("model.norm.weight", "token_norm.weight", "state_norm.weight")):
            norms[2 * info.num_layers + number] = weights.tensor(name)
        self._set_matrix(words.EMBEDDING, self._target.embedding)
        rows = len(self._head)
        self._set_matrix(words.HEAD, self._pack(_Given(self._head), ["head"], [rows], hidden))
        self._set(words.HEAD_ROWS, rows)
        del self._head

    def draft(
        self,
        tokens: Int32,
        state: npt.NDArray[np.float32],
        positions: Int32,
        seqs: Int32,
        page_rows: Int32,
        logit_rows: Int32,
        logits: npt.NDArray[np.float32],
    ) -> None:
        """A pass over T places: tokens int32 [T] are those behind them, state float32 [T, hidden] is the target's, or
        a copy of what the pass before has left in `residual`. The other arguments are those of `HostLlama.forward`;
        logits float32 [S, D].
        """
        shape = (len(tokens), self.info.hidden_size)
        if state.dtype != np.float32 or not state.flags.c_contiguous or state.shape != shape:
            raise ValueError("state must be contiguous float32 [T, hidden]")
        self._block[words.STATE] = state.ctypes.data
        self.forward(tokens, positions, seqs, page_rows, logit_rows, logits)


class _Given:
    """One tensor that is there already."""

    def __init__(self, matrix: npt.NDArray[np.float32]) -> None:
        self._matrix = matrix

    def tensor(self, name: str, /) -> npt.NDArray[np.float32]:
        """It, whatever the name."""
        return self._matrix

    def names(self) -> list[str]:
        """None of its own."""
        return []
