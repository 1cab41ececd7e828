"""Models of trained drafters on CUDA: layers of the target's shape over the target's own embedding and head.

Owns a drafter's weights, its cache and its working memory. Its pages are the target's, its attention is always the
project's own: of a block every token sees all of it, which no other kernel here can do. What it says is an index into
the draft vocabulary. By the rules of `cuda_llama`: no pass allocates, waits or looks at a value. The same as
`host_drafters` on the host; see `tools.drafter_mtp` and `tools.drafter_dflash` for the arithmetic as it is trained.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpu.kernels import triton_rows
from gpu.kernels.step_kernels import Extents
from gpu.models.cuda_llama import CudaLlama, Loader, Progress
from gpu.models.drafter_weights import DrafterWeights
from shm.drafter_file import DrafterFile
from shm.tensor_map import FINAL_NORM


class _CudaDrafter(CudaLlama):
    """What both have in common: tokens, and states of the target, go through matrices of their own."""

    def __init__(self, target: CudaLlama, file: DrafterFile, progress: Progress | None = None) -> None:
        """target: with the drafter's taps; its embedding is shared, and the draft vocabulary's part of its head copied.

        Raises ModelError, naming the reason, for a drafter of another model, and what `CudaLlama` raises.
        """
        file.check(target.info)
        if target.taps != file.taps:
            raise ValueError("the target keeps other layers than those that its drafter reads")
        self._target, self._file = target, file
        self.vocabulary: Any = torch.from_numpy(file.vocabulary).to(target.k_cache.device)  # i32[D]
        _, pages, page_size, _, _ = target.k_cache.shape
        super().__init__(
            replace(target.info, num_layers=file.layers, qk_norm=False),
            DrafterWeights(file),
            dtype=target.dtype,
            page_size=page_size,
            pages=pages,
            pages_per_row=target.pages_per_row,
            max_tokens=target.max_tokens,
            max_seqs=target.max_seqs,
            device=str(target.k_cache.device),
            progress=progress,
        )
        self.residual = self._work.residual  # [tokens, hidden]: behind a pass, the state of each of its tokens

    def _load(self, loader: Loader, progress: Progress | None) -> None:
        hidden, parts, target = self.info.hidden_size, len(self._file.taps), self._target
        self._layers = [self._load_layer(loader, number) for number in range(self.info.num_layers)]
        self._final_norm = loader.vector(FINAL_NORM, hidden)
        self._token_norm = loader.vector("token_norm.weight", hidden)
        self._token_in = loader.matrix(["token_in.weight"], [hidden], hidden)
        self._target_norms = loader.vector("target_in.norms", parts, hidden)
        self._target_in = loader.matrix(["target_in.matrix.weight"], [hidden], parts * hidden)
        self._state_norm = loader.vector("state_norm.weight", hidden)[None]
        self._state_in = loader.matrix(["state_in.weight"], [hidden], hidden)
        self.embedding = target.embedding
        self.head = target.head.t()[self.vocabulary.long()].t()
        self._joined = torch.zeros(self.max_tokens * parts * hidden, dtype=self.head.dtype, device=self.head.device)

    def _take_tokens(self, tokens: Tensor, work: Any) -> None:
        """residual [T, hidden] = what tokens i32[T] bring to the first layer."""
        triton_rows.embed(tokens, self.embedding, work.added)
        triton_rows.rmsnorm(work.added, self._token_norm, self.info.rms_eps, work.normed)
        torch.mm(work.normed, self._token_in, out=work.residual)

    def _take_states(self, states: Tensor, norms: Tensor, matrix: Tensor, out: Tensor) -> None:
        """out [T, hidden] = what states f32[T, parts, hidden] bring, each part by its own row of norms."""
        count, parts, hidden = states.shape
        if (parts, hidden) != norms.shape or states.dtype != torch.float32:
            raise ValueError(f"states must be float32 [T, {norms.shape[0]}, {norms.shape[1]}]")
        joined = self._joined[: states.numel()].view(count * parts, hidden)
        triton_rows.rmsnorm(states.view(count * parts, hidden), norms, self.info.rms_eps, joined)
        torch.mm(joined.view(count, parts * hidden), matrix, out=out)

    def _write_keys_values(self, work: Any, positions: Tensor, seqs: Tensor, page_rows: Tensor, *_: Any) -> None:
        """All layers' keys and values of places, from what `residual` holds of them."""
        info, count, eps = self.info, len(positions), self.info.rms_eps
        queries, kv = info.num_heads * info.head_dim, 2 * info.num_kv_heads * info.head_dim
        keys_values = work.qkv.view(-1)[: count * kv].view(count, kv)
        for layer in self._layers:
            triton_rows.rmsnorm(work.residual, layer.input_norm, eps, work.normed)
            torch.mm(work.normed, layer.qkv[:, queries:], out=keys_values)
            triton_rows.rope_write(
                *(keys_values, positions, seqs, page_rows, self._cosines, self._sines),
                *(None, None, eps, work.queries[:, :0], layer.k_cache, layer.v_cache),
            )

    def _join(
        self,
        last_seen: Tensor | None,
        states: Tensor,
        norms: Tensor,
        matrix: Tensor,
        tokens: Tensor,
        positions: Tensor,
        seqs: Tensor,
        page_rows: Tensor,
        logit_rows: Tensor,
        logits: Tensor,
        extents: Extents,
    ) -> None:
        """A pass that begins with tokens and states. last_seen: see `CudaDflash.draft`; None where no token sees others
        behind it.
        """
        work = self._room(len(tokens), len(logit_rows))
        self._take_tokens(tokens, work)
        self._take_states(states, norms, matrix, work.added)
        first_norm = self._layers[0].input_norm
        triton_rows.add_rmsnorm(work.added, work.residual, first_norm, self.info.rms_eps, work.normed)
        self._run(work, positions, seqs, page_rows, logit_rows, logits, extents, last_seen)

    def _padding_states(self, count: int, parts: int) -> Tensor:
        return torch.zeros((count, parts, self.info.hidden_size), device=self.head.device)


class CudaMtp(_CudaDrafter):
    """One layer, see `HostMtp`."""

    def learn(self, states: Tensor, tokens: Tensor, *given: Any) -> None:
        """Give the layer the keys and values of T places by the target's states, f32[T, taps, hidden], and the tokens
        behind them; then what `CudaLlama.forward` is given, which wants no logits. `residual` has what is joined.
        """
        work = self._room(len(tokens), 0)
        self._take_tokens(tokens, work)
        self._take_states(states, self._target_norms, self._target_in, work.added)
        work.residual.add_(work.added)
        self._write_keys_values(work, *given)

    def begin(self, states: Tensor, tokens: Tensor, *given: Any) -> None:
        """A pass over one place of each row that goes on with what `learn` left of it: f32[T, 1, hidden]; then what
        `CudaLlama.forward` is given, of whose tokens nothing is read, logits f32[S, D].
        """
        work = self._room(len(tokens), len(given[3]))
        work.residual.copy_(states[:, 0])
        triton_rows.rmsnorm(work.residual, self._layers[0].input_norm, self.info.rms_eps, work.normed)
        self._run(work, *given)

    def draft(self, states: Tensor, *given: Any) -> None:
        """A pass behind its own: states f32[T, 1, hidden], a copy of what that left in `residual`."""
        self._join(None, states, self._state_norm, self._state_in, *given)

    def _pass_padding(self, *given: Any) -> None:
        count = len(given[0])
        self.learn(self._padding_states(count, len(self._file.taps)), *given)
        self.begin(self._padding_states(count, 1), *given)
        self.draft(self._padding_states(count, 1), *given)


class CudaDflash(_CudaDrafter):
    """A few layers over a block, see `HostDflash`."""

    def __init__(self, target: CudaLlama, file: DrafterFile, progress: Progress | None = None) -> None:
        """See above."""
        super().__init__(target, file, progress)
        self.mask = file.mask

    def know(self, states: Tensor, *given: Any) -> None:
        """Give all layers the keys and values of T places by the target's states, f32[T, taps, hidden]; then what
        `CudaLlama.forward` is given, of whose tokens nothing is read, and which wants no logits.
        """
        work = self._room(len(given[0]), 0)
        self._take_states(states, self._target_norms, self._target_in, work.residual)
        self._write_keys_values(work, *given[1:])

    def draft(self, states: Tensor, last_seen: Tensor, *given: Any) -> None:
        """A pass over blocks: f32[T, 1, hidden], what a token's block begins with, and i32[T], its last position; then
        what `CudaLlama.forward` is given, logits f32[S, D].
        """
        self._join(last_seen, states, self._state_norm, self._state_in, *given)

    def _pass_padding(self, *given: Any) -> None:
        self.know(self._padding_states(len(given[0]), len(self._file.taps)), *given)
        self.draft(self._padding_states(len(given[0]), 1), given[1], *given)
