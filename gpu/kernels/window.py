"""Acceptance of drafted tokens on the host: what each request gains of a window of W = 1 + drafts positions.

Owns the comparison of drafts with the target, exact rejection sampling, and the lengths that follow. The target's
distributions are those that `sampling` draws from, made by the same functions, and with W = 1 the result is that of
`sampling.sample`, bit for bit. It keeps no state between calls. Random numbers belong to (seed, position): number 0
draws a token, number 1 decides over a draft.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.kernels.filters import BUCKETS, filter_weights
from gpu.kernels.native import entry, kernel
from gpu.kernels.sampling import (
    BLOCK_WORDS,
    GREEDY_BELOW,
    LOGITS,
    MIN_P,
    NO_TOP_K,
    POSITION,
    ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    SEED,
    STRIPE,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    VOCAB,
    Sampler,
    _largest,
    _sample_row,
    _weigh,
    uniform,
)
from gpu.kernels.team import Team, await_phase, finish, take
from gpu.kernels.vectors import load_f32, load_i32, load_u64, store_f32, store_i32, word

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]

FAULTY = -1
TOKEN_DRAW, ACCEPT_DRAW = np.uint64(0), np.uint64(1)  # which of a token's random numbers

# Words of the job's block behind those of `sampling`, whose rows are the W positions of each request, one by one.
WINDOW, DRAFTS, DRAFT_PROBS, LENGTHS, TOKENS, COUNTS, NEW_LENGTHS = range(BLOCK_WORDS, BLOCK_WORDS + 7)
WINDOW_BLOCK_WORDS = BLOCK_WORDS + 7


@kernel
def _keep_weights(block: int, row: int, scratch: int) -> float:
    """Weights of one row after all filters to `scratch`, 0 for tokens that went; returns their sum, 0 if faulty."""
    vocab = word(block, VOCAB)
    padded = (vocab + STRIPE - 1) // STRIPE * STRIPE
    weights = scratch
    sums = weights + 4 * padded
    copy = sums + 8 * (padded // STRIPE)
    logits = word(block, LOGITS) + 4 * vocab * row
    for i in range(padded):
        store_f32(copy + 4 * i, load_f32(logits + 4 * i) if i < vocab else np.float32(-np.inf))
    temperature, min_p = load_f32(word(block, TEMPERATURE) + 4 * row), load_f32(word(block, MIN_P) + 4 * row)
    top_p, top_k = load_f32(word(block, TOP_P) + 4 * row), np.int64(load_i32(word(block, TOP_K) + 4 * row))
    largest = _largest(copy, padded)
    if not abs(largest) < np.inf:
        return 0.0
    total = _weigh(copy, padded, largest, temperature, min_p, weights, sums)
    if (0 < top_k < vocab) or top_p < 1:
        lists = copy + 4 * padded
        count = filter_weights(weights, padded, top_k if top_k < vocab else NO_TOP_K, top_p, total, lists)
        tokens = lists + 8 * BUCKETS
        listed = tokens + 4 * padded + 64
        for i in range(padded):
            store_f32(weights + 4 * i, 0.0)
        for i in range(count):
            store_f32(weights + 4 * np.int64(load_i32(tokens + 4 * i)), load_f32(listed + 4 * i))
    total = 0.0
    for i in range(vocab):
        total += load_f32(weights + 4 * i)
    return total


@kernel
def _draft_prob(probs: int, token: int, draft: int) -> float:
    """Probability of a token for the drafter; one that has no distribution is sure of its draft."""
    if probs == 0:
        return 1.0 if token == draft else 0.0
    return np.float64(load_f32(probs + 4 * token))


@kernel
def _draw_rest(weights: int, vocab: int, probs: int, draft: int, total: float, u: float) -> int:
    """Draw from max(p - q, 0); -1 if nothing is left of it."""
    mass = 0.0
    for i in range(vocab):
        mass += max(load_f32(weights + 4 * i) - total * _draft_prob(probs, i, draft), 0.0)
    running, token = 0.0, -1
    for i in range(vocab):
        rest = load_f32(weights + 4 * i) - total * _draft_prob(probs, i, draft)
        if rest > 0:
            running += rest
            token = i
            if running > u * mass:
                break
    return token


@kernel
def _try_draft(block: int, request: int, w: int, draft: int, scratch: int) -> Any:
    """The token of position `w`: the draft if it is accepted, else what takes its place; and whether it is accepted."""
    vocab, window = word(block, VOCAB), word(block, WINDOW)
    row = request * window + w
    if load_f32(word(block, TEMPERATURE) + 4 * row) < GREEDY_BELOW:
        token = np.int64(_sample_row(block, row, scratch))
        return token, token == draft and token >= 0
    total = _keep_weights(block, row, scratch) if 0 <= draft < vocab else 0.0
    if total > 0:
        probs = word(block, DRAFT_PROBS)
        if probs != 0:
            probs += 4 * vocab * (w * (word(block, ROWS) // window) + request)
        seed = load_u64(word(block, SEED) + 8 * row)
        position = np.uint64(load_i32(word(block, POSITION) + 4 * row))
        bar = uniform(seed, position, ACCEPT_DRAW) * total * _draft_prob(probs, draft, draft)
        if bar < load_f32(scratch + 4 * draft):
            return draft, True
        rest = _draw_rest(scratch, vocab, probs, draft, total, uniform(seed, position, TOKEN_DRAW))
        if rest >= 0:  # nothing is left where p and q are equal but for rounding
            return np.int64(rest), False
    return np.int64(_sample_row(block, row, scratch)), False


@kernel
def _accept_request(block: int, request: int, scratch: int) -> None:
    """Fill the column of one request in the outputs."""
    window = word(block, WINDOW)
    requests = word(block, ROWS) // window
    count, goes_on = 0, True
    for w in range(window):
        token, place = np.int64(FAULTY), 4 * (w * requests + request)
        if goes_on:
            count += 1
            if w < window - 1:
                draft: Any = np.int64(load_i32(word(block, DRAFTS) + place))
                token, goes_on = _try_draft(block, request, w, draft, scratch)
            else:
                token = np.int64(_sample_row(block, request * window + w, scratch))
        store_i32(word(block, TOKENS) + place, np.int32(token))
    length = load_i32(word(block, LENGTHS) + 4 * request)
    store_i32(word(block, COUNTS) + 4 * request, np.int32(count))
    store_i32(word(block, NEW_LENGTHS) + 4 * request, np.int32(length + count - 1 if length > 0 else length))


@entry
def accept_requests(worker: int, block: int, control: int, first: int) -> None:
    """Job: one task for each request."""
    requests = word(block, ROWS) // word(block, WINDOW)
    scratch = word(block, SCRATCH) + worker * word(block, SCRATCH_BYTES)
    while True:
        request = take(control, first, requests)
        if request < 0:
            break
        _accept_request(block, request, scratch)
        finish(control, first, requests)
    await_phase(control, first)


class Acceptor(Sampler):
    """Working memory for `accept` by the threads of a team."""

    def __init__(self, team: Team) -> None:
        super().__init__(team)
        self._block = team.block(WINDOW_BLOCK_WORDS)


_acceptors: weakref.WeakKeyDictionary[Team, Acceptor] = weakref.WeakKeyDictionary()


def warm_up() -> None:
    """Compile, or load from the disk cache, what `accept` runs."""
    accept_requests.compile()


def accept(
    logits: Float32,
    drafts: Int32,
    draft_probs: Float32 | None,
    temperature: Float32,
    top_p: Float32,
    min_p: Float32,
    top_k: Int32,
    seed: npt.NDArray[np.uint64],
    position: Int32,
    lengths: Int32,
    tokens: Int32,
    counts: Int32,
    new_lengths: Int32,
    team: Team,
) -> None:
    """Accept drafts of S requests, and give each one token of the target's behind them.

    logits: float32 [S * W, V], of which row s * W + w follows the w-th draft of request s; drafts: int32 [W - 1, S],
    one that is no token is never accepted; draft_probs: float32 [W - 1, S, V], the distributions, with sum 1, from
    which the drafts were drawn, or None where the drafter is sure of its drafts. temperature, top_p, min_p: float32
    [S]; top_k: int32 [S]; seed: uint64 [S]; position: int32 [S], the place of the first new token. lengths: int32 [S],
    a request's length once it has gained one token, 0 for padding.

    Fills tokens int32 [W, S], those gained and -1 behind them; counts int32 [S], their numbers; new_lengths int32 [S],
    lengths + counts - 1, and 0 for padding (may be `lengths`). Greedy requests accept while a draft is the target's
    choice. Others accept draft d with min(1, p(d) / q(d)), and draw from max(p - q, 0) where they reject, so that
    every token is distributed as p, which is what `sample` draws from. All contiguous. Raises FloatingPointError, with
    their numbers, for requests that reached a row with NaN or no finite logit; their last token is -1. Raises
    ValueError for arguments of a wrong type or size.
    """
    (window, requests), (rows, vocab) = tokens.shape, logits.shape
    shapes: list[tuple[Any, Any, tuple[int, ...]]] = [
        (logits, np.float32, (requests * window, vocab)),
        (drafts, np.int32, (window - 1, requests)),
        (tokens, np.int32, (window, requests)),
        *((array, np.float32, (requests,)) for array in (temperature, top_p, min_p)),
        *((array, np.int32, (requests,)) for array in (top_k, position, lengths, counts, new_lengths)),
        (seed, np.uint64, (requests,)),
    ]
    if draft_probs is not None:
        shapes.append((draft_probs, np.float32, (window - 1, requests, vocab)))
    for place, (array, dtype, shape) in enumerate(shapes):
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            found = f"{array.dtype} {list(array.shape)}"
            raise ValueError(f"array {place} must be contiguous {np.dtype(dtype).name} {list(shape)}, is {found}")
    if requests == 0:
        return
    if team not in _acceptors:
        _acceptors[team] = Acceptor(team)
    block = _acceptors[team].prepare(vocab)
    # `sampling` takes the parameters of every row
    places = (position[:, None] + np.arange(window, dtype=np.int32)).reshape(-1)
    spread = [np.repeat(array, window) for array in (temperature, top_p, min_p, top_k, seed)]
    block[ROWS], block[WINDOW], block[LOGITS] = rows, window, logits.ctypes.data
    for index, array in zip((TEMPERATURE, TOP_P, MIN_P, TOP_K, SEED, POSITION), (*spread, places), strict=True):
        block[index] = array.ctypes.data
    outputs = (drafts, lengths, tokens, counts, new_lengths)
    for index, array in zip((DRAFTS, LENGTHS, TOKENS, COUNTS, NEW_LENGTHS), outputs, strict=True):
        block[index] = array.ctypes.data
    block[DRAFT_PROBS] = 0 if draft_probs is None else draft_probs.ctypes.data
    team.run(accept_requests, block)
    last = tokens[counts - 1, np.arange(requests)]
    if last.min() < 0:
        raise FloatingPointError(f"logits of requests {np.flatnonzero(last < 0).tolist()} hold NaN or no finite value")
