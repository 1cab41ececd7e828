"""Paged attention of one query row over its own keys, for a group of query heads that share a key/value head.

Owns the order of the sums. Scores of all keys first, then the softmax over them, then the weighted sum of the values:
keys 0 to n-1 in order, even and odd ones (and even and odd dims of the scores) as two chains that are added at the
end. The result depends on the query and its n keys only: decoding and prefill run the same code. Slots behind the
last key are never used, whatever they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from gpu.kernels.emit import (
    F32,
    I32,
    I64,
    VF32,
    VI32,
    bf16_halves,
    const,
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
        k_next: ir.Value,  # addresses of what will be read soon, fetched in the same steps
        v_next: ir.Value,
    ) -> None:
        sums = _new_sums(b, heads)
        queries = [pointer(b, b.add(q, b.mul(q_stride, const(h)))) for h in range(heads)]
        keys, soon = pointer(b, k), (pointer(b, k_next), pointer(b, v_next))
        with cgutils.for_range_slice(b, const(0), dims, const(2), I64) as (d, _):
            for base in soon:
                for line in range(0, 2 * SLOTS * CACHE_BYTES[storage], 64):
                    prefetch(b, base, b.add(b.mul(d, k_stride), const(line)))
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
        p: ir.Value,  # address of the first head's weights, float32 per key
        p_stride: ir.Value,
        inverse: ir.Value,  # address of 1 / sum of weights, float32 per head
        v: ir.Value,  # address of the first of 16 dims in page 0, slot 0
        page_bytes: ir.Value,
        slot_bytes: ir.Value,
        pages: ir.Value,  # address of the row's page numbers, int32
        page_size: ir.Value,
        keys: ir.Value,
        out: ir.Value,  # 16 float32 for each head
        out_stride: ir.Value,
    ) -> None:
        sums = _new_sums(b, heads)
        weights = [pointer(b, b.add(p, b.mul(p_stride, const(h)))) for h in range(heads)]
        page_count = b.sdiv(b.add(keys, b.sub(page_size, const(1))), page_size)

        def add_slot(values: ir.Value, first: ir.Value, slot: ir.Value, chain: int) -> None:
            offset = b.shl(b.add(first, slot), const(2))
            factors = [splat_value(b, load_at(b, w, offset, F32, 4)) for w in weights]
            _add_product(b, sums, chain, factors, _load_16(b, storage, values, b.mul(slot, slot_bytes)))

        with cgutils.for_range(b, page_count) as page:
            number = load_at(b, pointer(b, pages), b.shl(page.index, const(2)), I32, 4)
            values = pointer(b, b.add(v, b.mul(b.sext(number, I64), page_bytes)))
            first = b.mul(page.index, page_size)
            left = b.sub(keys, first)
            count = b.select(b.icmp_signed("<", left, page_size), left, page_size)
            pairs = b.and_(count, const(-2))
            with cgutils.for_range_slice(b, const(0), pairs, const(2), I64) as (slot, _):
                add_slot(values, first, slot, 0)
                add_slot(values, first, b.add(slot, const(1)), 1)
            with cgutils.if_unlikely(b, b.icmp_signed("<", pairs, count)):
                add_slot(values, first, pairs, 0)
        for h in range(heads):
            scale = splat_value(b, load_at(b, pointer(b, inverse), const(4 * h), F32, 4))
            place = b.add(out, b.mul(out_stride, const(h)))
            for i, total in enumerate(_totals(b, storage, sums[h])):
                b.store(b.fmul(total, scale), pointer(b, b.add(place, const(32 * i)), VF32), align=4)

    return outlined(f"weighted_values_{heads}_{storage}", weighted_values)


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


def _attend(storage: str) -> Callable[..., None]:
    scores_1, scores_2, scores_3 = (_scores(storage, h) for h in range(1, GROUP_MAX + 1))
    values_1, values_2, values_3 = (_weighted_values(storage, h) for h in range(1, GROUP_MAX + 1))
    size = CACHE_BYTES[storage]

    @kernel
    def attend(
        q: int,  # address of the group's queries, float32 [heads][head_dim], scaled by 1/sqrt(head_dim)
        heads: int,
        head_dim: int,
        keys: int,
        pages: int,  # address of the row's page numbers, int32
        page_size: int,
        k_cache: int,  # address of this key/value head in page 0, [head_dim][page_size]
        v_cache: int,  # [page_size][head_dim]
        page_bytes: int,
        scratch: int,  # 16 + GROUP_MAX * score_room floats
        score_room: int,
        out: int,  # float32 [heads][head_dim]
    ) -> None:
        head_bytes, room = 4 * head_dim, 4 * score_room
        dim_bytes, slot_bytes = size * page_size, size * head_dim
        weights = scratch + 64
        while heads > 0:
            count = 2 if heads == 4 else min(heads, GROUP_MAX)
            k_next = k_cache + load_i32(pages) * page_bytes
            v_here = v_cache + load_i32(pages) * page_bytes
            first, page = 0, 0
            while first < keys:
                k, v_next = k_next, v_here
                page += 1
                ahead = load_i32(pages + 4 * page) if page * page_size < keys else load_i32(pages)
                k_next, v_here = k_cache + ahead * page_bytes, v_cache + ahead * page_bytes
                for slot in range(0, min(page_size, keys - first), SLOTS):
                    place = weights + 4 * (first + slot)
                    k_block, v_block = k + size * slot, v_next + slot_bytes * slot
                    if count == 3:
                        scores_3(q, head_bytes, k_block, dim_bytes, head_dim, place, room, k_next, v_block)
                    elif count == 2:
                        scores_2(q, head_bytes, k_block, dim_bytes, head_dim, place, room, k_next, v_block)
                    else:
                        scores_1(q, head_bytes, k_block, dim_bytes, head_dim, place, room, k_next, v_block)
                first += page_size
            for h in range(count):
                softmax_weights(weights + h * room, keys, scratch + 4 * h)
            for dim in range(0, head_dim, SLOTS):
                v, o = v_cache + size * dim, out + 4 * dim
                if count == 3:
                    values_3(weights, room, scratch, v, page_bytes, slot_bytes, pages, page_size, keys, o, head_bytes)
                elif count == 2:
                    values_2(weights, room, scratch, v, page_bytes, slot_bytes, pages, page_size, keys, o, head_bytes)
                else:
                    values_1(weights, room, scratch, v, page_bytes, slot_bytes, pages, page_size, keys, o, head_bytes)
            q += count * head_bytes
            out += count * head_bytes
            heads -= count

    return attend


attend_bfloat16 = _attend(BFLOAT16)
attend_float32 = _attend(FLOAT32)
