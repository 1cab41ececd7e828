"""Triton kernels for paged attention: windows of a few tokens and chunks of prompts by one code, on CUDA.

Owns their numerics. The host knows shapes only (see `attention_cut`), lengths stay on the device: so one captured
launch serves all lengths. A program has a block of neighbouring tokens of one row and all query heads that share one
key/value head, as one tile of queries. Where programs are few, the keys of a row are cut into splits that are worked
on at the same time, and a second kernel adds them up. Reads pages of its own rows only, up to the last key that a
token sees. Never allocates, never looks at a length on the host.
"""

import math
from typing import Any

import triton
import triton.language as tl

from gpu.kernels.attention_cut import (
    PROGRAMS,
    QUERY_TILES,
    SPLIT_KEYS,
    SPLITS_MAX,
    Cut,
    keys_of,
    scratch_floats,
    stages_of,
    variants,
)
from gpu.kernels.step_kernels import Extents
from gpu.kernels.triton_spec import KernelSpec

Array = Any  # torch.Tensor
SPLIT_STEP = tl.constexpr(64)  # splits begin at multiples of it; a multiple of every KEYS
SPLIT_LEAST = tl.constexpr(SPLIT_KEYS)
ROWS_AT_ONCE = tl.constexpr(128)
LOWEST = tl.constexpr(-3.4028234e38)  # of float32: a difference from it is no NaN, as one of infinities is


@triton.jit
def _split_keys(keys, splits):  # type: ignore[no-untyped-def]
    """Keys of each split of a row, in both kernels alike."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, splits), SPLIT_STEP) * SPLIT_STEP, SPLIT_LEAST)


@triton.jit
def _find_row(starts, rows, block, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row of block number `block`, where row r begins with block starts[r] // TOKENS + r.

    A row has one block more than it may need, and never too few.
    """
    found = 0
    for first in range(0, rows, ROWS_AT_ONCE):
        row = first + tl.arange(0, ROWS_AT_ONCE)
        begin = tl.load(starts + row, mask=row < rows, other=0) // TOKENS + row
        found += tl.sum(((row < rows) & (begin <= block)).to(tl.int32), axis=0)
    return found - 1


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    tile, position, k_head, v_head, pages, low, high, scale, SLOT: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr
):
    """Keys low..high of one row for a tile of queries [N, DIM], which see keys up to position[N]. No query sees keys
    from `high` on, or `high - low` is a multiple of KEYS.

    Returns largest score [N] (LOWEST if no key is seen), sum of weights [N], weighted sum of values [N, DIM]. A slot of
    the cache has SLOT numbers.
    """
    dim = tl.arange(0, tile.shape[1])
    top = tl.full((tile.shape[0],), LOWEST, tl.float32)
    total = tl.zeros((tile.shape[0],), tl.float32)
    gathered = tl.zeros((tile.shape[0], tile.shape[1]), tl.float32)
    for start in range(low, high, KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < high
        page = tl.load(pages + key // PAGE, mask=there, other=0).to(tl.int64)
        slot = (page * PAGE + key % PAGE)[:, None] * SLOT + dim[None, :]
        k = tl.load(k_head + slot, mask=there[:, None], other=0.0)
        v = tl.load(v_head + slot, mask=there[:, None], other=0.0)  # never what lies behind the last key: it may be NaN
        scores = tl.dot(tile, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * fade + tl.sum(weights, axis=1)
        gathered = tl.dot(weights.to(v.dtype), v, gathered * fade[:, None], input_precision="ieee")
        top = higher
    return top, total, gathered


@triton.jit(do_not_specialize=["page_stride", "rows", "blocks", "splits"])
def attention_kernel(  # type: ignore[no-untyped-def]
    q,
    k_layer,
    v_layer,
    page_rows,
    positions,
    starts,
    ends,
    out,
    sums,
    page_stride,
    rows,
    blocks,
    splits,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Attention of one block of tokens over one split of its row's keys.

    EVEN: every row has `blocks` blocks; otherwise the row of a block is looked for. With SPLIT, weighted sums of
    values go to out f32[T, heads, splits, DIM], and largest score and sum of weights to sums f32[T, heads, splits, 2].
    """
    TOKENS: tl.constexpr = QUERIES // GROUP
    number, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = number // blocks if EVEN else _find_row(starts, rows, number, TOKENS)
    begin = tl.load(starts + row)
    block = number % blocks if EVEN else number - begin // TOKENS - row
    query = tl.arange(0, QUERIES)
    first = begin + block * TOKENS
    token = first + query // GROUP
    live = (query < TOKENS * GROUP) & (token < tl.load(starts + row + 1))
    position = tl.load(positions + token, mask=live, other=-1)
    split_keys = _split_keys(tl.load(ends + row), splits)
    low = split * split_keys if SPLIT else 0
    high = tl.max(position, axis=0) + 1
    high = tl.minimum(high, low + split_keys) if SPLIT else high
    if low < high:
        dim = tl.arange(0, DIM)[None, :]
        line = query // GROUP * (GROUP * KV_HEADS) + head * GROUP + query % GROUP  # from that of `first` on: fits i32
        base = first.to(tl.int64) * (GROUP * KV_HEADS)
        tile = tl.load(q + base * DIM + (line[:, None] * DIM + dim), mask=live[:, None], other=0.0)
        k_head, v_head, pages = k_layer + head * DIM, v_layer + head * DIM, page_rows + row.to(tl.int64) * page_stride
        top, total, gathered = _attend(
            tile, position, k_head, v_head, pages, low, high, scale, KV_HEADS * DIM, PAGE, KEYS
        )
        if SPLIT:
            seen = live & (position >= low)
            base, line = base * splits, line * splits + split
            tl.store(out + base * DIM + (line[:, None] * DIM + dim), gathered, mask=seen[:, None])
            tl.store(sums + 2 * base + 2 * line, top, mask=seen)
            tl.store(sums + 2 * base + 2 * line + 1, total, mask=seen)
        else:
            attended = (gathered / tl.where(live, total, 1.0)[:, None]).to(out.dtype.element_ty)
            tl.store(out + base * DIM + (line[:, None] * DIM + dim), attended, mask=live[:, None])


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(  # type: ignore[no-untyped-def]
    parts,
    sums,
    seqs,
    positions,
    ends,
    out,
    splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS_MOST: tl.constexpr,
):
    """out[t, head] from what the splits made of it: those that hold a key which token t sees. See attention_kernel."""
    t, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(seqs + t)
    split_keys = _split_keys(tl.load(ends + row), splits)
    split, dim = tl.arange(0, SPLITS_MOST), tl.arange(0, DIM)
    made = (split < splits) & (split * split_keys <= tl.load(positions + t))
    line = (t.to(tl.int64) * HEADS + head) * splits + split
    top = tl.load(sums + 2 * line, mask=made, other=float("-inf"))
    total = tl.load(sums + 2 * line + 1, mask=made, other=0.0)
    part = tl.load(parts + line[:, None] * DIM + dim[None, :], mask=made[:, None], other=0.0)
    share = tl.exp(top - tl.max(top, axis=0))
    attended = tl.sum(share[:, None] * part, axis=0) / tl.sum(share * total, axis=0)
    tl.store(out + (t.to(tl.int64) * HEADS + head) * DIM + dim, attended.to(out.dtype.element_ty))


class PagedAttention:
    """Attention over a paged cache with all lengths on the device; see `attention_contract`."""

    needs_host_lengths = False

    def __init__(self, heads: int, kv_heads: int, dim: int, scratch: Array) -> None:
        """scratch f32[scratch_floats(dim)]: private to the stream that `run` queues on.

        Raises ValueError for heads that do not share evenly or are too many for a tile, for heads of other sizes than
        16, 32, 64 and 128, and for too little scratch.
        """
        if heads % kv_heads or heads // kv_heads > QUERY_TILES[0]:
            raise ValueError(f"{heads} query heads over {kv_heads} key/value heads are not supported")
        if dim not in (16, 32, 64, 128):
            raise ValueError(f"heads of {dim} dims are not supported")
        if scratch.numel() < scratch_floats(dim):
            raise ValueError(f"attention needs {scratch_floats(dim)} float32 of scratch, and got {scratch.numel()}")
        self._heads, self._kv_heads, self._dim = heads, kv_heads, dim
        parts = PROGRAMS * QUERY_TILES[-1] * dim
        self._parts, self._sums = scratch[:parts], scratch[parts:]

    def plan(self, lengths: Any, rows: int) -> None:
        """Nothing: lengths are read on the device."""

    def begin(self, page_rows: Array, extents: Extents) -> None:
        """Nothing: layers share no work."""

    def run(
        self,
        q: Array,
        k_layer: Array,
        v_layer: Array,
        page_rows: Array,
        seqs: Array,
        positions: Array,
        extents: Extents,
        out: Array,
    ) -> None:
        """out [T, HQ, D]: attention of every token over keys 0..positions[t] of its row. Queues one or two kernels.

        For the arguments see `attention_contract`.
        """
        tokens, (rows, width), page = q.shape[0], page_rows.shape, k_layer.shape[1]
        if tokens:
            group = self._heads // self._kv_heads
            cut = Cut.of(tokens, rows, extents.longest, width * page, group, self._kv_heads, q.element_size())
            self._queue(cut, tokens, q, k_layer, v_layer, page_rows, seqs, positions, extents, out)

    def warm(
        self,
        q: Array,
        k_layer: Array,
        v_layer: Array,
        page_rows: Array,
        seqs: Array,
        positions: Array,
        extents: Extents,
        out: Array,
    ) -> None:
        """Compile and load every variant that a pass of any shape can need, by launches of no program at all."""
        context = page_rows.shape[1] * k_layer.shape[1]
        for cut in variants(context, q.element_size()):
            self._queue(cut, 0, q, k_layer, v_layer, page_rows, seqs, positions, extents, out)

    def _queue(
        self,
        cut: Cut,
        tokens: int,
        q: Array,
        k_layer: Array,
        v_layer: Array,
        page_rows: Array,
        seqs: Array,
        positions: Array,
        extents: Extents,
        out: Array,
    ) -> None:
        group = self._heads // self._kv_heads
        attention_kernel[(cut.blocks, self._kv_heads, cut.splits)](
            *(q, k_layer, v_layer, page_rows, positions, extents.starts, extents.ends),
            *(self._parts if cut.splits > 1 else out, self._sums),
            *(page_rows.stride(0), page_rows.shape[0], cut.row_blocks, cut.splits, 1 / math.sqrt(self._dim)),
            KV_HEADS=self._kv_heads,
            GROUP=group,
            DIM=self._dim,
            PAGE=k_layer.shape[1],
            QUERIES=cut.queries,
            KEYS=keys_of(cut.queries, self._dim, q.element_size()),
            EVEN=cut.row_blocks > 0,
            SPLIT=cut.splits > 1,
            num_warps=4,
            num_stages=stages_of(q.element_size()),
        )
        if cut.splits > 1:
            combine_kernel[(tokens, self._heads)](
                *(self._parts, self._sums, seqs, positions, extents.ends, out, cut.splits),
                HEADS=self._heads,
                DIM=self._dim,
                SPLITS_MOST=SPLITS_MAX,
                num_warps=4,
            )


def _attention_spec(
    dtype: str, kv_heads: int, group: int, dim: int, queries: int, *, even: bool, split: bool
) -> KernelSpec:
    data, ints, reals = "*" + dtype, "*i32", "*fp32"
    signature = {
        **dict.fromkeys(("q", "k_layer", "v_layer"), data),
        **dict.fromkeys(("page_rows", "positions", "starts", "ends"), ints),
        **dict.fromkeys(("page_stride", "rows", "blocks", "splits"), "i32"),
        "out": reals if split else data,
        "sums": reals,
        "scale": "fp32",
    }
    shape = {"KV_HEADS": kv_heads, "GROUP": group, "DIM": dim, "PAGE": 16, "QUERIES": queries}
    itemsize = 4 if dtype == "fp32" else 2
    cut = {"KEYS": keys_of(queries, dim, itemsize), "EVEN": even, "SPLIT": split}
    return _spec(attention_kernel, signature, shape | cut, {"num_warps": 4, "num_stages": stages_of(itemsize)})


def _combine_spec(dtype: str, heads: int, dim: int) -> KernelSpec:
    ints = dict.fromkeys(("seqs", "positions", "ends"), "*i32")
    signature = {"parts": "*fp32", "sums": "*fp32", **ints, "out": "*" + dtype, "splits": "i32"}
    return _spec(combine_kernel, signature, {"HEADS": heads, "DIM": dim, "SPLITS_MOST": SPLITS_MAX}, {"num_warps": 4})


def _spec(kernel: Any, signature: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> KernelSpec:
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return KernelSpec(kernel, signature, constants, pointers, options)


SMOLLM2_135M, QWEN3_06B, QWEN3_8B = (3, 3, 64), (8, 2, 128), (8, 4, 128)  # KV heads, query heads of each, dims
SPECS: list[KernelSpec] = [
    _attention_spec("bf16", *SMOLLM2_135M, 16, even=True, split=True),  # decoding
    _attention_spec("bf16", *SMOLLM2_135M, 32, even=True, split=True),  # windows
    _attention_spec("bf16", *SMOLLM2_135M, 64, even=False, split=False),  # chunks
    _attention_spec("fp32", *SMOLLM2_135M, 16, even=True, split=True),
    _attention_spec("fp32", *SMOLLM2_135M, 16, even=False, split=False),
    _attention_spec("bf16", *QWEN3_06B, 16, even=True, split=True),
    _attention_spec("bf16", *QWEN3_06B, 32, even=True, split=False),
    _attention_spec("bf16", *QWEN3_06B, 64, even=False, split=True),
    _attention_spec("fp32", *QWEN3_06B, 16, even=True, split=False),
    _attention_spec("fp32", *QWEN3_06B, 16, even=False, split=True),
    _attention_spec("bf16", *QWEN3_8B, 16, even=True, split=True),
    _attention_spec("bf16", *QWEN3_8B, 64, even=False, split=False),
    _combine_spec("bf16", 9, 64),
    _combine_spec("fp32", 16, 128),
]
