"""Paged attention of one query row over its own keys; query heads that share a key/value head are worked on together.

Owns the order of the sums. Scores of all keys first, then the softmax over them, then the weighted sum of the values:
keys 0 to n-1 in order, even and odd ones (and even and odd dims of the scores) as two chains that are added at the
end. The result depends on the query and its n keys only: decoding and prefill run the same code, and how many heads
share a call never shows. Slots behind the last key are never used, whatever they hold. Pages are the outer loops,
because memory is read fastest in long stretches: a page holds all heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from gpu.kernels.emit import (
    F32,
    I64,
    VF32,
    VI32,
    bf16_halves,
    const,
    emitted,
    fma_value,
    interleave,
    load_at,
    outlined,
    pointer,
    prefetch,
    splat_value,
)
from gpu.kernels.native import kernel
from gpu.kernels.rows import exp8
from gpu.kernels.vectors import load_f32x8, load_i32, max_lanes, splat, store_f32, store_f32x8, sum_lanes, vmax

SLOTS = 16  # keys, or dims of a value, that are worked on at once; page size and head size are multiples of it
GROUP_MAX = 3  # query heads at once: 3 x 2 vectors x 2 chains make 12 accumulators
BFLOAT16, FLOAT32 = "bfloat16", "float32"
CACHE_BYTES = {BFLOAT16: 2, FLOAT32: 4}
MINUS_INFINITY = np.float32(-np.inf)

Values = list[ir.Value]
Sums = list[list[Values]]  # [head][vector][chain]


def _load_16(b: ir.IRBuilder, storage: str, base: ir.Value, offset: ir.Value) -> tuple[ir.Value, ir.Value]:
    """16 cached numbers as two vectors: even and odd ones for bfloat16, first and last eight for float32."""
    if storage == BFLOAT16:
        return bf16_halves(b, load_at(b, base, offset, VI32, 32))
    return load_at(b, base, offset, VF32, 32), load_at(b, base, b.add(offset, const(32)), VF32, 32)


def _new_sums(b: ir.IRBuilder, heads: int) -> Sums:
    zero = ir.Constant(VF32, [0.0] * 8)
    sums = [[[cgutils.alloca_once_value(b, zero) for _ in (0, 1)] for _ in (0, 1)] for _ in range(heads)]
    for each in [s for head in sums for pair in head for s in pair]:
        b.store(zero, each)
    return sums


def _add_product(b: ir.IRBuilder, sums: Sums, chain: int, factors: Values, vectors: tuple[ir.Value, ir.Value]) -> None:
    for head, factor in enumerate(factors):
        for i in (0, 1):
            place = sums[head][i][chain]
            b.store(fma_value(b, factor, vectors[i], b.load(place)), place)


def _totals(b: ir.IRBuilder, storage: str, head: list[Values]) -> tuple[ir.Value, ir.Value]:
    first, second = (b.fadd(b.load(chains[0]), b.load(chains[1])) for chains in head)
    return interleave(b, first, second) if storage == BFLOAT16 else (first, second)


def _scores(storage: str, heads: int) -> Any:
    def scores(
        b: ir.IRBuilder,
        q: ir.Value,  # address of the first head's query
        q_stride: ir.Value,  # bytes from head to head
        k: ir.Value,  # address of the first of 16 slots, dim 0
        k_stride: ir.Value,  # bytes from dim to dim
        dims: ir.Value,
        out: ir.Value,  # 16 float32 for each head
        out_stride: ir.Value,
        k_next: ir.Value,  # address of what will be read soon, fetched in the same steps
    ) -> None:
        sums = _new_sums(b, heads)
        queries = [pointer(b, b.add(q, b.mul(q_stride, const(h)))) for h in range(heads)]
        keys, soon = pointer(b, k), pointer(b, k_next)
        with cgutils.for_range_slice(b, const(0), dims, const(2), I64) as (d, _):
            for line in range(0, 2 * SLOTS * CACHE_BYTES[storage], 64):
                prefetch(b, soon, b.add(b.mul(d, k_stride), const(line)))
            for chain in (0, 1):
                dim = b.add(d, const(chain))
                vectors = _load_16(b, storage, keys, b.mul(dim, k_stride))
                factors = [splat_value(b, load_at(b, x, b.shl(dim, const(2)), F32, 4)) for x in queries]
                _add_product(b, sums, chain, factors, vectors)
        for h in range(heads):
            place = b.add(out, b.mul(out_stride, const(h)))
            for i, total in enumerate(_totals(b, storage, sums[h])):
                b.store(total, pointer(b, b.add(place, const(32 * i)), VF32), align=4)

    return outlined(f"scores_{heads}_{storage}", scores)


def _weighted_values(storage: str, heads: int) -> Any:
    def weighted_values(
        b: ir.IRBuilder,
        p: ir.Value,  # address of the first head's weight of slot 0, float32 per slot
        p_stride: ir.Value,
        v: ir.Value,  # address of slot 0, dim 0
        dims: ir.Value,
        slots: ir.Value,
        running: ir.Value,  # address of the first head's running sums, 32 float32 for each 16 dims
        running_stride: ir.Value,
        v_next: ir.Value,  # address of what will be read soon, fetched in the same steps
    ) -> None:
        """Add the values of up to a page of slots to the running sums; slot 0 is an even one."""
        weights = [pointer(b, b.add(p, b.mul(p_stride, const(h)))) for h in range(heads)]
        values, soon = pointer(b, v), pointer(b, v_next)
        slot_bytes = b.mul(dims, const(CACHE_BYTES[storage]))
        pairs = b.and_(slots, const(-2))
        with cgutils.for_range_slice(b, const(0), dims, const(SLOTS), I64) as (dim, _):
            offset = b.mul(dim, const(CACHE_BYTES[storage]))
            places = [
                b.add(running, b.add(b.mul(running_stride, const(h)), b.shl(dim, const(3)))) for h in range(heads)
            ]
            sums = _new_sums(b, heads)
            _each(sums, places, lambda place, at: b.store(b.load(pointer(b, at, VF32), align=4), place), b)

            def add_slot(slot: ir.Value, chain: int, offset: ir.Value = offset, sums: Sums = sums) -> None:
                factors = [splat_value(b, load_at(b, w, b.shl(slot, const(2)), F32, 4)) for w in weights]
                vectors = _load_16(b, storage, values, b.add(b.mul(slot, slot_bytes), offset))
                _add_product(b, sums, chain, factors, vectors)

            with cgutils.for_range_slice(b, const(0), pairs, const(2), I64) as (slot, _):
                ahead = b.add(b.mul(offset, slots), b.mul(slot, const(SLOTS * CACHE_BYTES[storage])))
                for line in range(0, 2 * SLOTS * CACHE_BYTES[storage], 64):
                    prefetch(b, soon, b.add(ahead, const(line)))
                add_slot(slot, 0)
                add_slot(b.add(slot, const(1)), 1)
            with cgutils.if_unlikely(b, b.icmp_signed("<", pairs, slots)):
                add_slot(pairs, 0)
            _each(sums, places, lambda place, at: b.store(b.load(place), pointer(b, at, VF32), align=4), b)

    return outlined(f"weighted_values_{heads}_{storage}", weighted_values)


def _each(sums: Sums, places: Values, act: Callable[[ir.Value, ir.Value], Any], b: ir.IRBuilder) -> None:
    """Act on every accumulator and the address of its place in memory: vectors, then chains, 32 bytes apart."""
    for head, base in zip(sums, places, strict=True):
        for i, place in enumerate(chain for vector in head for chain in vector):
            act(place, b.add(base, const(32 * i)))


def _finish(storage: str) -> Any:
    def finish(b: ir.IRBuilder, running: ir.Value, dims: ir.Value, inverse: ir.Value, out: ir.Value) -> None:
        """Running sums of one head, chains added, times 1 / sum of weights."""
        scale = splat_value(b, b.load(pointer(b, inverse, F32), align=4))
        with cgutils.for_range_slice(b, const(0), dims, const(SLOTS), I64) as (dim, _):
            sums = _new_sums(b, 1)
            base = b.add(running, b.shl(dim, const(3)))
            _each(sums, [base], lambda place, at: b.store(b.load(pointer(b, at, VF32), align=4), place), b)
            for i, total in enumerate(_totals(b, storage, sums[0])):
                place = b.add(b.add(out, b.shl(dim, const(2))), const(32 * i))
                b.store(b.fmul(total, scale), pointer(b, place, VF32), align=4)

    finish.__name__ += f"_{storage}"  # kernels that use it are told apart by it
    return emitted(types.void, *[types.int64] * 4)(finish)


def scratch_floats(heads: int, dim: int, keys: int) -> int:
    """Working memory of `attend` for `heads` query heads of `dim` and up to `keys` keys, in float32."""
    return heads + SLOTS + 2 * dim * heads + heads * (keys + 2 * SLOTS)


@kernel
def heads_at_once(left: int) -> int:
    """Of `left` query heads that share a key/value head, how many the next micro kernel takes."""
    return 2 if left == 4 else min(left, GROUP_MAX)


@kernel
def softmax_weights(scores: int, keys: int, inverse: int) -> None:
    """Turn scores (float32, room for a multiple of 16) into exp(score - largest); 1 / their sum goes to `inverse`."""
    padded = (keys + SLOTS - 1) // SLOTS * SLOTS
    for i in range(keys, padded):
        store_f32(scores + 4 * i, MINUS_INFINITY)
    largest = load_f32x8(scores)
    for i in range(32, 4 * padded, 32):
        largest = vmax(load_f32x8(scores + i), largest)
    top = splat(max_lanes(largest))
    even, odd = splat(0.0), splat(0.0)
    for i in range(0, 4 * padded, 64):
        low = exp8(load_f32x8(scores + i) - top)
        high = exp8(load_f32x8(scores + i + 32) - top)
        store_f32x8(scores + i, low)
        store_f32x8(scores + i + 32, high)
        even, odd = even + low, odd + high
    store_f32(inverse, np.float32(1.0) / sum_lanes(even + odd))


def _score_page(storage: str) -> Callable[..., None]:
    """Scores of one key/value head's queries against the slots of one page."""
    scores_1, scores_2, scores_3 = (_scores(storage, h) for h in range(1, GROUP_MAX + 1))
    size = CACHE_BYTES[storage]

    @kernel
    def score_page(
        q: int, group: int, dim: int, slots: int, k: int, k_next: int, page_size: int, out: int, stride: int
    ) -> None:
        for slot in range(0, slots, SLOTS):
            left, queries, place = group, q, out + 4 * slot
            block, block_next = k + size * slot, k_next + size * slot
            while left > 0:
                count = heads_at_once(left)
                if count == 3:
                    scores_3(queries, 4 * dim, block, size * page_size, dim, place, stride, block_next)
                elif count == 2:
                    scores_2(queries, 4 * dim, block, size * page_size, dim, place, stride, block_next)
                else:
                    scores_1(queries, 4 * dim, block, size * page_size, dim, place, stride, block_next)
                queries += 4 * dim * count
                place += stride * count
                left -= count

    return score_page


def _add_page(storage: str) -> Callable[..., None]:
    """Weighted values of one page, added to the running sums of one key/value head's queries."""
    values_1, values_2, values_3 = (_weighted_values(storage, h) for h in range(1, GROUP_MAX + 1))

    @kernel
    def add_page(
        weights: int, stride: int, group: int, dim: int, slots: int, v: int, v_next: int, running: int
    ) -> None:
        left, sums = group, running
        while left > 0:
            count = heads_at_once(left)
            if count == 3:
                values_3(weights, stride, v, dim, slots, sums, 8 * dim, v_next)
            elif count == 2:
                values_2(weights, stride, v, dim, slots, sums, 8 * dim, v_next)
            else:
                values_1(weights, stride, v, dim, slots, sums, 8 * dim, v_next)
            weights += stride * count
            sums += 8 * dim * count
            left -= count

    return add_page


def _attend(storage: str) -> Callable[..., None]:
    score_page, add_page, finish = _score_page(storage), _add_page(storage), _finish(storage)
    size = CACHE_BYTES[storage]

    @kernel
    def attend(
        q: int,  # address of the first head's query, float32 [kv_heads * group][dim], scaled by 1/sqrt(dim)
        kv_heads: int,  # how many key/value heads, neighbours in the cache
        group: int,  # query heads of each
        dim: int,
        keys: int,
        pages: int,  # address of the row's page numbers, int32
        page_size: int,
        k_cache: int,  # address of the first of these heads in page 0, [kv_heads][dim][page_size]
        v_cache: int,  # [kv_heads][page_size][dim]
        page_bytes: int,
        scratch: int,  # `scratch_floats` float32
        out: int,  # float32 [kv_heads * group][dim]
    ) -> None:
        heads, head_bytes = kv_heads * group, size * dim * page_size
        stride = 4 * ((keys + SLOTS - 1) // SLOTS * SLOTS + SLOTS)  # bytes from a head's weights to the next one's
        running = scratch + (4 * heads + 63) // 64 * 64
        weights = running + 8 * dim * heads
        page, ahead = load_i32(pages), load_i32(pages)
        for first in range(0, keys, page_size):
            page, slots = ahead, min(page_size, keys - first)
            if first + page_size < keys:
                ahead = load_i32(pages + 4 * (first // page_size + 1))
            for head in range(kv_heads):
                k, k_next = k_cache + page * page_bytes, k_cache + ahead * page_bytes
                offset, place = head * head_bytes, weights + stride * group * head + 4 * first
                queries = q + 4 * dim * group * head
                score_page(queries, group, dim, slots, k + offset, k_next + offset, page_size, place, stride)
        for head in range(heads):
            softmax_weights(weights + stride * head, keys, scratch + 4 * head)
        for i in range(0, 8 * dim * heads, 32):
            store_f32x8(running + i, splat(0.0))
        ahead = load_i32(pages)
        for first in range(0, keys, page_size):
            page, slots = ahead, min(page_size, keys - first)
            if first + page_size < keys:
                ahead = load_i32(pages + 4 * (first // page_size + 1))
            for head in range(kv_heads):
                v, v_next = v_cache + page * page_bytes, v_cache + ahead * page_bytes
                offset, place = head * head_bytes, weights + stride * group * head + 4 * first
                sums = running + 8 * dim * group * head
                add_page(place, stride, group, dim, slots, v + offset, v_next + offset, sums)
        for head in range(heads):
            finish(running + 8 * dim * head, dim, scratch + 4 * head, out + 4 * dim * head)

    return attend


attend_bfloat16 = _attend(BFLOAT16)
attend_float32 = _attend(FLOAT32)
