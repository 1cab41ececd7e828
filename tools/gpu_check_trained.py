"""What trained drafters take out of a pass and put into it by Triton, against the plain reference: part "kernels".

Owns the pass: windows, padding among them, and chunks, of which some are the last of their prompt.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gpu.kernels import plain_trained
from gpu.kernels.draft_kernels import NO_TAIL
from gpu.kernels.step_kernels import PassShape, Rows
from gpu.kernels.triton_trained import TritonTrainedKernels

DECODE, WINDOW, LASTS = 5, 4, (True, False, True)
SIZES = {"cuda": ((300, 1, 700), 1024, 32000), "cpu": ((7, 1, 4), 24, 40)}  # tokens of chunks, hidden, vocabulary
ENTRIES = 12


def compare_trained(device: str) -> Iterator[tuple[str, float]]:
    """(operation, how many values differ)."""
    sizes, hidden, width = SIZES[device]
    rng, kernels = np.random.default_rng(5), TritonTrainedKernels()
    rows, shape = _rows(rng, sizes), _shape(sizes)
    targets = rng.integers(-1, 99, shape.samples).astype(np.int32)
    tails = np.where(LASTS, NO_TAIL, 50).astype(np.int32)
    counts = rng.integers(1, WINDOW + 1, DECODE).astype(np.int32)
    logits = rng.integers(0, width // 2, (DECODE * (WINDOW - 1), width)).astype(np.float32)  # some are equal
    vocabulary = (3 * np.arange(width) + 1).astype(np.int32)
    kept = rng.standard_normal((ENTRIES, hidden)).astype(np.float32)
    residual = rng.standard_normal((shape.tokens, hidden)).astype(np.float32)
    states = np.zeros((DECODE, 1, hidden), np.float32)
    behind, places, blocks, last = (_ints(n) for n in (shape.tokens, shape.gainers, *[DECODE * WINDOW] * 2))
    wanted = _ints(DECODE * (WINDOW - 1))

    def differing(name: str, mine: Any, plain: Any, *arrays: Any) -> tuple[str, float]:
        """Both do the same to arrays of their own; the reference's are those that the next operation works on."""
        moved = [_moved(array, device) for array in arrays]
        mine(*moved)
        plain(*arrays)
        pairs = zip(_flat(moved), _flat(arrays), strict=True)
        return name, float(sum(int((a.cpu().numpy() != b).sum()) for a, b in pairs))

    yield differing(
        "tokens behind a pass",
        lambda r, t, c, o: kernels.next_tokens(r, t, c, shape, o),
        lambda r, t, c, o: plain_trained.next_tokens(r, t, c, shape, o),
        *(rows, targets, tails, behind),
    )
    yield differing(
        "newest places",
        lambda c, r, o: kernels.newest_places(c, r, shape, o),
        lambda c, r, o: plain_trained.newest_places(c, r, shape, o),
        *(counts, rows, places),
    )
    yield differing(
        "likeliest drafts",
        lambda x, v, t: kernels.put_drafts(x, v, t, WINDOW, 1, WINDOW - 1),
        lambda x, v, t: plain_trained.put_drafts(x, v, t, WINDOW, 1, WINDOW - 1),
        *(logits, vocabulary, rows.tokens),
    )
    entries = rows.entries[: shape.gainers]
    yield differing("what a row keeps", kernels.keep, plain_trained.keep, kept, entries, residual, places)
    yield differing(
        "what a row recalls",
        lambda k, r, s: kernels.recall(k, r, shape, s),
        lambda k, r, s: plain_trained.recall(k, r, shape, s),
        *(kept, rows, states),
    )
    yield differing(
        "blocks",
        lambda r, *out: kernels.lay_blocks(r, shape, 77, *out),
        lambda r, *out: plain_trained.lay_blocks(r, shape, 77, *out),
        *(rows, blocks, last, wanted),
    )
    windows = np.zeros((shape.decode * WINDOW, *states.shape[1:]), np.float32)
    yield differing(
        "what a block begins with",
        lambda k, r, s: kernels.recall(k, r, shape, s),
        lambda k, r, s: plain_trained.recall(k, r, shape, s),
        *(kept, rows, windows),
    )


def _ints(count: int) -> Any:
    return np.full(count, 9, np.int32)


def _shape(sizes: tuple[int, ...]) -> PassShape:
    tokens = DECODE * WINDOW + sum(sizes)
    return PassShape(DECODE, len(sizes), tokens, sum(LASTS), max(sizes), WINDOW)


def _rows(rng: np.random.Generator, sizes: tuple[int, ...]) -> Rows:
    """A pass; the first two rows are padding."""
    before, shape = DECODE * WINDOW, _shape(sizes)
    starts = np.cumsum([0, *[WINDOW] * DECODE, *sizes])
    ends = [int(end) - 1 for end, last in zip(starts[DECODE + 1 :], LASTS, strict=True) if last]
    used = {
        "tokens": rng.integers(1, 99, shape.tokens),
        "positions": np.concatenate([at + np.arange(WINDOW) for at in range(DECODE)]),
        "starts": starts,
        "entries": np.array([0, 0, *range(1, shape.gainers - 1)]),
        "logit_rows": np.array([*range(before), *ends]),
    }
    nothing = dict.fromkeys(Rows._fields, np.zeros(0, np.int32))
    return Rows(**(nothing | {name: array.astype(np.int32) for name, array in used.items()}))


def _moved(arrays: Any, device: str) -> Any:
    if isinstance(arrays, tuple):
        return type(arrays)(*(_moved(array, device) for array in arrays))
    return torch.from_numpy(arrays.copy()).to(device)


def _flat(arrays: Any) -> Iterator[Any]:
    for array in arrays:
        yield from array if isinstance(array, tuple) else (array,)
