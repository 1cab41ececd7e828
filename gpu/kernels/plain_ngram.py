"""Plain reference of the drafts that are looked up: row by row, with lists. See `draft_kernels.NgramKernels`."""

from typing import Any

from gpu.kernels.draft_kernels import MATCH_MAX, SHARED_LEAST
from gpu.kernels.step_kernels import Gained, PassShape, Rows

Array = Any  # numpy.ndarray


def look_up(history: Array, known: Array, rows: Rows, shape: PassShape, *, shared: bool) -> None:
    """Fill the drafts of decode rows in rows.tokens."""
    for i in range(shape.decode):
        entry, first = int(rows.entries[i]), i * shape.window
        if entry == 0:
            continue
        own = history[entry, : int(rows.positions[first]) + 1].tolist()
        best = (0, 0, 0)  # length, -entry but 1 for one's own, place
        text = own
        for other in range(1, len(history)) if shared else [entry]:
            theirs = own if other == entry else history[other, : max(0, int(known[other]))].tolist()
            for place in range(len(theirs) - 1):
                length = _common(theirs[: place + 1], own)
                enough = length > 0 if other == entry else length >= SHARED_LEAST
                candidate = (length, 1 if other == entry else -other, place)
                if enough and candidate > best:
                    best, text = candidate, theirs
        if best[0]:
            follows = text[best[2] + 1 :]
            rows.tokens[first + 1 : first + shape.window] = [follows[w % len(follows)] for w in range(shape.window - 1)]


def _common(text: list[int], own: list[int]) -> int:
    """Equal tokens at the ends of two texts, up to MATCH_MAX."""
    count = 0
    while count < min(MATCH_MAX, len(text), len(own)) and text[-1 - count] == own[-1 - count]:
        count += 1
    return count


def note_gains(history: Array, known: Array, rows: Rows, gained: Gained, shape: PassShape) -> None:
    """Append what every gaining row has gained."""
    for i in range(shape.gainers):
        entry, count, length = int(rows.entries[i]), int(gained.counts[i]), int(rows.lengths[i])
        if entry:
            history[entry, length - count + 1 : length + 1] = gained.tokens[:count, i]
            known[entry] = length + 1
