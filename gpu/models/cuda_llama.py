"""A Llama or Qwen3 on CUDA: weights, cache pool and working memory, and the call that queues a pass.

Owns every buffer that a pass touches, but for its inputs and the logits. Matrix products are torch's, everything
between them is the project's own Triton kernels. It decides nothing about which tokens run, never allocates in a pass,
never waits for the device and never looks at a value there: indices are those that the step's gather has checked. It
runs on CPU tensors as well where Triton interprets its kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu.kernels import triton_rows
from gpu.kernels.attention_contract import Attention
from gpu.kernels.attention_cut import scratch_floats
from gpu.kernels.step_kernels import Extents
from gpu.kernels.triton_attention import PagedAttention
from gpu.models.rope import rope_tables
from shm.config import ModelInfo
from shm.tensor_map import EMBEDDING, FINAL_NORM, HEAD

Progress = Callable[[str], None]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Weights(Protocol):
    """Where weights come from: float32, Hugging Face names and layout."""

    def tensor(self, name: str, /) -> NDArray[np.float32]:
        """The tensor of that name, new and owned by the caller. Raises KeyError or ModelError for an unknown one."""


@dataclass(frozen=True)
class Layer:
    """Weights and caches of one decoder layer. Matrices are [inputs, outputs], stored output by output."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [hidden, (heads + 2 kv_heads) * head_dim]
    q_norm: Tensor | None  # [head_dim], where the model norms queries and keys
    k_norm: Tensor | None
    attended: Tensor  # [heads * head_dim, hidden]
    post_norm: Tensor  # [hidden]
    gate_up: Tensor  # [hidden, 2 ffn], gate first
    down: Tensor  # [ffn, hidden]
    k_cache: Tensor  # [pages, page_size, kv_heads, head_dim]
    v_cache: Tensor


@dataclass(frozen=True)
class Workspace:
    """What a pass writes between its inputs and its logits, one row a token. Private to the forward stream."""

    residual: Tensor  # [tokens, hidden] sum of all layers so far
    normed: Tensor  # [tokens, hidden]
    added: Tensor  # [tokens, hidden] what a layer adds next
    qkv: Tensor  # [tokens, (heads + 2 kv_heads) * head_dim]
    queries: Tensor  # [tokens, heads, head_dim]
    attended: Tensor  # [tokens, heads, head_dim]
    gate_up: Tensor  # [tokens, 2 ffn]
    gated: Tensor  # [tokens, ffn]

    @classmethod
    def of(cls, info: ModelInfo, tokens: int, dtype: torch.dtype, device: torch.device) -> "Workspace":
        """Buffers for passes of up to `tokens` tokens."""

        def buffer(*shape: int) -> Tensor:
            return torch.zeros((tokens, *shape), dtype=dtype, device=device)

        hidden, ffn, heads, dim = info.hidden_size, info.intermediate_size, info.num_heads, info.head_dim
        return cls(
            residual=buffer(hidden),
            normed=buffer(hidden),
            added=buffer(hidden),
            qkv=buffer((heads + 2 * info.num_kv_heads) * dim),
            queries=buffer(heads, dim),
            attended=buffer(heads, dim),
            gate_up=buffer(2 * ffn),
            gated=buffer(ffn),
        )

    def first(self, tokens: int) -> "Workspace":
        """The part that a pass over `tokens` tokens uses."""
        return Workspace(**{name: buffer[:tokens] for name, buffer in vars(self).items()})


class Loader:
    """Brings weights to the device, tensor by tensor: the float32 copy of a whole model never exists."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device

    def vector(self, name: str, *shape: int) -> Tensor:
        """The weights of a norm: [size], or of several."""
        return self._stacked([name], [shape])

    def matrix(self, names: list[str], outputs: list[int], inputs: int) -> Tensor:
        """Matrices of the same inputs side by side: [inputs, sum of outputs], as a view of what is stored the other
        way round.
        """
        return self._stacked(names, [(rows, inputs) for rows in outputs]).t()

    def _stacked(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        made = torch.empty((sum(s[0] for s in shapes), *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for name, shape, place in zip(names, shapes, made.split([s[0] for s in shapes]), strict=True):
            values = self._weights.tensor(name)
            if values.shape != shape:
                raise ValueError(f"{name} has the shape {values.shape}, expected {shape}")
            place.copy_(torch.from_numpy(values))
        return made


def _check(info: ModelInfo, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if info.head_dim < 16 or info.head_dim & (info.head_dim - 1):
        raise ValueError(f"head_dim is {info.head_dim}; the CUDA kernels need a power of two from 16 on")


class CudaLlama:
    """Weights and state of one model. Call `forward` from one thread at a time, on one stream.

    `pages` counts all pages of the pool, page 0 (padding) included. A row of `page_rows` has `pages_per_row` numbers,
    so a position is below pages_per_row * page_size. `max_tokens` bounds T, and `max_seqs` S, of `forward`. Whoever
    launches or replays a pass calls `attention.plan` before.
    """

    def __init__(
        self,
        info: ModelInfo,
        weights: Weights,
        dtype: str,
        page_size: int,
        pages: int,
        pages_per_row: int,
        max_tokens: int,
        max_seqs: int,
        device: str = "cuda",
        attention: Attention | None = None,
        progress: Progress | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        """attention: None for the project's own. taps: the layers, from 0, whose states drafters read in `tapped`.

        Raises ValueError for a dtype or a shape that the kernels do not support, MemoryError if the device is too
        small.
        """
        _check(info, dtype)
        self.info = info
        self.dtype = dtype
        self.pages_per_row = pages_per_row
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.taps = tuple(taps)
        self._device = torch.device(device)
        kind = DTYPES[dtype]
        if kind is torch.float32:
            torch.backends.cuda.matmul.allow_tf32 = False  # 10 bits of a product's factors: not what was asked for
        pool = (info.num_layers, pages, page_size, info.num_kv_heads, info.head_dim)
        try:
            self.k_cache = torch.zeros(pool, dtype=kind, device=self._device)
            self.v_cache = torch.zeros(pool, dtype=kind, device=self._device)
            self.attention = attention or self._own_attention()
            self._work = Workspace.of(info, max_tokens, kind, self._device)
            # f32[tokens, taps, hidden]: behind a pass, the states of its tokens behind each of the tapped layers.
            states = (max_tokens if self.taps else 0, len(self.taps), info.hidden_size)
            self.tapped = torch.zeros(states, dtype=torch.float32, device=self._device)
            self._selected = torch.zeros((max_seqs, info.hidden_size), dtype=kind, device=self._device)
            tables = rope_tables(info.head_dim, pages_per_row * page_size, info.rope_theta, info.rope_scaling)
            self._cosines, self._sines = (torch.from_numpy(table).to(self._device) for table in tables)
            self._load(Loader(weights, kind, self._device), progress)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def _own_attention(self) -> Attention:
        info = self.info
        scratch = torch.zeros(scratch_floats(info.head_dim), dtype=torch.float32, device=self._device)
        return PagedAttention(info.num_heads, info.num_kv_heads, info.head_dim, scratch)

    def _load(self, loader: Loader, progress: Progress | None) -> None:
        info = self.info
        self._layers: list[Layer] = []
        for number in range(info.num_layers):
            if progress is not None:
                progress(f"loading layer {number + 1}/{info.num_layers}")
            self._layers.append(self._load_layer(loader, number))
        self._final_norm = loader.vector(FINAL_NORM, info.hidden_size)
        head = loader.matrix([EMBEDDING], [info.vocab_size], info.hidden_size)
        self.embedding = head.t()  # [vocab, hidden]
        self.head = head  # [hidden, vocab]
        if not info.tie_word_embeddings:
            self.head = loader.matrix([HEAD], [info.vocab_size], info.hidden_size)

    def _load_layer(self, loader: Loader, number: int) -> Layer:
        info = self.info
        base = f"model.layers.{number}."
        attention, mlp = base + "self_attn.", base + "mlp."
        hidden, ffn = info.hidden_size, info.intermediate_size
        queries, keys = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
        q_norm = k_norm = None
        if info.qk_norm:
            q_norm = loader.vector(attention + "q_norm.weight", info.head_dim)
            k_norm = loader.vector(attention + "k_norm.weight", info.head_dim)
        return Layer(
            input_norm=loader.vector(base + "input_layernorm.weight", hidden),
            qkv=loader.matrix([f"{attention}{n}_proj.weight" for n in "qkv"], [queries, keys, keys], hidden),
            q_norm=q_norm,
            k_norm=k_norm,
            attended=loader.matrix([attention + "o_proj.weight"], [hidden], queries),
            post_norm=loader.vector(base + "post_attention_layernorm.weight", hidden),
            gate_up=loader.matrix([mlp + "gate_proj.weight", mlp + "up_proj.weight"], [ffn, ffn], hidden),
            down=loader.matrix([mlp + "down_proj.weight"], [hidden], ffn),
            k_cache=self.k_cache[number],
            v_cache=self.v_cache[number],
        )

    # --- use ---

    def warm(self) -> None:
        """Run passes of padding, as short and as long as can be and between, and have attention compile the rest.

        Libraries choose the kernel of a product by its size, and load it when it first comes. Waits for the device.
        """
        most = min(self.max_tokens, self.pages_per_row * self.k_cache.shape[2])
        self.attention.plan(None, 1)
        ints = partial(torch.zeros, dtype=torch.int32, device=self._device)
        page_rows, logits = ints((1, self.pages_per_row)), torch.zeros((1, self.head.shape[1]), device=self._device)
        positions = torch.arange(most, dtype=torch.int32, device=self._device)
        extents = Extents(ints(2), ints(1) + 1, most)  # a row without tokens, in the padding page
        for count in sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}):
            some = extents._replace(longest=count)
            self._pass_padding(ints(count), positions[:count], ints(count), page_rows, ints(1), logits, some)
        caches = (self.k_cache[0], self.v_cache[0])
        self.attention.warm(self._work.queries, *caches, page_rows, ints(most), positions, extents, self._work.attended)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _pass_padding(self, *given: Any) -> None:
        """Every kind of pass there is, with what `forward` is given."""
        self.forward(*given)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        seqs: Tensor,
        page_rows: Tensor,
        logit_rows: Tensor,
        logits: Tensor,
        extents: Extents,
    ) -> None:
        """Queue a pass of T tokens on the current stream: keys and values are written, and `logits` filled.

        tokens, positions, seqs (row of page_rows) i32[T]; page_rows i32[R, pages_per_row]; logit_rows (rows of the
        pass) i32[S]; logits f32[S, vocab]. Token t attends keys 0..positions[t] of its own row, those of this pass
        included. May be captured. Raises ValueError for a pass that exceeds the buffers.
        """
        work = self._room(len(tokens), len(logit_rows))
        triton_rows.embed(tokens, self.embedding, work.residual)
        triton_rows.rmsnorm(work.residual, self._layers[0].input_norm, self.info.rms_eps, work.normed)
        self._run(work, positions, seqs, page_rows, logit_rows, logits, extents)

    def _room(self, count: int, wanted: int) -> Workspace:
        """Where a pass works. Raises ValueError for one that exceeds the buffers."""
        if not (1 <= count <= self.max_tokens and wanted <= self.max_seqs):
            raise ValueError(f"a pass of {count} tokens and {wanted} logit rows exceeds the buffers")
        return self._work.first(count)

    def _run(
        self,
        work: Workspace,
        positions: Tensor,
        seqs: Tensor,
        page_rows: Tensor,
        logit_rows: Tensor,
        logits: Tensor,
        extents: Extents,
        last_seen: Tensor | None = None,
    ) -> None:
        """The layers, from what `residual` and `normed` hold, and the logits. last_seen i32[T]: the last key that each
        token attends, where that is not its own. See `forward` for the other arguments.
        """
        count, wanted, eps = len(positions), len(logit_rows), self.info.rms_eps
        last = positions if last_seen is None else last_seen
        self.attention.begin(page_rows, extents)
        norms_behind = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        for number, (layer, norm_behind) in enumerate(zip(self._layers, norms_behind, strict=True)):
            torch.mm(work.normed, layer.qkv, out=work.qkv)
            triton_rows.rope_write(
                *(work.qkv, positions, seqs, page_rows, self._cosines, self._sines),
                *(layer.q_norm, layer.k_norm, eps, work.queries, layer.k_cache, layer.v_cache),
            )
            caches = (layer.k_cache, layer.v_cache)
            self.attention.run(work.queries, *caches, page_rows, seqs, last, extents, work.attended)
            torch.mm(work.attended.flatten(1), layer.attended, out=work.added)
            triton_rows.add_rmsnorm(work.added, work.residual, layer.post_norm, eps, work.normed)
            torch.mm(work.normed, layer.gate_up, out=work.gate_up)
            triton_rows.silu_mul(work.gate_up, work.gated)
            torch.mm(work.gated, layer.down, out=work.added)
            triton_rows.add_rmsnorm(work.added, work.residual, norm_behind, eps, work.normed)
            if number in self.taps:
                self.tapped[:count, self.taps.index(number)].copy_(work.residual)
        if wanted:
            selected = self._selected[:wanted]
            triton_rows.embed(logit_rows, work.normed, selected)  # a lookup as well, and one that masks its indices
            self._project(selected, logits)

    def _project(self, selected: Tensor, logits: Tensor) -> None:
        """logits f32[S, vocab] = selected [S, hidden] * head. In bfloat16 the two best could be equal."""
        if selected.dtype == torch.float32:
            torch.mm(selected, self.head, out=logits)
        elif self._device.type != "cpu":
            torch.mm(selected, self.head, out_dtype=torch.float32, out=logits)
        else:  # where torch has no such product
            torch.mm(selected.float(), self.head.float(), out=logits)
