"""Models of trained drafters on the host: layers of the target's shape over the target's own embedding and head.

Owns a drafter's weights, its cache and its working memory. Its pages are the target's. What it says is an index into
the draft vocabulary. See `tools.drafter_mtp` and `tools.drafter_dflash` for the arithmetic as it is trained.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.kernels.gemm import activation_limit
from gpu.models import draft_passes, words
from gpu.models.caches import Caches
from gpu.models.drafter_weights import DrafterWeights
from gpu.models.llama import HostLlama, Int32, Progress, Weights
from gpu.models.packed_weights import PackedWeights
from shm.drafter_file import DrafterFile
from shm.tensor_map import HEAD, ModelError

Float32 = npt.NDArray[np.float32]


class _HostDrafter(HostLlama):
    """What both have in common: tokens, and states of the target, go through matrices of their own."""

    def __init__(
        self,
        target: HostLlama,
        target_weights: Weights,
        file: DrafterFile,
        packed: PackedWeights | None = None,
        caches: Caches | None = None,
    ) -> None:
        """target_weights: those of the target, of whose head the rows of the draft vocabulary are kept. packed and
        caches: as for the target, and behind its own.

        Raises ModelError, naming the reason, for a drafter of another model.
        """
        file.check(target.info)
        self._target, self.vocabulary, self.parts = target, file.vocabulary, len(file.taps)
        if target.taps != file.taps:
            raise ValueError("the target keeps other layers than those that its drafter reads")
        self._target_weights = target_weights
        super().__init__(
            replace(target.info, num_layers=file.layers, qk_norm=False),
            DrafterWeights(file),
            dtype=target.dtype,
            page_size=target.page_size,
            pages=target.pages,
            pages_per_row=target.pages_per_row,
            max_tokens=target.max_tokens,
            max_seqs=target.max_seqs,
            threads=target.team.threads,
            team=target.team,
            widest=self.parts * target.info.hidden_size,
            packed=packed,
            caches=caches,
        )
        self._pass = draft_passes.JOINED[target.dtype]
        for job in (self._pass, *self._choose_jobs(file)):
            job.compile()

    def _choose_jobs(self, file: DrafterFile) -> list[Any]:
        """Take what the drafter needs from `file`, and the jobs that it runs besides a pass. Returns those."""
        raise NotImplementedError

    def _load(self, weights: Any, progress: Progress | None) -> None:
        info, hidden, ends = self.info, self.info.hidden_size, 2 * self.info.num_layers
        norms = self._packed_buffer(words.NORMS, (ends + 3 + self.parts, hidden))
        try:
            self._load_layers(weights, norms, progress)
            self._token_in = self._pack(weights, ["token_in.weight"], [hidden], hidden)
            self._target_in = self._pack(weights, ["target_in.matrix.weight"], [hidden], self.parts * hidden)
            self._copy(weights, {"model.norm.weight": norms[ends], "token_norm.weight": norms[ends + 1]})
            self._copy(weights, {"target_in.norms": norms[ends + 3 :]})
            self._state_in = self._pack(weights, ["state_in.weight"], [hidden], hidden)
            self._copy(weights, {"state_norm.weight": norms[ends + 2]})
        except ValueError as error:
            raise ModelError(f"the drafter is not one of {info.name}: {error}") from None
        self._set_matrix(words.TOKEN_IN, self._token_in)
        self._set_matrix(words.EMBEDDING, self._target.embedding)
        rows = len(self.vocabulary)
        head = self._pack(_Rows(self._target_weights, self.vocabulary), [HEAD], [rows], hidden)
        self._set_matrix(words.HEAD, head)
        self._set(words.HEAD_ROWS, rows)
        del self._target_weights

    def _join(self, states: Float32, parts: int, norm: int, matrix: tuple[int, int]) -> None:
        """Say which states the next pass begins with: f32[T, parts, hidden], by which norm and which matrix."""
        if states.dtype != np.float32 or not states.flags.c_contiguous or states.shape[1:] != self._state_shape(parts):
            raise ValueError(f"states must be contiguous float32 [T, {parts}, hidden]")
        self._set(words.STATE, states.ctypes.data)
        self._set(words.STATE_PARTS, parts)
        self._set(words.STATE_NORM, 2 * self.info.num_layers + norm)
        self._set_float(words.LIMIT_STATE, activation_limit(parts * self.info.hidden_size))
        self._set_matrix(words.STATE_IN, matrix)

    def _do(self, job: Any, given: tuple[Any, ...]) -> None:
        """Another job than a pass."""
        self.describe(*given)
        self.team.run(job, self._block)

    def _state_shape(self, parts: int) -> tuple[int, int]:
        return parts, self.info.hidden_size


class HostMtp(_HostDrafter):
    """One layer. At place i of a row it takes the target's states there and the token at i + 1, and says which token
    comes at i + 2; where it goes on by itself, its own state takes the place of the target's.
    """

    def _choose_jobs(self, file: DrafterFile) -> list[Any]:
        self._learn, self._resumed = draft_passes.LEARN[self.dtype], draft_passes.RESUMED[self.dtype]
        return [self._learn, self._resumed]

    def learn(self, states: Float32, *given: Any) -> None:
        """Give the layer the keys and values of T places by the target's states, f32 [T, taps, hidden], and the tokens
        behind them; then what `HostLlama.forward` is given, which wants no logits. `residual` has what is joined.
        """
        self._join(states, self.parts, 3, self._target_in)
        self._do(self._learn, given)

    def begin(self, states: Float32, *given: Any) -> None:
        """A pass over one place of each row that goes on with what `learn` left of it: f32 [T, 1, hidden]; then what
        `HostLlama.forward` is given, of whose tokens nothing is read, logits f32 [S, D].
        """
        np.copyto(self.residual[: len(states)], states[:, 0])
        self._do(self._resumed, given)

    def draft(self, states: Float32, *given: Any) -> None:
        """A pass behind its own: states f32 [T, 1, hidden], a copy of what that left in `residual`."""
        self._join(states, 1, 2, self._state_in)
        self.forward(*given)


class HostDflash(_HostDrafter):
    """A few layers over a block: the newest token and a mask for every draft, all of which see each other. They begin
    with what `know` has left in `residual` of the place before the block.
    """

    def _choose_jobs(self, file: DrafterFile) -> list[Any]:
        self.mask = file.mask
        self._know = draft_passes.KNOW[self.dtype]
        return [self._know]

    def know(self, states: Float32, *given: Any) -> None:
        """Give all layers the keys and values of T places by the target's states, f32 [T, taps, hidden]; then what
        `HostLlama.forward` is given, of whose tokens nothing is read, and which wants no logits.
        """
        self._join(states, self.parts, 3, self._target_in)
        self._do(self._know, given)

    def draft(
        self,
        states: Float32,
        last_seen: Int32,
        tokens: Int32,
        positions: Int32,
        seqs: Int32,
        page_rows: Int32,
        logit_rows: Int32,
        logits: Float32,
        extents: Any = None,
    ) -> None:
        """A pass over blocks: float32 [T, 1, hidden], what a token's block begins with, and int32 [T], its last
        position; then what `HostLlama.forward` is given, logits float32 [S, D].
        """
        self._join(states, 1, 2, self._state_in)
        self.forward(tokens, positions, seqs, page_rows, logit_rows, logits, extents, last_seen)


class _Rows:
    """Some rows of another model's matrices."""

    def __init__(self, weights: Weights, rows: Int32) -> None:
        self._weights, self._rows = weights, rows

    def tensor(self, name: str, /) -> Float32:
        """Those of the matrix of that name."""
        return self._weights.tensor(name)[self._rows]

    def names(self) -> list[str]:
        """None of its own."""
        return []
