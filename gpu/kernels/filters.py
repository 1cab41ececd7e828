"""top_k and top_p over the weights of one row, without sorting.

Owns the lists of tokens that stay. A bound is found by radix passes over the bits of the weights, counting tokens or
adding mass from the heaviest bucket down, so the cost hardly depends on how many tokens stay. Sums run in float64 in
the order of the vocabulary within a bucket; nothing depends on other rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.kernels.native import kernel
from gpu.kernels.vectors import bits_of_f32, load_f32, load_f64, load_i32, store_f32, store_f64, store_i32

BUCKETS = 1024  # of a radix pass: bits 20..29 of the weight's float, then 10..19, then 0..9; weights lie in (0, 1]
# numpy integers: numba would compile a function once for every plain literal that it is called with
BY_COUNT, BY_MASS, NO_PREFIX, FIRST_SHIFT = np.int64(0), np.int64(1), np.int64(0), np.int64(20)
SMALLEST_GOAL = 1e-300  # top_p = 0 keeps one token


def filter_bytes(padded: int) -> int:
    """Working memory of `filter_weights` for `padded` tokens: buckets, then tokens and weights, one more of each."""
    return 8 * BUCKETS + 8 * padded + 128


@kernel
def _histogram(weights: int, count: int, shift: Any, prefix: Any, by_mass: Any, buckets: int) -> None:
    """Count, or sum, the positive weights whose bits above `shift` + 10 are `prefix`, by the next 10 bits."""
    for i in range(BUCKETS):
        store_f64(buckets + 8 * i, 0.0)
    for i in range(count):
        weight = load_f32(weights + 4 * i)
        bits = np.int64(bits_of_f32(weight))
        if bits > 0 and (bits >> (shift + 10)) == prefix:
            place = buckets + 8 * ((bits >> shift) & (BUCKETS - 1))
            store_f64(place, load_f64(place) + (np.float64(weight) if by_mass else 1.0))


@kernel
def _cross(buckets: int, before: float, goal: float) -> tuple[int, float]:
    """Highest bucket at which the sum from above reaches `goal`, and the sum before it; -1 when none does."""
    for i in range(BUCKETS - 1, -1, -1):
        inside = load_f64(buckets + 8 * i)
        if inside > 0 and before + inside >= goal:
            return i, before
        before += inside
    return -1, before


@kernel
def _list_all(weights: int, padded: int, least_bits: int, tokens: int, listed: int) -> int:
    """List tokens and weights of bits >= `least_bits` in the order of the vocabulary; returns their number."""
    count = 0
    for i in range(padded):
        weight = load_f32(weights + 4 * i)
        store_i32(tokens + 4 * count, np.int32(i))
        store_f32(listed + 4 * count, weight)
        count += 1 if bits_of_f32(weight) >= least_bits else 0
    return count


@kernel
def _cut(tokens: int, listed: int, count: int, goal: float, by_mass: Any, buckets: int) -> int:
    """Shorten a list to its heaviest tokens whose number, or mass, reaches `goal`; returns the new number.

    By number, ties with the last one stay; by mass, tied tokens of higher ids go.
    """
    prefix, before = NO_PREFIX, 0.0
    for level in range(3):
        shift = FIRST_SHIFT - 10 * level
        _histogram(listed, count, shift, prefix, by_mass, buckets)
        bucket, before = _cross(buckets, before, goal)
        if bucket < 0:
            return count
        prefix = prefix << 10 | bucket
    kept = 0
    for i in range(count):
        weight = load_f32(listed + 4 * i)
        bits = np.int64(bits_of_f32(weight))
        if bits < prefix:
            continue
        if by_mass and bits == prefix:
            if before >= goal:
                continue
            before += weight
        store_i32(tokens + 4 * kept, load_i32(tokens + 4 * i))
        store_f32(listed + 4 * kept, weight)
        kept += 1
    return kept


@kernel
def _total(weights: int, count: int) -> float:
    total = 0.0
    for i in range(count):
        total += load_f32(weights + 4 * i)
    return total


@kernel
def filter_weights(weights: int, padded: int, top_k: Any, top_p: float, total: float, scratch: int) -> int:
    """Fill the list behind `scratch` with what top_k and top_p leave; returns its length."""
    buckets, tokens = scratch, scratch + 8 * BUCKETS
    listed = tokens + 4 * padded + 64
    by_mass = BY_COUNT if top_k > 0 else BY_MASS
    goal = np.float64(top_k) if top_k > 0 else max(np.float64(top_p) * total, SMALLEST_GOAL)
    # One pass over the vocabulary finds a coarse bound; all else works on the tokens above it.
    _histogram(weights, padded, FIRST_SHIFT, NO_PREFIX, by_mass, buckets)
    bucket, _ = _cross(buckets, 0.0, goal)
    count = _list_all(weights, padded, max(1, bucket << 20), tokens, listed)
    if bucket >= 0:
        count = _cut(tokens, listed, count, goal, by_mass, buckets)
    if top_k > 0 and top_p < 1:
        mass = max(np.float64(top_p) * _total(listed, count), SMALLEST_GOAL)
        count = _cut(tokens, listed, count, mass, BY_MASS, buckets)
    return count


@kernel
def draw_listed(scratch: int, padded: int, count: int, u: float) -> Any:
    """Token of the list that `filter_weights` left behind `scratch`, at which the running sum exceeds u * total."""
    tokens = scratch + 8 * BUCKETS
    weights = tokens + 4 * padded + 64
    total = 0.0
    for i in range(count):
        total += load_f32(weights + 4 * i)
    before, chosen = 0.0, count - 1
    for i in range(count):
        before += load_f32(weights + 4 * i)
        if before > u * total:
            chosen = i
            break
    return load_i32(tokens + 4 * chosen)
