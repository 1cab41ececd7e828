"""top_k and top_p over the weights of many rows on CUDA, without sorting.

Owns how the vocabulary of a row is cut over programs, and how weights are summed. A weight counts as its float times
2^44, as an integer, so that sums are exact: they depend neither on their order nor on the number of programs, and what
stays of a row depends on its own logits and parameters only. Weights below 2^-44 of the likeliest token's count as
nothing.

The weight at which a filter cuts is found digit by digit in the bits of its float: each of `LEVELS` launches adds up,
for every chunk of the vocabulary, what lies at or above each of 32 thresholds, and the next one begins by choosing
among them. No launch depends on a value on the device; programs of rows that need no more work return at once. Weights
are never stored: every program makes them again from the logits, always by the same instructions. Nothing here
allocates.
"""

from typing import Any

import triton
import triton.language as tl

from gpu.kernels.cuda_sampling_work import CHUNK, DIGITS_OF_SEARCH, STATE_SIZE, TALLY_SIZE, Cut, Work, scratch_words
from gpu.kernels.triton_spec import KernelSpec

__all__ = ["CHUNK", "SAMPLED", "SPECS", "filter_rows", "scratch_words", "spec_of"]  # two of them for callers' sake

Array = Any  # torch.Tensor
WARPS = 16  # sums of a chunk in int64 take registers
LEVELS = tl.constexpr(6)  # of 5 bits: weights lie in (0, 1], so the bits of their floats are below 2^30
DIGIT_BITS = tl.constexpr(5)
DIGITS = tl.constexpr(DIGITS_OF_SEARCH)
STATE_WORDS = tl.constexpr(STATE_SIZE)
TALLY_WORDS = tl.constexpr(TALLY_SIZE)
FIXED_ONE = tl.constexpr(17592186044416.0)  # 2^44; times 2^18 tokens it stays below 2^63
SAMPLED = tl.constexpr(-2)  # in `choice`: this row's token is still to be drawn


@triton.jit
def _fixed(bits):  # type: ignore[no-untyped-def]
    """The mass of a weight, from the bits of its float."""
    return (bits.to(tl.float32, bitcast=True) * FIXED_ONE).to(tl.int64)


@triton.jit
def _weigh(logits, row, token, peak, temperature, min_p, floor, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of the weights of a row's tokens; 0 beyond the vocabulary, below min_p, and below the bits `floor`."""
    x = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf"))
    weight = tl.exp((x - peak) * (1.0 / temperature))
    bits = tl.where(weight >= min_p, weight, 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= floor, bits, 0)


@triton.jit
def _weights_of_row(  # type: ignore[no-untyped-def]
    logits, peaks, temperature, min_p, floors, row, token, VOCAB: tl.constexpr, WINDOW: tl.constexpr
):
    """`_weigh` with the parameters of the row's request."""
    owner = row // WINDOW
    heat, least = tl.load(temperature + owner), tl.load(min_p + owner)
    return _weigh(logits, row, token, tl.load(peaks + row), heat, least, tl.load(floors + row), VOCAB)


@triton.jit
def _narrow(  # type: ignore[no-untyped-def]
    states, partials, row, rows, level, share, BY_MASS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr
):
    """Lower end of the bracket, sum above its upper end, and goal, once the sums of `level` - 1 are there."""
    past = ((level - 1) % 2) * rows + row
    split, digit = tl.arange(0, SPLITS)[:, None], tl.arange(0, DIGITS)
    place = partials + (past * PARTS + split) * DIGITS + digit[None, :]
    sums = tl.sum(tl.load(place, mask=split < PARTS, other=0), axis=0)
    low = tl.load(states + past * STATE_WORDS)
    above = tl.load(states + past * STATE_WORDS + 1)
    goal = tl.load(states + past * STATE_WORDS + 2)
    if BY_MASS and level == 1:  # the first bracket holds all
        total = tl.max(sums, axis=0)
        wanted = tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
        goal = tl.minimum(tl.maximum(wanted, 1), total)
    chosen = tl.maximum(tl.max(tl.where(above + sums >= goal, digit, -1), axis=0), 0)
    above += tl.sum(tl.where(digit == chosen + 1, sums, 0), axis=0)
    low += chosen.to(tl.int64) << (DIGIT_BITS * (LEVELS - level))
    return low, above, goal


@triton.jit
def _kept_in_chunk(bits, bound, ties, ties_before):  # type: ignore[no-untyped-def]
    """Masses of a chunk's tokens that stay: those above `bound`, and the first `ties` at it in the row."""
    tied = ((bits == bound) & (bits > 0)).to(tl.int64)
    rank = ties_before + tl.cumsum(tied, axis=0) - tied
    return tl.where((bits > bound) | ((tied > 0) & (rank < ties)), _fixed(bits), 0)


@triton.jit
def _kept_by_chunk(tallies, bounds, row, PARTS: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Masses of a row's chunks after all filters, and the tied tokens before each, [SPLITS]."""
    split = tl.arange(0, SPLITS)
    place = tallies + (row * PARTS + split) * TALLY_WORDS
    above = tl.load(place, mask=split < PARTS, other=0)
    tied = tl.load(place + 1, mask=split < PARTS, other=0)
    before = tl.cumsum(tied, axis=0) - tied
    bound, ties = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
    kept = tl.minimum(tl.maximum(ties - before, 0), tied)
    return above + kept * _fixed(tl.maximum(bound, 0).to(tl.int32)), before


@triton.jit(do_not_specialize=["rows", "level"])
def cut_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    min_p,
    share,
    peaks,
    choice,
    floors,
    states,
    partials,
    rows,
    level,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Level `level` of the search for the bound of top_k (share = top_k) or of top_p (BY_MASS, share = top_p)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = tl.load(share + row // WINDOW)
    active = part < 1 if BY_MASS else (part > 0) & (part < VOCAB)
    if active & (tl.load(choice + row) == SAMPLED):
        low = tl.full((), 0, tl.int64)
        above = tl.full((), 0, tl.int64)
        goal = part.to(tl.int64)
        if level > 0:
            low, above, goal = _narrow(states, partials, row, rows, level, part, BY_MASS, PARTS, SPLITS)
        now = (level % 2) * rows + row
        if split == 0:
            tl.store(states + now * STATE_WORDS, low)
            tl.store(states + now * STATE_WORDS + 1, above)
            tl.store(states + now * STATE_WORDS + 2, goal)
        token = split * CHUNK + tl.arange(0, CHUNK)
        bits = _weights_of_row(logits, peaks, temperature, min_p, floors, row, token, VOCAB, WINDOW)
        digit = (bits - low) >> (DIGIT_BITS * (LEVELS - 1 - level))
        value = _fixed(bits) if BY_MASS else tl.full((CHUNK,), 1, tl.int64)
        inside = (bits > 0) & (bits >= low) & (digit < DIGITS)
        value = tl.where(inside, value, 0)
        place = tl.arange(0, DIGITS)
        lowest = tl.min(tl.where(inside, digit, DIGITS), axis=0).to(tl.int32)
        highest = tl.max(tl.where(inside, digit, -1), axis=0).to(tl.int32)
        sums = tl.where(place <= lowest, tl.sum(value, axis=0), 0)
        for threshold in range(lowest + 1, highest + 1):
            mass = tl.sum(tl.where(digit >= threshold, value, 0), axis=0)
            sums = tl.where(place == threshold, mass, sums)
        tl.store(partials + (now * PARTS + split) * DIGITS + place, sums)


@triton.jit(do_not_specialize=["rows"])
def settle_kernel(  # type: ignore[no-untyped-def]
    share,
    choice,
    floors,
    bounds,
    states,
    partials,
    rows,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """End of a search: `floors` of top_k; of top_p `bounds`, the bits above which tokens stay, and how many at them."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.load(share + row // WINDOW)
    bound = tl.full((), -1 if BY_MASS else 0, tl.int64)
    ties = tl.full((), 0, tl.int64)
    active = part < 1 if BY_MASS else (part > 0) & (part < VOCAB)
    if active & (tl.load(choice + row) == SAMPLED):
        bound, above, goal = _narrow(states, partials, row, rows, LEVELS, part, BY_MASS, PARTS, SPLITS)
        mass = tl.maximum(_fixed(bound.to(tl.int32)), 1)
        ties = (goal - above + mass - 1) // mass
    if BY_MASS:
        tl.store(bounds + 2 * row, bound)
        tl.store(bounds + 2 * row + 1, ties)
    else:
        tl.store(floors + row, bound.to(tl.int32))


@triton.jit
def tally_kernel(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    min_p,
    peaks,
    choice,
    floors,
    bounds,
    tallies,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Of each chunk of a row: the mass above the bound of top_p, and the number of tokens at it."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(choice + row) == SAMPLED:
        token = split * CHUNK + tl.arange(0, CHUNK)
        bits = _weights_of_row(logits, peaks, temperature, min_p, floors, row, token, VOCAB, WINDOW)
        bound = tl.load(bounds + 2 * row)
        place = tallies + (row * PARTS + split) * TALLY_WORDS
        tl.store(place, tl.sum(tl.where(bits > bound, _fixed(bits), 0), axis=0))
        tl.store(place + 1, tl.sum(((bits == bound) & (bits > 0)).to(tl.int64), axis=0))


def filter_rows(
    logits: Array, temperature: Array, top_p: Array, min_p: Array, top_k: Array, choice: Array, work: Work, cut: Cut
) -> None:
    """Find what top_k and top_p leave of the rows whose `choice` i32[rows] is SAMPLED; fills floors, bounds, tallies.

    logits f32[rows, vocab]; `peaks` must be there; parameters [rows / window].
    """
    rows = logits.shape[0]
    grid, search = (rows, cut.parts), (work.floors, work.states, work.partials, rows)
    small = cut.constants("VOCAB", "PARTS", "SPLITS", "WINDOW")
    for share, by_mass in ((top_k, False), (top_p, True)):
        for level in range(LEVELS.value):
            cut_kernel[grid](
                *(logits, temperature, min_p, share, work.peaks, choice, *search, level),
                BY_MASS=by_mass,
                num_warps=WARPS,
                **cut.constants(),
            )
        settle_kernel[(rows,)](
            *(share, choice, work.floors, work.bounds, work.states, work.partials, rows),
            BY_MASS=by_mass,
            num_warps=4,
            **small,
        )
    tally_kernel[grid](
        *(logits, temperature, min_p, work.peaks, choice, work.floors, work.bounds, work.tallies),
        num_warps=WARPS,
        **cut.constants("VOCAB", "CHUNK", "PARTS", "WINDOW"),
    )


TYPES = {
    **dict.fromkeys(("logits", "temperature", "min_p", "top_p", "peaks", "chunk_peaks"), "*fp32"),
    **dict.fromkeys(("choice", "floors", "top_k", "chunk_firsts", "position"), "*i32"),
    **dict.fromkeys(("bounds", "states", "partials", "tallies", "seed"), "*i64"),
    **dict.fromkeys(("rows", "level"), "i32"),
}
VOCABULARIES = (49152, 151936)  # SmolLM2, Qwen3


def spec_of(kernel: Any, constants: dict[str, int], types: dict[str, str], warps: int = WARPS) -> KernelSpec:
    """A spec whose arguments have the types that `types` gives to their names, and pointers to multiples of 16."""
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return KernelSpec(kernel, signature, constants, pointers, {"num_warps": warps})


def _specs(cut: Cut) -> list[KernelSpec]:
    small, tally = cut.constants("VOCAB", "PARTS", "SPLITS", "WINDOW"), ("VOCAB", "CHUNK", "PARTS", "WINDOW")
    specs = [spec_of(tally_kernel, cut.constants(*tally), TYPES)]
    for by_mass in (False, True):
        types = {**TYPES, "share": "*fp32" if by_mass else "*i32"}
        specs.append(spec_of(cut_kernel, {"BY_MASS": by_mass, **cut.constants()}, types))
        specs.append(spec_of(settle_kernel, {"BY_MASS": by_mass, **small}, types, 4))
    return specs


SPECS: list[KernelSpec] = [spec for vocab in VOCABULARIES for spec in _specs(Cut(vocab, CHUNK, 1))]
