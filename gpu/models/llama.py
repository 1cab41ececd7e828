"""A Llama or Qwen3 on the host: weights, cache pool and working memory, and the call that runs a pass.

Owns every buffer that a pass touches. It decides nothing about which tokens run. A row's result is the same bits
alone or among others, in one chunk or in many, with one thread or several; nothing here may break that."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpu.kernels.attention import SLOTS, scratch_floats
from gpu.kernels.gemm import COLUMNS, FLOAT32, INT8, WEIGHT_BYTES, activation_limit
from gpu.kernels.packing import PACK, Packer
from gpu.kernels.sampling import sample_rows
from gpu.kernels.team import ENTRIES, Team, aligned
from gpu.models import passes, words
from gpu.models.caches import Caches, OwnCaches
from gpu.models.packed_weights import OwnWeights, PackedWeights
from gpu.models.product_phases import GATE_ROWS
from gpu.models.rope import rope_tables
from shm.config import ModelInfo

Progress = Callable[[str], None]
Int32 = npt.NDArray[np.int32]

FAULTS = {
    words.FAULT_TOKEN: "a token id lies outside the vocabulary",
    words.FAULT_POSITION: "a position lies outside the page rows",
    words.FAULT_PAGE: "a page number lies outside the pool",
    words.FAULT_LOGIT_ROW: "a logit row is no row of the pass",
    words.FAULT_SEQUENCE: "a sequence is no row of page_rows",
}


class Weights(Protocol):
    """Where weights come from: float32, Hugging Face names and layout."""

    def tensor(self, name: str, /) -> npt.NDArray[np.float32]:
        """The tensor of that name. Raises KeyError for an unknown one."""

    def names(self) -> Any:
        """All names."""


def warm_up(dtype: str, progress: Progress | None = None, packs: bool = True) -> None:
    """Compile, or load from the disk cache, all native code for one dtype. Nothing compiles after it.

    packs: what packs weights is wanted as well.
    """
    wanted = [*ENTRIES, *([PACK[dtype]] if packs else []), passes.PASSES[dtype], passes.check_pass, sample_rows]
    for number, made in enumerate(wanted):
        if progress is not None:
            progress(f"compiling kernels {number + 1}/{len(wanted)}: {made.name}")
        made.compile()


def _check_shape(info: ModelInfo, page_size: int) -> None:
    sizes = {
        "hidden_size": (info.hidden_size, 16),
        "intermediate_size": (info.intermediate_size, 16),
        "head_dim": (info.head_dim, SLOTS),
        "page_size": (page_size, SLOTS),
    }
    for name, (value, divisor) in sizes.items():
        if value < 1 or value % divisor:
            raise ValueError(f"{name} is {value}; the host kernels need a multiple of {divisor}")
    if info.num_heads % info.num_kv_heads:
        raise ValueError("num_heads is not a multiple of num_kv_heads")


class HostLlama:
    """Weights and state of one model. Call `forward` from one thread at a time.

    `pages` counts all pages of the pool, page 0 (padding) included. A row of `page_rows` has `pages_per_row` numbers,
    so a position is below pages_per_row * page_size. `max_tokens` bounds T, and `max_seqs` S, of `forward`.
    Raises ValueError for a shape that the kernels do not support.
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
        threads: int,
        progress: Progress | None = None,
        team: Team | None = None,
        taps: Sequence[int] = (),
        widest: int = 0,
        packed: PackedWeights | None = None,
        caches: Caches | None = None,
    ) -> None:
        """team: of that many threads, if there is one already that never runs at the same time. taps: the layers, from
        0, whose states drafters read in `tapped`. widest: row that a matrix of a subclass takes. packed: where the
        weights are to be packed, if not in this process's own memory; if they are there already, `weights` is not read.
        caches: where the KV cache is to be, if not there.
        """
        if dtype not in WEIGHT_BYTES:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(WEIGHT_BYTES)}")
        _check_shape(info, page_size)
        self._packed = packed or OwnWeights()
        self._caches = caches or OwnCaches()
        warm_up(dtype, progress, not self._packed.is_complete)
        self.info = info
        self.dtype = dtype
        self.page_size = page_size
        self.pages = pages
        self.pages_per_row = pages_per_row
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.taps = tuple(taps)
        self.team = team or Team(threads)
        self._kept: list[npt.NDArray[Any]] = []  # buffers that the block refers to by address
        self._block = self.team.block(words.BLOCK_WORDS)
        self._pass = passes.PASSES[dtype]
        # keeps the interpreter lock: it is too short to give the lock away
        self._check = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(passes.check_pass.compile())
        self._set_sizes()
        self._widest = max(info.hidden_size, info.num_heads * info.head_dim, info.intermediate_size, widest)
        if progress is not None and self._packed.is_complete:
            progress("taking packed weights")
        self._load(weights, progress)
        self._allocate(threads)

    # --- construction ---

    def _set(self, index: int, value: int) -> None:
        self._block[index] = value

    def _set_float(self, index: int, value: float) -> None:
        self._block[index] = int(np.float32(value).view(np.int32))

    def _buffer(self, index: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return self._addressed(index, aligned(shape, dtype))

    def _addressed(self, index: int, made: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array, its address in a word."""
        self._kept.append(made)
        self._set(index, made.ctypes.data)
        return made

    def _set_sizes(self) -> None:
        info = self.info
        for index, value in {
            words.HIDDEN: info.hidden_size,
            words.HEADS: info.num_heads,
            words.KV_HEADS: info.num_kv_heads,
            words.HEAD_DIM: info.head_dim,
            words.FFN: info.intermediate_size,
            words.VOCAB: info.vocab_size,
            words.LAYERS: info.num_layers,
            words.PAGE_SIZE: self.page_size,
            words.PAGES: self.pages,
            words.PAGES_PER_ROW: self.pages_per_row,
            words.POSITIONS_MAX: self.pages_per_row * self.page_size,
        }.items():
            self._set(index, value)
        self._set_float(words.EPSILON, info.rms_eps)
        self._set_float(words.QUERY_FACTOR, 1 / math.sqrt(info.head_dim))
        self._set_float(words.LIMIT_HIDDEN, activation_limit(info.hidden_size))
        self._set_float(words.LIMIT_ATTENTION, activation_limit(info.num_heads * info.head_dim))
        self._set_float(words.LIMIT_FFN, activation_limit(info.intermediate_size))

    def _load(self, weights: Weights, progress: Progress | None) -> None:
        info = self.info
        norms = self._packed_buffer(words.NORMS, (2 * info.num_layers + 1, info.hidden_size))
        self._load_layers(weights, norms, progress)
        self._copy(weights, {"model.norm.weight": norms[-1]})
        embedding = self._pack(weights, ["model.embed_tokens.weight"], [info.vocab_size], info.hidden_size)
        head = embedding
        if not info.tie_word_embeddings:
            head = self._pack(weights, ["lm_head.weight"], [info.vocab_size], info.hidden_size)
        self.embedding = embedding  # addresses of its panels and scales, for a drafter that reads it too
        self._set_matrix(words.EMBEDDING, embedding)
        self._set_matrix(words.HEAD, head)
        self._set(words.HEAD_ROWS, info.vocab_size)

    def _load_layers(self, weights: Weights, norms: npt.NDArray[np.float32], progress: Progress | None) -> None:
        info = self.info
        attended, kv = info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
        table = self._layers = self._buffer(words.LAYER_TABLE, (info.num_layers, words.LAYER_WORDS), np.int64)
        if info.qk_norm:
            head_norms = self._packed_buffer(words.HEAD_NORMS, (info.num_layers, 2, info.head_dim))
            for layer in range(info.num_layers):
                names = [f"model.layers.{layer}.self_attn.{name}_norm.weight" for name in "qk"]
                self._copy(weights, dict(zip(names, head_norms[layer], strict=True)))
        for layer in range(info.num_layers):
            if progress is not None and not self._packed.is_complete:
                progress(f"packing layer {layer + 1}/{info.num_layers}")
            base = f"model.layers.{layer}."
            attention, mlp = base + "self_attn.", base + "mlp."
            both = [mlp + "gate_proj.weight", mlp + "up_proj.weight"]
            made = [
                self._pack(
                    weights, [attention + n + "_proj.weight" for n in "qkv"], [attended, kv, kv], info.hidden_size
                ),
                self._pack(weights, [attention + "o_proj.weight"], [info.hidden_size], attended),
                self._pack(weights, both, [info.intermediate_size] * 2, info.hidden_size, alternate=True),
                self._pack(weights, [mlp + "down_proj.weight"], [info.hidden_size], info.intermediate_size),
            ]
            table[layer, : words.LAYER_TAP] = [m[0] for m in made] + [m[1] for m in made]
            before, behind = base + "input_layernorm.weight", base + "post_attention_layernorm.weight"
            self._copy(weights, {before: norms[2 * layer], behind: norms[2 * layer + 1]})

    def _packed_buffer(self, index: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """float32 of the model's, its address in a word: to be filled by `_copy`, or there already."""
        return self._addressed(index, self._packed.array(shape, np.float32))

    def _copy(self, weights: Weights, targets: dict[str, npt.NDArray[np.float32]]) -> None:
        """Tensors that are kept as they are, by their names."""
        if not self._packed.is_complete:
            for name, target in targets.items():
                target[...] = weights.tensor(name)

    def _pack(
        self, weights: Weights, names: list[str], rows: list[int], k: int, alternate: bool = False
    ) -> tuple[int, int]:
        """Matrices one behind the other, or (alternate) panel by panel in turn; addresses of panels and scales."""
        columns = -(-sum(rows) // COLUMNS) * COLUMNS
        panels = self._packed.array((columns * k * WEIGHT_BYTES[self.dtype],), np.uint8)
        scales = self._packed.array((columns,), np.float32)
        self._kept += [panels, scales]
        first = 0
        for number, (name, count) in enumerate(zip(names, rows, strict=True)):
            if self._packed.is_complete:
                break
            matrix = weights.tensor(name)
            if matrix.shape != (count, k):
                raise ValueError(f"{name} has the shape {matrix.shape}, expected {(count, k)}")
            if alternate:
                self._packer.pack(matrix, panels, scales, number, len(names))
            else:
                self._packer.pack(matrix, panels, scales, first)
            first += count // COLUMNS
        return panels.ctypes.data, scales.ctypes.data

    @cached_property
    def _packer(self) -> Packer:
        return Packer(self.team, self.dtype, self._widest)

    def _set_matrix(self, index: int, packed: tuple[int, int]) -> None:
        """Panels in one word, scales in the next."""
        self._set(index, packed[0])
        self._set(index + 1, packed[1])

    def _allocate(self, threads: int) -> None:
        info, rows = self.info, self.max_tokens
        attended = info.num_heads * info.head_dim
        positions = self.pages_per_row * self.page_size
        cache = np.float32 if self.dtype == FLOAT32 else np.uint16
        pool = (info.num_layers, self.pages, info.num_kv_heads, info.head_dim * self.page_size)
        self.k_cache = self._addressed(words.K_CACHE, self._caches.array(pool, cache))
        self.v_cache = self._addressed(words.V_CACHE, self._caches.array(pool, cache))
        cosines, sines = rope_tables(info.head_dim, positions, info.rope_theta, info.rope_scaling)
        self._buffer(words.COSINES, cosines.shape, np.float32)[:] = cosines
        self._buffer(words.SINES, sines.shape, np.float32)[:] = sines
        # f32[tokens, hidden]: behind a pass, the state of each of its tokens behind the last layer.
        self.residual = self._buffer(words.RESIDUAL, (rows, info.hidden_size), np.float32)
        # f32[tokens, taps, hidden]: behind a pass, their states behind each of the tapped layers.
        self.tapped = aligned((rows if self.taps else 0, len(self.taps), info.hidden_size), np.float32)
        self._set(words.TAP_STRIDE, 4 * len(self.taps) * info.hidden_size)
        for number, layer in enumerate(self.taps):
            self._layers[layer, words.LAYER_TAP] = self.tapped.ctypes.data + 4 * number * info.hidden_size
        condensed = np.int16 if self.dtype == INT8 else np.float32
        self._buffer(words.ACTIVATIONS, (max(rows, self.max_seqs), self._widest), condensed)
        self._buffer(words.ROW_SCALES, (max(rows, self.max_seqs),), np.float32)
        self._buffer(words.QKV, (rows, attended + 2 * info.num_kv_heads * info.head_dim), np.float32)
        self._buffer(words.ATTENDED, (rows, attended), np.float32)
        self._buffer(words.GATED, (rows, info.intermediate_size), np.float32)
        attention = scratch_floats(info.num_heads, info.head_dim, positions)
        products = COLUMNS * max(2 * GATE_ROWS, rows, self.max_seqs)
        floats = max(attention, products, self._widest)
        floats = (floats + 31) // 16 * 16 + 16
        self._buffer(words.SCRATCH, (threads, floats), np.float32)
        self._set(words.SCRATCH_BYTES, 4 * floats)

    # --- use ---

    def forward(self, *given: Any, **named: Any) -> None:
        """Run T tokens, write their keys and values, and fill `logits`: see `describe` for what is given."""
        self.describe(*given, **named)
        self.team.run(self._pass, self._block)

    def describe(
        self,
        tokens: Int32,
        positions: Int32,
        seqs: Int32,
        page_rows: Int32,
        logit_rows: Int32,
        logits: npt.NDArray[np.float32],
        extents: Any = None,
        last_seen: Int32 | None = None,
    ) -> None:
        """Say what the next job works on: T tokens, their places, and where their logits shall be.

        tokens, positions, seqs (row of page_rows): int32 [T]; page_rows: int32 [R, pages_per_row]; logit_rows (rows of
        the pass): int32 [S]; logits: float32 [S, vocab]. All contiguous. Token t attends keys 0..positions[t] of its
        own sequence, those of this pass included. extents: for models that work sequence by sequence, which this one
        does not. last_seen: int32 [T], the last key that each token attends, where that is not its own. Raises
        ValueError, before anything runs, for a number out of range.
        """
        count, wanted = len(tokens), len(logit_rows)
        last = positions if last_seen is None else last_seen
        arrays = (tokens, positions, seqs, page_rows, logit_rows, last)
        if any(a.dtype != np.int32 or not a.flags.c_contiguous for a in arrays):
            raise ValueError("the integer arguments of forward must be contiguous int32")
        if not (1 <= count <= self.max_tokens and wanted <= max(self.max_seqs, self.max_tokens)):
            raise ValueError(f"a pass of {count} tokens and {wanted} logit rows exceeds the buffers")
        if (
            len(positions) != count
            or len(last) != count
            or len(seqs) != count
            or page_rows.shape[1] != self.pages_per_row
        ):
            raise ValueError("the arguments of forward do not fit together")
        if (
            logits.dtype != np.float32
            or not logits.flags.c_contiguous
            or logits.shape != (wanted, int(self._block[words.HEAD_ROWS]))
        ):
            raise ValueError("logits must be contiguous float32 [S, vocab]")
        block = self._block
        block[words.TOKEN_COUNT], block[words.LOGIT_COUNT] = count, wanted
        block[words.TOKENS], block[words.POSITIONS] = tokens.ctypes.data, positions.ctypes.data
        block[words.LAST_SEEN] = last.ctypes.data
        block[words.SEQUENCES], block[words.PAGE_ROWS] = seqs.ctypes.data, page_rows.ctypes.data
        block[words.SEQUENCES_MAX] = len(page_rows)
        block[words.LOGIT_ROWS], block[words.LOGITS] = logit_rows.ctypes.data, logits.ctypes.data
        self._check(block.ctypes.data)
        fault = int(block[words.FAULT])
        if fault:
            raise ValueError(FAULTS[fault])

    def close(self) -> None:
        """End the helper threads."""
        self.team.close()
