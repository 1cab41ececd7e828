"""Texts of entries, and rows that decode them: what the tests of drafts that are looked up have in common."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpu.kernels.step_kernels import NO_DRAFT, Gained, PassShape, Rows

SENTINEL = -77


@dataclass
class Texts:
    """See `NgramKernels`."""

    history: Any
    known: Any
    FILL: ClassVar[int] = -5  # where there is no text yet

    @classmethod
    def of(cls, texts: list[list[int]], width: int) -> "Texts":
        """Entry 0 is padding, the others follow."""
        history = np.full((len(texts) + 1, width), cls.FILL, np.int32)
        for entry, text in enumerate(texts, 1):
            history[entry, : len(text)] = text
        return cls(history, np.array([0, *map(len, texts)], np.int32))

    def copy(self) -> "Texts":
        return Texts(self.history.copy(), self.known.copy())


def rows_of(texts: Texts, decode: list[int], window: int) -> Rows:
    """What a gather leaves for these entries, as far as drafters look at it."""
    nothing = np.zeros(0, np.int32)
    arrays = dict.fromkeys(Rows._fields, nothing)
    at = np.array([texts.known[entry] - 1 if entry else 0 for entry in decode])
    newest = np.array([texts.history[entry, place] if entry else 0 for entry, place in zip(decode, at, strict=True)])
    tokens = np.full(len(decode) * window + 3, SENTINEL, np.int32)
    tokens[: len(decode) * window] = NO_DRAFT
    tokens[: len(decode) * window : window] = newest
    positions = np.full(len(tokens), SENTINEL, np.int32)
    positions[: len(decode) * window] = (at[:, None] + np.arange(window)).ravel()
    entries = np.array([*decode, SENTINEL], np.int32)
    lengths = np.zeros(len(entries), np.int32)
    return Rows(**(arrays | {"tokens": tokens, "positions": positions, "entries": entries, "lengths": lengths}))


def random_texts(
    rng: np.random.Generator, window: int, letters: int, entries: int = 6, width: int = 24
) -> tuple[Texts, Rows, PassShape]:
    """Texts over a small alphabet, some of them of ended rows, and decode rows with padding behind them."""
    lengths = rng.integers(1, width + 1, entries - 1)
    lengths[rng.random(entries - 1) < 0.1] = 1
    texts = Texts.of([rng.integers(0, letters, n).tolist() for n in lengths], width)
    running = rng.permutation(np.arange(1, entries))[: rng.integers(0, entries)].tolist()
    decode = [*running, *[0] * int(rng.integers(0 if running else 1, 3))]
    ended = np.setdiff1d(np.arange(1, entries), running)
    texts.known[ended[rng.random(len(ended)) < 0.3]] = 0  # nobody has been here yet
    return texts, rows_of(texts, decode, window), PassShape.of_decode(len(decode), window)


def random_gains(rng: np.random.Generator, planes: int) -> tuple[Rows, Gained, PassShape, Texts]:
    """Decode rows, padding and last chunks that gain something."""
    entries, width = 8, 20
    texts = Texts.of([rng.integers(1, 9, n).tolist() for n in rng.integers(1, width - planes, entries - 1)], width)
    decode, lasts = int(rng.integers(0, 4)), int(rng.integers(0, 3))
    padding = int(rng.integers(0 if decode + lasts else 1, 3))
    chosen = rng.permutation(np.arange(1, entries))[: decode + lasts]
    rows = rows_of(texts, [*chosen[:decode].tolist(), *[0] * padding, *chosen[decode:].tolist()], planes)
    shape = PassShape(decode + padding, lasts, (decode + padding) * planes + lasts, lasts, planes, planes)
    counts = np.full(shape.gainers + 2, SENTINEL, np.int32)
    counts[: shape.gainers] = rng.integers(1, planes + 1, shape.gainers)
    counts[shape.decode : shape.gainers] = 1
    tokens = np.full((planes, len(counts)), -1, np.int32)
    for i in range(shape.gainers):
        tokens[: counts[i], i] = rng.integers(1, 9, counts[i])
        entry = rows.entries[i]
        rows.lengths[i] = texts.known[entry] - 1 + counts[i] if entry else 0
    return rows, Gained(counts, tokens, np.zeros(len(counts), np.int32)), shape, texts
