"""Sampling of one token a row on CUDA: the filters, the draw and the randomness of `sampling`, as Triton kernels.

Owns the largest logit, the greedy choice and the draw; `triton_filters` finds what top_k and top_p leave. The uniform
numbers are the host's, bit for bit, and keep no state. Sums are exact (see there), while the host sums floats and has
another exp: where a bound or a draw falls within some 1e-6 of the border between two tokens, the two may take different
ones. Never allocates, and never lets what it queues depend on a value on the device.
"""

from typing import Any

import triton
import triton.language as tl

from gpu.kernels.cuda_sampling_work import CHUNK, Cut, Work, carve
from gpu.kernels.triton_filters import (
    SAMPLED,
    TYPES,
    VOCABULARIES,
    WARPS,
    _kept_by_chunk,
    _kept_in_chunk,
    _weights_of_row,
    filter_rows,
    spec_of,
)
from gpu.kernels.triton_spec import KernelSpec

Array = Any  # torch.Tensor
GREEDY_BELOW = tl.constexpr(1e-5)
FAULTY = tl.constexpr(-1)  # token of a row that is no distribution
TOKEN_DRAW = tl.constexpr(0)  # which of a token's random numbers draws it
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    """Finaliser of SplitMix64 on uint64."""
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, position, draw):  # type: ignore[no-untyped-def]
    """Number `draw` (constexpr) of a token's numbers in [0, 1), float64, for seed (64 bits) and position."""
    place = position.to(tl.int64).to(tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64) + GOLDEN) + place * GOLDEN)
    return (_mix(key + tl.full((), draw, tl.uint64) * GOLDEN) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _find(masses, goal):  # type: ignore[no-untyped-def]
    """First place at which the running sum of `masses` exceeds `goal`, and the sum before it."""
    past = tl.cumsum(masses, axis=0) <= goal
    return tl.sum(past.to(tl.int32), axis=0), tl.sum(tl.where(past, masses, 0), axis=0)


@triton.jit
def _goal(u, total):  # type: ignore[no-untyped-def]
    """A running sum exceeds u * total just when it exceeds this integer."""
    return tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def peak_kernel(  # type: ignore[no-untyped-def]
    logits, chunk_peaks, chunk_firsts, VOCAB: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr
):
    """Largest logit of a chunk, and the first token that has it; infinity where there is a NaN."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    peak = tl.max(tl.where(x <= float("inf"), x, float("inf")), axis=0)
    tl.store(chunk_peaks + row * PARTS + split, peak)
    tl.store(chunk_firsts + row * PARTS + split, tl.min(tl.where(x == peak, token, VOCAB), axis=0))


@triton.jit
def start_kernel(  # type: ignore[no-untyped-def]
    chunk_peaks,
    chunk_firsts,
    temperature,
    peaks,
    floors,
    choice,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Largest logit of a row; its choice: the greedy token, FAULTY, or SAMPLED."""
    row, split = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    inside = split < PARTS
    found = tl.load(chunk_peaks + row * PARTS + split, mask=inside, other=float("-inf"))
    first = tl.load(chunk_firsts + row * PARTS + split, mask=inside, other=0x7FFFFFFF)
    peak = tl.max(found, axis=0)
    token = tl.min(tl.where(found == peak, first, 0x7FFFFFFF), axis=0)
    token = tl.where(tl.load(temperature + row // WINDOW) < GREEDY_BELOW, token, SAMPLED)
    tl.store(choice + row, tl.where(tl.abs(peak) < float("inf"), token, FAULTY))
    tl.store(peaks + row, peak)
    tl.store(floors + row, 0)  # the search for the bound of top_k weighs with it


@triton.jit
def _draw(masses_of_chunks, ties_before, u):  # type: ignore[no-untyped-def]
    """Chunk in which the drawn token lies, tied tokens before it, and what is left of the goal there."""
    total = tl.sum(masses_of_chunks, axis=0)
    goal = _goal(u, total)
    chunk, before = _find(masses_of_chunks, goal)
    split = tl.arange(0, masses_of_chunks.shape[0])
    return chunk, tl.sum(tl.where(split == chunk, ties_before, 0), axis=0), goal - before


@triton.jit
def draw_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    min_p,
    seed,
    position,
    peaks,
    floors,
    bounds,
    tallies,
    choice,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Token at which the running sum of what stays of a row exceeds u * total."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(choice + row) == SAMPLED:
        u = _uniform(tl.load(seed + row), tl.load(position + row), TOKEN_DRAW)
        masses, ties_before = _kept_by_chunk(tallies, bounds, row, PARTS, SPLITS)
        chunk, tied, goal = _draw(masses, ties_before, u)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        bits = _weights_of_row(logits, peaks, temperature, min_p, floors, row, token, VOCAB, 1)
        kept = _kept_in_chunk(bits, tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1), tied)
        place, _ = _find(kept, goal)
        is_empty = tl.sum(masses, axis=0) == 0
        tl.store(choice + row, tl.where(is_empty, FAULTY, chunk * CHUNK + place))


def begin_rows(logits: Array, temperature: Array, choice: Array, work: Work, cut: Cut) -> None:
    """Largest logits to `work`; choice i32[rows] gets the greedy token, FAULTY, or SAMPLED where one is to be drawn."""
    rows = logits.shape[0]
    peak_kernel[(rows, cut.parts)](
        *(logits, work.chunk_peaks, work.chunk_firsts),
        num_warps=WARPS,
        **cut.constants("VOCAB", "CHUNK", "PARTS"),
    )
    start_kernel[(rows,)](
        *(work.chunk_peaks, work.chunk_firsts, temperature, work.peaks, work.floors, choice),
        num_warps=1,
        **cut.constants("PARTS", "SPLITS", "WINDOW"),
    )


def sample(
    logits: Array,
    temperature: Array,
    top_p: Array,
    min_p: Array,
    top_k: Array,
    seed: Array,
    position: Array,
    out: Array,
    scratch: Array,
    chunk: int = CHUNK,
) -> None:
    """Queue the drawing of one token for each of S rows into `out` i32[S].

    logits f32[S, V]; temperature, top_p, min_p f32[S]; top_k i32[S], 0 or less for none; seed i64[S], its bits;
    position i32[S], the place of the new token in its sequence; scratch i64[scratch_words(S, V, chunk)], of which
    nothing is kept between calls. A row with NaN or without a finite maximum gets -1. chunk, a power of two: tokens
    that one program looks at; no result depends on it. Raises ValueError when the scratch is too small.
    """
    rows, vocab = logits.shape
    if rows == 0:
        return
    cut, work = Cut(vocab, chunk, 1), carve(scratch, rows, vocab, chunk)
    begin_rows(logits, temperature, out, work, cut)
    filter_rows(logits, temperature, top_p, min_p, top_k, out, work, cut)
    draw_kernel[(rows,)](
        *(logits, temperature, min_p, seed, position, work.peaks, work.floors, work.bounds, work.tallies, out),
        num_warps=WARPS,
        **cut.constants("VOCAB", "CHUNK", "PARTS", "SPLITS"),
    )


def _specs(cut: Cut) -> list[KernelSpec]:
    return [
        spec_of(peak_kernel, cut.constants("VOCAB", "CHUNK", "PARTS"), TYPES),
        spec_of(start_kernel, cut.constants("PARTS", "SPLITS", "WINDOW"), TYPES, 1),
        spec_of(draw_kernel, cut.constants("VOCAB", "CHUNK", "PARTS", "SPLITS"), TYPES, WARPS),
    ]


SPECS: list[KernelSpec] = [spec for vocab in VOCABULARIES for spec in _specs(Cut(vocab, CHUNK, 1))]
