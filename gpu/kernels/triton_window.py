"""Acceptance of drafted tokens on CUDA: what each request gains of a window of W = 1 + drafts positions.

Owns the comparison of drafts with the target, exact rejection sampling, and the lengths that follow. The target's
distributions are those that `triton_sampling` draws from, found by the same kernels, and with W = 1 the result is that
of `triton_sampling.sample`. Random numbers belong to (seed, position): number 0 draws a token, number 1 decides over a
draft. Never allocates, and never lets what it queues depend on a value on the device.
"""

from typing import Any

import triton
import triton.language as tl

from gpu.kernels.cuda_sampling_work import CHUNK, Cut, carve
from gpu.kernels.triton_filters import (
    SAMPLED,
    TYPES,
    VOCABULARIES,
    WARPS,
    _fixed,
    _kept_by_chunk,
    _kept_in_chunk,
    _weights_of_row,
    filter_rows,
    spec_of,
)
from gpu.kernels.triton_sampling import FAULTY, TOKEN_DRAW, _draw, _find, _uniform, begin_rows
from gpu.kernels.triton_spec import KernelSpec

Array = Any  # torch.Tensor
ACCEPT_DRAW = tl.constexpr(1)  # which of a token's random numbers decides over a draft


@triton.jit
def _target_chunk(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    min_p,
    peaks,
    floors,
    bounds,
    row,
    chunk,
    tied,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Masses of the target for one chunk of a row, [CHUNK]; `tied` tied tokens lie before it."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    bits = _weights_of_row(logits, peaks, temperature, min_p, floors, row, token, VOCAB, WINDOW)
    return _kept_in_chunk(bits, tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1), tied)


@triton.jit
def _mass_of(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    min_p,
    peaks,
    floors,
    bounds,
    row,
    token,
    ties_before,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Mass of one token of a row for the target; ties_before [SPLITS] tied tokens lie before each chunk."""
    chunk = token // CHUNK
    near = chunk * CHUNK + tl.arange(0, CHUNK)
    weights = _weights_of_row(logits, peaks, temperature, min_p, floors, row, near, VOCAB, WINDOW)
    bits = tl.sum(tl.where(near == token, weights, 0), axis=0)
    bound, ties = tl.load(bounds + 2 * row), tl.load(bounds + 2 * row + 1)
    rank = tl.sum(tl.where(tl.arange(0, SPLITS) == chunk, ties_before, 0), axis=0)
    rank += tl.sum(((weights == bound) & (near < token)).to(tl.int64), axis=0)
    return tl.where((bits > bound) | ((bits == bound) & (rank < ties)), _fixed(bits), 0)


@triton.jit
def _rest(  # type: ignore[no-untyped-def]
    target, draft_probs, plane, draft, token, total, VOCAB: tl.constexpr, FULL: tl.constexpr
):
    """What a rejected draft leaves of the target's masses: max(p - q, 0), or p without the draft."""
    if FULL:
        known = (draft >= 0) & (draft < VOCAB)
        q = tl.load(draft_probs + plane * VOCAB + token, mask=(token < VOCAB) & known, other=0.0)
        return tl.maximum(target - (q.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 0)
    return tl.where(token == draft, 0, target)


@triton.jit(do_not_specialize=["requests"])
def judge_kernel(  # type: ignore[no-untyped-def]
    logits,
    drafts,
    draft_probs,
    temperature,
    min_p,
    seed,
    position,
    peaks,
    floors,
    bounds,
    tallies,
    choice,
    lengths,
    tokens,
    counts,
    new_lengths,
    requests,
    FULL: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Accept the drafts of one request, up to the first that the target rejects; greedy requests are done then."""
    request = tl.program_id(0).to(tl.int64)
    accepted = tl.full((), 0, tl.int32)
    for w in range(WINDOW - 1):
        row = request * WINDOW + w
        draft = tl.load(drafts + w * requests + request)
        chosen = tl.load(choice + row)
        takes = (chosen == draft) & (chosen >= 0)
        if (accepted == w) & (chosen == SAMPLED) & (draft >= 0) & (draft < VOCAB):
            masses, before = _kept_by_chunk(tallies, bounds, row, PARTS, SPLITS)
            mass = _mass_of(
                logits, temperature, min_p, peaks, floors, bounds, row, draft, before, VOCAB, CHUNK, SPLITS, WINDOW
            )
            bar = _uniform(tl.load(seed + request), tl.load(position + request) + w, ACCEPT_DRAW)
            bar *= tl.sum(masses, axis=0).to(tl.float64)
            if FULL:
                bar *= tl.load(draft_probs + (w * requests + request) * VOCAB + draft).to(tl.float64)
            takes = bar < mass.to(tl.float64)
        accepted += (takes & (accepted == w)).to(tl.int32)
    for w in range(WINDOW):
        plane = w * requests + request
        draft = tl.load(drafts + plane, mask=w < accepted, other=0)
        chosen = tl.load(choice + request * WINDOW + w)
        token = tl.where(w < accepted, draft, tl.where(w == accepted, chosen, -1))
        tl.store(tokens + plane, token)
    tl.store(counts + request, accepted + 1)
    length = tl.load(lengths + request)
    tl.store(new_lengths + request, tl.where(length > 0, length + accepted, length))


@triton.jit(do_not_specialize=["requests"])
def rest_kernel(  # type: ignore[no-untyped-def]
    logits,
    drafts,
    draft_probs,
    temperature,
    min_p,
    peaks,
    floors,
    bounds,
    tallies,
    choice,
    counts,
    rests,
    requests,
    FULL: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Mass that a rejected draft leaves of each chunk of the target."""
    request, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = tl.load(counts + request) - 1
    row = request * WINDOW + w
    if (w < WINDOW - 1) & (tl.load(choice + row) == SAMPLED):
        masses, before = _kept_by_chunk(tallies, bounds, row, PARTS, SPLITS)
        tied = tl.sum(tl.where(tl.arange(0, SPLITS) == chunk, before, 0), axis=0)
        target = _target_chunk(
            logits, temperature, min_p, peaks, floors, bounds, row, chunk, tied, VOCAB, CHUNK, WINDOW
        )
        plane = w * requests + request
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        total = tl.sum(masses, axis=0)
        rest = _rest(target, draft_probs, plane, tl.load(drafts + plane), token, total, VOCAB, FULL)
        tl.store(rests + request * PARTS + chunk, tl.sum(rest, axis=0))


@triton.jit(do_not_specialize=["requests"])
def close_kernel(  # type: ignore[no-untyped-def]
    logits,
    drafts,
    draft_probs,
    temperature,
    min_p,
    seed,
    position,
    peaks,
    floors,
    bounds,
    tallies,
    choice,
    counts,
    rests,
    tokens,
    requests,
    FULL: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """The last token that a request gains: from the target, or from what a rejected draft leaves of it."""
    request = tl.program_id(0).to(tl.int64)
    w = tl.load(counts + request) - 1
    row = request * WINDOW + w
    if tl.load(choice + row) == SAMPLED:
        u = _uniform(tl.load(seed + request), tl.load(position + request) + w, TOKEN_DRAW)
        masses, before = _kept_by_chunk(tallies, bounds, row, PARTS, SPLITS)
        total = tl.sum(masses, axis=0)
        split = tl.arange(0, SPLITS)
        rejected = w < WINDOW - 1
        left = tl.load(rests + request * PARTS + split, mask=(split < PARTS) & rejected, other=0)
        rejected = rejected & (tl.sum(left, axis=0) > 0)  # nothing is left where p and q are equal but for rounding
        chunk, tied, goal = _draw(tl.where(rejected, left, masses), before, u)
        target = _target_chunk(
            logits, temperature, min_p, peaks, floors, bounds, row, chunk, tied, VOCAB, CHUNK, WINDOW
        )
        if rejected:
            plane = w * requests + request
            token = chunk * CHUNK + tl.arange(0, CHUNK)
            target = _rest(target, draft_probs, plane, tl.load(drafts + plane), token, total, VOCAB, FULL)
        place, _ = _find(target, goal)
        tl.store(tokens + w * requests + request, tl.where(total == 0, FAULTY, chunk * CHUNK + place))


def accept(
    logits: Array,
    drafts: Array,
    draft_probs: Array | None,
    temperature: Array,
    top_p: Array,
    min_p: Array,
    top_k: Array,
    seed: Array,
    position: Array,
    lengths: Array,
    tokens: Array,
    counts: Array,
    new_lengths: Array,
    choice: Array,
    scratch: Array,
    chunk: int = CHUNK,
) -> None:
    """Queue the acceptance of W - 1 drafts for each of S requests. See `window.accept` for the meaning.

    logits f32[S * W, V]; drafts i32[W - 1, S]; draft_probs f32[W - 1, S, V] or None; temperature, top_p, min_p f32[S];
    top_k, position, lengths, counts, new_lengths i32[S]; seed i64[S], its bits; tokens i32[W, S]; choice i32[S * W],
    working memory; scratch i64[scratch_words(S * W, V, chunk)]. `new_lengths` may be `lengths`. A faulty row that is
    reached gives -1. chunk as in `triton_sampling.sample`. Raises ValueError when the scratch is too small.
    """
    (window, requests), (rows, vocab) = tokens.shape, logits.shape
    if requests == 0:
        return
    cut, work = Cut(vocab, chunk, window), carve(scratch, rows, vocab, chunk)
    begin_rows(logits, temperature, choice, work, cut)
    filter_rows(logits, temperature, top_p, min_p, top_k, choice, work, cut)
    full = draft_probs is not None
    guess = (logits, drafts if window > 1 else choice, draft_probs if full else logits, temperature, min_p)
    found = (work.peaks, work.floors, work.bounds, work.tallies, choice)
    rests = work.partials  # the searches are over
    options = {"FULL": full, **cut.constants()}
    judge_kernel[(requests,)](
        *(*guess, seed, position, *found, lengths, tokens, counts, new_lengths, requests),
        num_warps=WARPS,
        **options,
    )
    if window > 1:
        rest_kernel[(requests, cut.parts)](*(*guess, *found, counts, rests, requests), num_warps=WARPS, **options)
    close_kernel[(requests,)](
        *(*guess, seed, position, *found, counts, rests, tokens, requests), num_warps=WARPS, **options
    )


def _specs(cut: Cut) -> list[KernelSpec]:
    ints = dict.fromkeys(("drafts", "lengths", "tokens", "counts", "new_lengths"), "*i32")
    types = {**TYPES, **ints, "draft_probs": "*fp32", "rests": "*i64", "requests": "i32"}
    return [
        spec_of(kernel, {"FULL": full, **cut.constants()}, types, WARPS)
        for kernel in (judge_kernel, rest_kernel, close_kernel)
        for full in (False, True)
    ]


SPECS: list[KernelSpec] = [spec for vocab in VOCABULARIES for spec in _specs(Cut(vocab, CHUNK, 4))]
