"""Sampling of one token a row from logits, with randomness that depends on (seed, position) and nothing else.

Owns the order of the filters and of the sums: temperature, then min_p, then top_k, then top_p (as vLLM's), then one
draw by inverse distribution function in the order of the vocabulary. A row's token depends on its own logits and
parameters only. It keeps no state between calls and never draws from a generator that does.

- temperature below 1e-5: the first of the largest logits; nothing else is looked at.
- weight of a token: exp((logit - largest) / temperature), so the likeliest has weight 1.
- min_p: weights below min_p go. top_k: weights below the k-th largest go (ties with it stay).
- top_p: tokens by falling weight, lower ids first among equals, as long as those before hold less than top_p of what
  is left.
- draw: the first token at which the running sum of the weights exceeds u * total."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.kernels.filters import draw_listed, filter_bytes, filter_weights
from gpu.kernels.native import entry, kernel
from gpu.kernels.rows import exp8
from gpu.kernels.splitmix import GOLDEN, mix
from gpu.kernels.team import Team, aligned, await_phase, finish, take
from gpu.kernels.vectors import (
    bits_of,
    keep_above,
    load_f32,
    load_f32x8,
    load_i32,
    load_u64,
    max_lanes,
    max_lanes_i32,
    splat,
    splat_i32,
    store_f32,
    store_f32x8,
    store_i32,
    sum_lanes,
    vmax,
    vmax_i32,
    word,
)

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

GREEDY_BELOW = 1e-5
STRIPE = 64  # tokens whose weights are summed as a unit
INFINITY_BITS = 0x7F800000
NO_TOP_K = np.int64(0)
MINUS_INFINITY = np.float32(-np.inf)

# Words of the job's block.
ROWS, VOCAB, LOGITS, TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED, POSITION, OUT, SCRATCH, SCRATCH_BYTES = range(12)
BLOCK_WORDS = 12


@kernel
def uniform(seed: Any, position: Any, draw: Any) -> Any:
    """Number `draw` (uint64) of a token's numbers in [0, 1), 53 bits, for seed and position (uint64)."""
    key = mix(mix(seed + GOLDEN) + position * GOLDEN)
    return np.float64(mix(key + draw * GOLDEN) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def _largest(logits: int, padded: int) -> Any:
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
def _weigh(
    logits: int, padded: int, largest: float, temperature: float, min_p: float, weights: int, sums: int
) -> float:
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
def _sample_row(block: int, row: int, scratch: int) -> Any:
    """Token of one row, -1 when its logits are no distribution."""
    vocab = word(block, VOCAB)
    padded = (vocab + STRIPE - 1) // STRIPE * STRIPE
    logits = word(block, LOGITS) + 4 * vocab * row
    weights = scratch
    sums = weights + 4 * padded
    copy = sums + 8 * (padded // STRIPE)
    if padded != vocab:
        for i in range(padded):
            store_f32(copy + 4 * i, load_f32(logits + 4 * i) if i < vocab else MINUS_INFINITY)
        logits = copy
    largest = _largest(logits, padded)
    if not abs(largest) < np.inf:
        return -1
    temperature = load_f32(word(block, TEMPERATURE) + 4 * row)
    if temperature < GREEDY_BELOW:
        return _first_of(logits, largest)
    top_p, min_p = load_f32(word(block, TOP_P) + 4 * row), load_f32(word(block, MIN_P) + 4 * row)
    top_k = np.int64(load_i32(word(block, TOP_K) + 4 * row))
    seed = load_u64(word(block, SEED) + 8 * row)
    position = np.uint64(load_i32(word(block, POSITION) + 4 * row))
    u = uniform(seed, position, np.uint64(0))
    total = _weigh(logits, padded, largest, temperature, min_p, weights, sums)
    if (top_k <= 0 or top_k >= vocab) and top_p >= 1:
        return _draw_all(weights, sums, padded, u * total)
    lists = copy + 4 * padded
    count = filter_weights(weights, padded, top_k if top_k < vocab else NO_TOP_K, top_p, total, lists)
    return draw_listed(lists, padded, count, u)


@entry
def sample_rows(worker: int, block: int, control: int, first: int) -> None:
    """Job: one task for each row."""
    rows = word(block, ROWS)
    scratch = word(block, SCRATCH) + worker * word(block, SCRATCH_BYTES)
    while True:
        row = take(control, first, rows)
        if row < 0:
            break
        store_i32(word(block, OUT) + 4 * row, np.int32(_sample_row(block, row, scratch)))
        finish(control, first, rows)
    await_phase(control, first)


class Sampler:
    """Working memory for `sample` by the threads of a team."""

    def __init__(self, team: Team) -> None:
        self._block = team.block(BLOCK_WORDS)
        self._threads = team.threads
        self._scratch = aligned((0,), np.uint8)

    def prepare(self, vocab: int) -> npt.NDArray[np.int64]:
        """The job's block, with working memory for rows of `vocab` logits in it."""
        padded = -(-vocab // STRIPE) * STRIPE
        # weights, their sums by stripe, a padded copy of the logits, then what `filter_weights` needs
        needed = 8 * padded + 8 * (padded // STRIPE) + filter_bytes(padded)
        if self._scratch.nbytes < needed * self._threads:
            self._scratch = aligned((needed * self._threads,), np.uint8)
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

    logits: float32 [S, V]; temperature, top_p, min_p: float32 [S]; top_k: int32 [S], 0 or less for none; seed:
    uint64 [S]; position: int32 [S], the place of the new token in its sequence. All contiguous. Without a team the
    caller's thread does all rows. Raises FloatingPointError, with the rows' numbers, when rows hold NaN or no finite
    logit; `out` is -1 there and right in all other rows. Raises ValueError for arguments of a wrong type or size.
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
