"""The kernels of drafters, as drafters call them on any device.

Owns the contract alone, as `step_kernels` does for the step itself: what each operation reads and writes. Arrays are
numpy on the host device and tensors on CUDA.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu.device.protocol import DeviceError
from gpu.kernels.step_kernels import BAD_SOURCE, FAULT_BITS, Array, Gained, PassShape, Rows, explain

MATCH_MAX = 8  # tokens at the end of a text that are looked for; a longer match says no more of what comes next
SHARED_LEAST = 3  # tokens that must match in another row's text: shorter ones are better taken from one's own


class Text(NamedTuple):
    """The first `end` tokens of a ledger row, which become those of an entry."""

    entry: int
    row: int
    end: int


def check_text(text: Text, history: tuple[int, ...], plane: tuple[int, ...]) -> None:
    """Raise DeviceError for a text that has no place in arrays of these shapes."""
    inside = 0 < text.end <= min(history[1], plane[1])
    if not inside or not 0 <= text.row < plane[0] or not 0 <= text.entry < history[0]:
        raise DeviceError(explain(BAD_SOURCE | text.entry << FAULT_BITS))


class NgramKernels(Protocol):
    """A row's text is history[entry], i32[entries, width]: its prompt and output, of which known[entry] are there.

    `known` is i32[entries]. The newest token of a row with n tokens in the cache stands at place n.
    """

    def note_prompts(self, history: Array, known: Array, plane: Array, texts: Sequence[Text]) -> None:
        """Copy texts from plane i32[rows, max_len]. Raises DeviceError for one that is no part of a row."""

    def look_up(self, history: Array, known: Array, rows: Rows, shape: PassShape, *, shared: bool) -> None:
        """Fill the drafts of decode rows in rows.tokens with what once followed on the end of their text.

        Where several places match, the longest match counts, up to MATCH_MAX tokens, then the latest. What would lie
        beyond the end of the text goes on in the period that the match suggests. A row without a match keeps NO_DRAFT.
        shared: other rows' texts too, living or ended, where they match at least SHARED_LEAST tokens and longer than
        the own one: the lowest entry first.
        """

    def note_gains(self, history: Array, known: Array, rows: Rows, gained: Gained, shape: PassShape) -> None:
        """Append what every gaining row has gained. rows.lengths counts it already."""
