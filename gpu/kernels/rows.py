"""Kernels that work on one row of activations: norm, activation rounding, SiLU, rotary embedding, cache writes.

Owns the numerics between the matrix products. Sums over a row run in eight lanes by one fixed scheme that depends on
the row's length only; everything else is element by element. Lengths are multiples of 16. All arguments are addresses
(int64) of float32 unless said otherwise, and counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu.kernels.native import kernel
from gpu.kernels.vectors import (
    bits_of,
    f32_from_bits,
    fma,
    from_bits,
    keep_above,
    load_f32,
    load_f32x8,
    load_u16,
    max_lanes_i32,
    round_bf16,
    round_to_i32,
    splat,
    splat_i32,
    store_as_bf16,
    store_as_i16,
    store_f32,
    store_f32x8,
    store_u16,
    sum_lanes,
    to_f32,
    vmax,
    vmax_i32,
    vmin,
    vsqrt,
)

LOG2_E = math.log2(math.e)
LN2_HIGH = 0.693359375  # 9 bits: products with an exponent are exact
LN2_LOW = -2.12194440e-4
EXP_LOWEST = -87.0  # below it the result is 0
EXP_HIGHEST = 88.0
# Minimax polynomial of (exp(x) - 1 - x) / x^2 on [-ln2/2, ln2/2], from the Cephes library (expf).
EXP_C0, EXP_C1, EXP_C2 = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3
EXP_C3, EXP_C4, EXP_C5 = 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1


@kernel
def exp8(x: Any) -> Any:
    """exp of eight lanes, relative error about 2e-7; 0 below -87, NaN for NaN."""
    bounded = vmax(splat(EXP_LOWEST), vmin(splat(EXP_HIGHEST), x))
    whole = round_to_i32(bounded * splat(LOG2_E))
    n = to_f32(whole)
    r = fma(n, splat(-LN2_LOW), fma(n, splat(-LN2_HIGH), bounded))
    p = fma(splat(EXP_C0), r, splat(EXP_C1))
    p = fma(p, r, splat(EXP_C2))
    p = fma(p, r, splat(EXP_C3))
    p = fma(p, r, splat(EXP_C4))
    p = fma(p, r, splat(EXP_C5))
    p = fma(p, r * r, r + splat(1.0))
    scale = from_bits((whole + splat_i32(127)) << splat_i32(23))
    return keep_above(x, splat(EXP_LOWEST), p * scale)


@kernel
def rms_norm(x: int, weight: int, out: int, n: int, epsilon: float) -> None:
    """out = x / sqrt(mean(x^2) + epsilon) * weight, n floats."""
    even = splat(0.0)
    odd = splat(0.0)
    for i in range(0, 4 * n, 64):
        low, high = load_f32x8(x + i), load_f32x8(x + i + 32)
        even = fma(low, low, even)
        odd = fma(high, high, odd)
    mean = splat(sum_lanes(even + odd)) * splat(1.0 / n)
    inverse = splat(1.0) / vsqrt(mean + splat(epsilon))
    for i in range(0, 4 * n, 32):
        store_f32x8(out + i, load_f32x8(x + i) * inverse * load_f32x8(weight + i))


@kernel
def condense_int8(x: int, n: int, out: int, scale: int, limit: float) -> None:
    """Symmetric rounding of n floats to int16 in [-limit, limit]; one float32 scale for the row: x ~ out * scale.

    A row with NaN or infinity gets a NaN or infinite scale, so that the fault shows in what is made of it.
    """
    magnitude = splat_i32(0x7FFFFFFF)
    largest = splat_i32(0)
    for i in range(0, 4 * n, 32):
        largest = vmax_i32(bits_of(load_f32x8(x + i)) & magnitude, largest)
    top = f32_from_bits(max_lanes_i32(largest))
    if top < 1e-30:
        store_f32(scale, 0.0)
        step = splat(0.0)
    else:
        store_f32(scale, top / np.float32(limit))
        step = splat(limit) / splat(top)
    for i in range(0, n, 8):
        store_as_i16(out + 2 * i, round_to_i32(load_f32x8(x + 4 * i) * step))


@kernel
def condense_bfloat16(x: int, n: int, out: int, scale: int, limit: float) -> None:
    """Rounding of n floats to bfloat16, kept as float32. `scale` and `limit` are unused."""
    for i in range(0, 4 * n, 32):
        store_f32x8(out + i, round_bf16(load_f32x8(x + i)))


@kernel
def condense_float32(x: int, n: int, out: int, scale: int, limit: float) -> None:
    """Copy of n floats. `scale` and `limit` are unused."""
    for i in range(0, 4 * n, 32):
        store_f32x8(out + i, load_f32x8(x + i))


@kernel
def silu_times(gate: int, up: int, out: int, n: int) -> None:
    """out = gate / (1 + exp(-gate)) * up, n floats."""
    one, zero = splat(1.0), splat(0.0)
    for i in range(0, 4 * n, 32):
        g = load_f32x8(gate + i)
        store_f32x8(out + i, g / (one + exp8(zero - g)) * load_f32x8(up + i))


@kernel
def rotate(x: int, heads: int, head_dim: int, cosine: int, sine: int, factor: Any) -> None:
    """Rotary embedding in place of `heads` heads, first half against second half, and a factor on all of it."""
    half = 2 * head_dim
    scale = splat(factor)
    for head in range(heads):
        first = x + head * 4 * head_dim
        for i in range(0, half, 32):
            a, b = load_f32x8(first + i), load_f32x8(first + half + i)
            c, s = load_f32x8(cosine + i), load_f32x8(sine + i)
            store_f32x8(first + i, (a * c - b * s) * scale)
            store_f32x8(first + half + i, (b * c + a * s) * scale)


@kernel
def cache_bfloat16(k: int, v: int, k_page: int, v_page: int, slot: int, heads: int, head_dim: int, page: int) -> None:
    """Write one token's keys and values (float32, heads x head_dim) at `slot` of a page of bfloat16.

    Keys lie `[head][dim][slot]`, values `[head][slot][dim]`. `k` is rounded in place.
    """
    for i in range(0, 4 * heads * head_dim, 32):
        store_f32x8(k + i, round_bf16(load_f32x8(k + i)))
    for i in range(heads * head_dim):
        store_u16(k_page + 2 * (i * page + slot), load_u16(k + 4 * i + 2))
    for head in range(heads):
        place = v_page + 2 * (head * page + slot) * head_dim
        for i in range(0, head_dim, 8):
            store_as_bf16(place + 2 * i, load_f32x8(v + 4 * (head * head_dim + i)))


@kernel
def cache_float32(k: int, v: int, k_page: int, v_page: int, slot: int, heads: int, head_dim: int, page: int) -> None:
    """Write one token's keys and values at `slot` of a page of float32. Layout as in `cache_bfloat16`."""
    for i in range(heads * head_dim):
        store_f32(k_page + 4 * (i * page + slot), load_f32(k + 4 * i))
    for head in range(heads):
        place = v_page + 4 * (head * page + slot) * head_dim
        for i in range(0, 4 * head_dim, 32):
            store_f32x8(place + i, load_f32x8(v + 4 * head * head_dim + i))
