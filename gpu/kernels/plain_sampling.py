"""Plain references, in numpy, of sampling and of the acceptance of drafts: slow, row by row, float64, with sorts.

Owns what the operations mean. `sampling` and `window` on the host, `triton_sampling` and `triton_window` on CUDA are
compared with these. Their floats differ in the last bits, so near the border between two tokens they may differ in the
token. Never used to serve.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Array = NDArray[Any]

GREEDY_BELOW = 1e-5
FAULTY = -1
TOKEN_DRAW, ACCEPT_DRAW = 0, 1  # which of a token's random numbers
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


class Parameters(NamedTuple):
    """How the tokens of one request are drawn."""

    temperature: float
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int, draw: int) -> float:
    """Number `draw` of the numbers in [0, 1) that belong to a seed and a position."""
    key = _mix((_mix((seed + GOLDEN) & MASK) + position * GOLDEN) & MASK)
    return (_mix((key + draw * GOLDEN) & MASK) >> 11) / 2.0**53


def is_faulty(logits: Array) -> bool:
    """Whether a row is no distribution: NaN, or no finite maximum."""
    return bool(np.isnan(logits).any() or not np.isfinite(logits.max()))


def kept_weights(logits: Array, wanted: Parameters) -> Float64:
    """Weights that temperature, min_p, top_k and top_p leave of a row that is not faulty; the likeliest has 1.

    Parameters are rounded to float32, as which the kernels get them.
    """
    min_p, top_p = float(np.float32(wanted.min_p)), float(np.float32(wanted.top_p))
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) * (np.float32(1) / np.float32(wanted.temperature))
    weights: Float64 = np.exp(scaled.astype(np.float64))
    weights[weights < min_p] = 0
    if 0 < wanted.top_k < len(weights):
        weights[weights < np.sort(weights)[-wanted.top_k]] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        gone = before >= top_p * weights.sum()
        gone[0] = False
        weights[order[gone]] = 0
    return weights


def draw_from(weights: Float64, u: float) -> int:
    """First token at which the running sum exceeds u * total."""
    running = np.cumsum(weights)
    return int(np.argmax(running > u * running[-1]))


def sample(logits: Array, position: int, wanted: Parameters) -> int:
    """Token of one row of logits f32[V], for the place `position`; FAULTY if the row is no distribution."""
    if is_faulty(logits):
        return FAULTY
    if wanted.temperature < GREEDY_BELOW:
        return int(np.argmax(logits))
    return draw_from(kept_weights(logits, wanted), uniform(wanted.seed, position, TOKEN_DRAW))


def accept(
    logits: Array, drafts: Array, draft_probs: Array | None, position: int, wanted: Parameters
) -> tuple[list[int], bool]:
    """Tokens that one request gains: the accepted drafts, then one of the target's; and whether all were accepted.

    logits f32[W, V], of which row w follows the w-th draft; drafts i32[W - 1]; draft_probs f32[W - 1, V], what each
    draft was drawn from, or None where it is sure of its drafts; position: the place of the first token. Greedy
    requests accept while a draft is the target's choice. Others accept draft d with min(1, p(d) / q(d)), and draw from
    max(p - q, 0) where they reject, so that each token is distributed as p. Ends with FAULTY at a faulty row.
    """
    tokens: list[int] = []
    for w, draft in enumerate(int(d) for d in drafts):
        if wanted.temperature < GREEDY_BELOW or is_faulty(logits[w]):
            token = sample(logits[w], position + w, wanted)
            tokens.append(token)
            if token != draft or token == FAULTY:
                return tokens, False
            continue
        p = kept_weights(logits[w], wanted)
        p /= p.sum()
        known = 0 <= draft < len(p)
        q = np.zeros(len(p))
        if known:
            q = np.eye(len(p))[draft] if draft_probs is None else draft_probs[w].astype(np.float64)
        if known and uniform(wanted.seed, position + w, ACCEPT_DRAW) * q[draft] < p[draft]:
            tokens.append(draft)
            continue
        rest = np.maximum(p - q, 0)
        u = uniform(wanted.seed, position + w, TOKEN_DRAW)
        tokens.append(draw_from(rest if rest.sum() > 0 else p, u))
        return tokens, False
    w = len(drafts)
    return [*tokens, sample(logits[w], position + w, wanted)], True
