"""Sampling of one token a row from logits, with randomness that depends on (seed, position) and nothing else.

Owns the order of the filters and of the sums: temperature, then min_p, then top_k, then top_p (as vLLM's), then one draw by
inverse distribution function in the order of the vocabulary. A row's token depends on its own logits and parameters only. It
keeps no state between calls and never draws from a generator that does.

- temperature below 1e-5: the first of the largest logits; nothing else is looked at.
- weight of a token: exp((logit - largest) / temperature), so the likeliest has weight 1.
- min_p: weights below min_p go. top_k: weights below the k-th largest go (ties with it stay).
- top_p: tokens by falling weight, lower ids first among equals, as long as those before hold less than top_p of what is left.
- draw: the first token at which the running sum of the weights exceeds u * total.
"""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt

from gpu.kernels.native import entry, kernel
from gpu.kernels.rows import exp8
from gpu.kernels.team import Team, await_phase, finish, take
from gpu.kernels.vectors import (
    bits_of,
    bits_of_f32,
    keep_above,
    load_f32,
    load_f32x8,
    load_f64,
    load_i32,
    load_i64,
    load_u64,
    max_lanes,
    max_lanes_i32,
    splat,
    splat_i32,
    store_f32,
    store_f32x8,
    store_f64,
    store_i32,
    sum_lanes,
    vmax,
    vmax_i32,
)

Float32, Int32 = npt.NDArray[np.float32], npt.NDArray[np.int32]

GREEDY_BELOW = 1e-5
STRIPE = 64  # tokens whose weights are summed as a unit
BUCKETS = 1024  # of a radix pass: bits 20..29 of the weight's float, then 10..19, then 0..9; weights lie in (0, 1]
INFINITY_BITS = 0x7F800000
SMALLEST_GOAL = 1e-300  # top_p = 0 keeps one token
MINUS_INFINITY = np.float32(-np.inf)

# Words of the job's block.
ROWS, VOCAB, LOGITS, TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED, POSITION, OUT, SCRATCH, SCRATCH_BYTES = range(12)
BLOCK_WORDS = 12

GOLDEN, MIX_1, MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@kernel
def _mix(z):  # type: ignore[no-untyped-def]
    """Finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators)."""
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))


@kernel
def uniform(seed, position, draw):  # type: ignore[no-untyped-def]
    """Number `draw` (uint64) of a token's numbers in [0, 1), 53 bits, for seed and position (uint64)."""
    key = _mix(_mix(seed + GOLDEN) + position * GOLDEN)
    return np.float64(_mix(key + draw * GOLDEN) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def _largest(logits: int, padded: int) -> float:
    """Largest of the logits; NaN when one is NaN."""
    best, magnitude = load_f32x8(logits), splat_i32(0)
    for i in range(0, 4 * padded, 32):
        x = load_f32x8(logits + i)
        best = vmax(x, best)
        magnitude = vmax_i32(bits_of(x) & splat_i32(0x7FFFFFFF), magnitude)
    if max_lanes_i32(magnitude) > INFINITY_BITS:
        return np.float32(np.nan)
    return max_lanes(best)


@kernel
def _first_of(logits: int, largest: float) -> int:
    """Index of the first logit that equals `largest`, which is there."""
    stripe = 0
    while max_lanes(vmax(load_f32x8(logits + 4 * stripe), load_f32x8(logits + 4 * stripe + 32))) < largest:
        stripe += 16
    while load_f32(logits + 4 * stripe) != largest:
        stripe += 1
    return stripe


@kernel
def _weigh(logits: int, padded: int, largest: float, temperature: float, min_p: float, weights: int, sums: int) -> float:
    """Weights of all tokens, their sums by stripe (float32), and the total of these."""
    top, inverse, floor = splat(largest), splat(np.float32(1.0) / temperature), splat(min_p)
    total = 0.0
    for stripe in range(padded // STRIPE):
        part = splat(0.0)
        for i in range(4 * STRIPE * stripe, 4 * STRIPE * (stripe + 1), 32):
            weight = exp8((load_f32x8(logits + i) - top) * inverse)
            weight = keep_above(weight, floor, weight)
            store_f32x8(weights + i, weight)
            part = part + weight
        mass = sum_lanes(part)
        store_f32(sums + 4 * stripe, mass)
        total += mass
    return total


@kernel
def _draw_all(weights: int, sums: int, padded: int, goal: float) -> int:
    """Token at which the running sum of all weights exceeds `goal`: first the stripe, then within it."""
    before, chosen = 0.0, 0
    for stripe in range(padded // STRIPE):
        mass = load_f32(sums + 4 * stripe)
        if mass > 0:
            chosen = stripe
            if before + mass > goal:
                break
            before += mass
    token = -1
    for i in range(STRIPE * chosen, STRIPE * (chosen + 1)):
        weight = load_f32(weights + 4 * i)
        if weight > 0:
            token = i
            before += weight
            if before > goal:
                break
    return token


@kernel
def _draw_listed(tokens: int, weights: int, count: int, u: float) -> int:
    """Token of a list at which the running sum exceeds u * total."""
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


@kernel
def _histogram(weights: int, count: int, shift: int, prefix: int, by_mass: int, buckets: int) -> None:
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
def _cut(tokens: int, listed: int, count: int, goal: float, by_mass: int, buckets: int) -> int:
    """Shorten a list to its heaviest tokens whose number, or mass, reaches `goal`; returns the new number.

    By number, ties with the last one stay; by mass, tied tokens of higher ids go.
    """
    prefix, before = 0, 0.0
    for level in range(3):
        shift = 20 - 10 * level
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
def _filtered(weights: int, padded: int, top_k: int, top_p: float, total: float, scratch: int) -> int:
    """Fill the list behind `scratch` with what top_k and top_p leave; returns its length."""
    buckets = scratch
    tokens = scratch + 8 * BUCKETS
    listed = tokens + 4 * padded + 64
    by_mass = 0 if top_k > 0 else 1
    goal = np.float64(top_k) if top_k > 0 else max(np.float64(top_p) * total, SMALLEST_GOAL)
    # One pass over the vocabulary finds a coarse bound; all else works on the tokens above it.
    _histogram(weights, padded, 20, 0, by_mass, buckets)
    bucket, _ = _cross(buckets, 0.0, goal)
    count = _list_all(weights, padded, max(1, bucket << 20), tokens, listed)
    if bucket >= 0:
        count = _cut(tokens, listed, count, goal, by_mass, buckets)
    if top_k > 0 and top_p < 1:
        mass = max(np.float64(top_p) * _total(listed, count), SMALLEST_GOAL)
        count = _cut(tokens, listed, count, mass, 1, buckets)
    return count


@kernel
def _word(block: int, index: int) -> int:
    return load_i64(block + 8 * index)


@kernel
def _sample_row(block: int, row: int, scratch: int) -> int:
    """Token of one row, -1 when its logits are no distribution."""
    vocab = _word(block, VOCAB)
    padded = (vocab + STRIPE - 1) // STRIPE * STRIPE
    logits = _word(block, LOGITS) + 4 * vocab * row
    weights = scratch
    sums = weights + 4 * padded
    copy = sums + 4 * (padded // STRIPE) + 64
    if padded != vocab:
        for i in range(padded):
            store_f32(copy + 4 * i, load_f32(logits + 4 * i) if i < vocab else MINUS_INFINITY)
        logits = copy
    largest = _largest(logits, padded)
    if not abs(largest) < np.inf:
        return -1
    temperature = load_f32(_word(block, TEMPERATURE) + 4 * row)
    if temperature < GREEDY_BELOW:
        return _first_of(logits, largest)
    top_p, min_p = load_f32(_word(block, TOP_P) + 4 * row), load_f32(_word(block, MIN_P) + 4 * row)
    top_k = np.int64(load_i32(_word(block, TOP_K) + 4 * row))
    seed = load_u64(_word(block, SEED) + 8 * row)
    position = np.uint64(load_i32(_word(block, POSITION) + 4 * row))
    u = uniform(seed, position, np.uint64(0))
    total = _weigh(logits, padded, largest, temperature, min_p, weights, sums)
    if (top_k <= 0 or top_k >= vocab) and top_p >= 1:
        return _draw_all(weights, sums, padded, u * total)
    lists = copy + 4 * padded + 64
    count = _filtered(weights, padded, top_k if top_k < vocab else 0, top_p, total, lists)
    listed = lists + 8 * BUCKETS
    return _draw_listed(listed, listed + 4 * padded + 64, count, u)


@entry
def sample_rows(worker: int, block: int, control: int, first: int) -> None:
    """Job: one task for each row."""
    rows = _word(block, ROWS)
    scratch = _word(block, SCRATCH) + worker * _word(block, SCRATCH_BYTES)
    while True:
        row = take(control, first, rows)
        if row < 0:
            break
        store_i32(_word(block, OUT) + 4 * row, np.int32(_sample_row(block, row, scratch)))
        finish(control, first, rows)
    await_phase(control, first)


class Sampler:
    """Working memory for `sample` by the threads of a team."""

    def __init__(self, team: Team) -> None:
        self._block = team.block(BLOCK_WORDS)
        self._threads = team.threads
        self._scratch = np.empty(0, np.uint8)

    def prepare(self, vocab: int) -> npt.NDArray[np.int64]:
        """The job's block, with working memory for rows of `vocab` logits in it."""
        padded = -(-vocab // STRIPE) * STRIPE
        needed = 4 * (4 * padded + padded // STRIPE) + 8 * BUCKETS + 512
        if self._scratch.nbytes < needed * self._threads:
            self._scratch = np.empty(needed * self._threads + 64, np.uint8)
        self._block[VOCAB], self._block[SCRATCH_BYTES] = vocab, needed
        self._block[SCRATCH] = self._scratch.ctypes.data
        return self._block


_samplers: weakref.WeakKeyDictionary[Team, Sampler] = weakref.WeakKeyDictionary()
_alone: list[Team] = []


def warm_up() -> None:
    """Compile, or load from the disk cache, what `sample` runs."""
    sample_rows.compile()


def sample(
    logits: Float32,
    temperature: Float32,
    top_p: Float32,
    min_p: Float32,
    top_k: Int32,
    seed: npt.NDArray[np.uint64],
    position: Int32,
    out: Int32,
    team: Team | None = None,
) -> None:
    """Draw one token for each of S rows into `out` (int32 [S]).

    logits: float32 [S, V]; temperature, top_p, min_p: float32 [S]; top_k: int32 [S], 0 or less for none; seed: uint64 [S];
    position: int32 [S], the place of the new token in its sequence. All contiguous. Without a team the caller's thread
    does all rows. Raises FloatingPointError, with the rows' numbers, when rows hold NaN or no finite logit; `out` is -1
    there and right in all other rows. Raises ValueError for arguments of a wrong type or size.
    """
    rows, vocab = logits.shape
    columns = (
        (temperature, np.float32, TEMPERATURE),
        (top_p, np.float32, TOP_P),
        (min_p, np.float32, MIN_P),
        (top_k, np.int32, TOP_K),
        (seed, np.uint64, SEED),
        (position, np.int32, POSITION),
        (out, np.int32, OUT),
    )
    if logits.dtype != np.float32 or not logits.flags.c_contiguous:
        raise ValueError("logits must be contiguous float32")
    if rows == 0:
        return
    if team is None:
        if not _alone:
            _alone.append(Team(1))
        team = _alone[0]
    if team not in _samplers:
        _samplers[team] = Sampler(team)
    block = _samplers[team].prepare(vocab)
    block[ROWS], block[LOGITS] = rows, logits.ctypes.data
    for array, dtype, index in columns:
        if array.dtype != dtype or not array.flags.c_contiguous or array.shape != (rows,):
            raise ValueError(f"argument {index - LOGITS} of sample must be contiguous {np.dtype(dtype).name} [S]")
        block[index] = array.ctypes.data
    team.run(sample_rows, block)
    if out.min() < 0:
        faulty = np.flatnonzero(out < 0).tolist()
        raise FloatingPointError(f"logits of rows {faulty} hold NaN or no finite value")
