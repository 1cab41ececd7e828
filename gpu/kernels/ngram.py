"""Drafts by looking up the end of a text in what came before it, on the host.

Owns loops over rows and tokens and nothing else: no memory, no policy. They run without the interpreter lock.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.kernels import draft_kernels
from gpu.kernels.draft_kernels import Text, check_text
from gpu.kernels.native import host_kernel, kernel
from gpu.kernels.step_kernels import Gained, PassShape, Rows

# Spelt out here, because compiled kernels outlive a change in another file.
MATCH_MAX, SHARED_LEAST = 8, 3
PADDING_ENTRY = 0

assert (draft_kernels.MATCH_MAX, draft_kernels.SHARED_LEAST) == (MATCH_MAX, SHARED_LEAST)


@kernel
def _match(text: Any, end: Any, own: Any, at: Any) -> int:
    """How many tokens up to text[end] equal those up to own[at]."""
    count = 0
    while count < MATCH_MAX and count <= end and count <= at and text[end - count] == own[at - count]:
        count += 1
    return count


@kernel
def _latest(text: Any, last: Any, own: Any, at: Any, least: Any) -> Any:
    """The latest place of text[: last + 1] with the longest match of more than `least` tokens, and its length."""
    found, longest = -1, least
    for end in range(last, -1, -1):
        count = _match(text, end, own, at)
        if count > longest:
            found, longest = end, count
            if count == MATCH_MAX:
                break
    return found, longest


@host_kernel
def look_up(
    history: Any, known: Any, tokens: Any, positions: Any, entries: Any, decode: Any, window: Any, shared: Any
) -> None:
    """See `NgramKernels.look_up`."""
    for i in range(decode):
        entry = entries[i]
        if entry == PADDING_ENTRY:
            continue
        at = positions[i * window]
        source, length = entry, at + 1
        place, longest = _latest(history[entry], at - 1, history[entry], at, 0)
        if shared and longest < MATCH_MAX:
            for other in range(1, history.shape[0]):
                if other != entry:
                    least = max(longest, SHARED_LEAST - 1)
                    there, count = _latest(history[other], known[other] - 2, history[entry], at, least)
                    if there >= 0:
                        source, place, longest, length = other, there, count, known[other]
        if place >= 0:
            period = length - 1 - place
            for w in range(1, window):
                tokens[i * window + w] = history[source, place + 1 + (w - 1) % period]


@host_kernel
def note_gains(history: Any, known: Any, entries: Any, lengths: Any, counts: Any, gained: Any, gainers: Any) -> None:
    """See `NgramKernels.note_gains`."""
    for i in range(gainers):
        entry = entries[i]
        if entry == PADDING_ENTRY:
            continue
        for w in range(counts[i]):
            history[entry, lengths[i] - counts[i] + 1 + w] = gained[w, i]
        known[entry] = lengths[i] + 1


class HostNgramKernels:
    """The kernels above behind the contract of `draft_kernels.NgramKernels`. Arrays are numpy."""

    def note_prompts(self, history: Any, known: Any, plane: Any, texts: Sequence[Text]) -> None:
        """Copy the texts."""
        for text in texts:
            check_text(text, history.shape, plane.shape)
            np.copyto(history[text.entry, : text.end], plane[text.row, : text.end])
            known[text.entry] = text.end

    def look_up(self, history: Any, known: Any, rows: Rows, shape: PassShape, *, shared: bool) -> None:
        """Draft what followed before."""
        places = (rows.tokens, rows.positions, rows.entries)
        look_up(history, known, *places, shape.decode, shape.window, shared)

    def note_gains(self, history: Any, known: Any, rows: Rows, gained: Gained, shape: PassShape) -> None:
        """Append what was gained."""
        note_gains(history, known, rows.entries, rows.lengths, gained.counts, gained.tokens, shape.gainers)
