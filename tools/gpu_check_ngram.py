"""Drafts that are looked up by Triton, compared with the plain reference: what the part "kernels" runs.

Owns the texts: over small alphabets, so that many places match, and over larger ones, where hardly any does.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gpu.kernels import plain_ngram
from gpu.kernels.draft_kernels import Text
from gpu.kernels.step_kernels import NO_DRAFT, Gained, PassShape, Rows
from gpu.kernels.triton_ngram import TritonNgramKernels

ENTRIES, WINDOW = 6, 4
WIDTHS = {"cuda": 4097, "cpu": 65}  # places of a text; the interpreter pays for every block
LETTERS = (2, 40)


def compare_ngram(device: str) -> Iterator[tuple[str, float]]:
    """(operation, how many values differ)."""
    for letters in LETTERS:
        for shared in (False, True):
            yield (
                f"look-up among {letters} tokens, {'texts of all' if shared else 'own texts'}",
                _differing(device, letters, shared=shared),
            )


def _differing(device: str, letters: int, *, shared: bool) -> float:
    """A prompt noted, a look-up and gains noted, twice: the second look-up sees what was gained."""
    rng, width = np.random.default_rng((letters, shared)), WIDTHS[device]
    history, known = np.full((ENTRIES, width), -1, np.int32), np.zeros(ENTRIES, np.int32)
    plane = rng.integers(0, letters, (ENTRIES, width)).astype(np.int32)
    ends = rng.integers(width // 2, width - 2 * WINDOW, ENTRIES)
    texts = [Text(entry, ENTRIES - 1 - entry, int(ends[entry])) for entry in range(1, ENTRIES)]
    kernels = TritonNgramKernels(ENTRIES, device)
    noted, ends_known = (torch.from_numpy(array.copy()).to(device) for array in (history, known))
    kernels.note_prompts(noted, ends_known, torch.from_numpy(plane).to(device), texts)
    for entry, row, end in texts:
        history[entry, :end], known[entry] = plane[row, :end], end
    differ, shape = 0, PassShape.of_decode(ENTRIES, WINDOW)
    for _ in range(2):
        rows, gained = _rows(history, known), _gains(rng, letters)
        moved, moved_gains = _moved(rows, device), _moved(gained, device)
        kernels.look_up(noted, ends_known, moved, shape, shared=shared)
        plain_ngram.look_up(history, known, rows, shape, shared=shared)
        rows.lengths[1:] = known[1:] - 1 + gained.counts[1:]
        moved.lengths.copy_(torch.from_numpy(rows.lengths))
        kernels.note_gains(noted, ends_known, moved, moved_gains, shape)
        plain_ngram.note_gains(history, known, rows, gained, shape)
        for a, b in zip((noted, ends_known, moved.tokens), (history, known, rows.tokens), strict=True):
            differ += int((a.cpu().numpy() != b).sum())
    return float(differ)


def _rows(history: Any, known: Any) -> Rows:
    """All entries decode, and the padding in front of them."""
    nothing, at = np.zeros(0, np.int32), np.maximum(known - 1, 0)
    tokens = np.full((ENTRIES, WINDOW), NO_DRAFT, np.int32)
    tokens[:, 0] = history[np.arange(ENTRIES), at]
    positions = (at[:, None] + np.arange(WINDOW)).astype(np.int32)
    entries, lengths = np.arange(ENTRIES, dtype=np.int32), np.zeros(ENTRIES, np.int32)
    used = {"tokens": tokens.ravel(), "positions": positions.ravel(), "entries": entries, "lengths": lengths}
    return Rows(**(dict.fromkeys(Rows._fields, nothing) | used))


def _gains(rng: np.random.Generator, letters: int) -> Gained:
    counts = rng.integers(1, WINDOW + 1, ENTRIES).astype(np.int32)
    tokens = rng.integers(0, letters, (WINDOW, ENTRIES)).astype(np.int32)
    return Gained(counts, tokens, np.zeros(ENTRIES, np.int32))


def _moved(arrays: Any, device: str) -> Any:
    return type(arrays)(*(torch.from_numpy(array.copy()).to(device) for array in arrays))
