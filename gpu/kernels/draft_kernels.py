"""The kernels of drafters, as drafters call them on any device.

Owns the contract alone, as `step_kernels` does for the step itself: what each operation reads and writes. Arrays are
numpy on the host device and tensors on CUDA.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gpu.device.protocol import DeviceError
from gpu.kernels.columns import Columns
from gpu.kernels.step_kernels import BAD_SOURCE, FAULT_BITS, Array, Gained, PassShape, Rows, explain

MATCH_MAX = 8  # tokens at the end of a text that are looked for; a longer match says no more of what comes next
NO_TAIL = -1  # behind the last chunk of a prompt: the target says what comes
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


class Tail(NamedTuple):
    """What comes behind a chunk: the token at place `end` of a ledger row, or none (NO_TAIL)."""

    row: int
    end: int


def check_tail(tail: Tail, plane: tuple[int, ...]) -> None:
    """Raise DeviceError for a token that has no place in a plane of this shape."""
    if not (0 <= tail.row < plane[0] and 0 <= tail.end < plane[1]):
        raise DeviceError(f"what follows a chunk would lie at place {tail.end} of ledger row {tail.row}")


class TrainedKernels(Columns, Protocol):
    """What trained drafters take out of a pass and put into it. Windows lie side by side, see `Columns`."""

    def put_drafts(
        self, logits: Array, vocabulary: Array, target: Array, window: int, place: int, each: int = 1
    ) -> None:
        """The likeliest tokens of logits f32[R * each, D], as vocabulary i32[D] has them: positions `place` to
        place + each - 1 of each window of target i32[>= R * window]. The first of equal ones.
        """

    def recall(self, kept: Array, rows: Rows, shape: PassShape, states: Array) -> None:
        """The state of each decode row, once or once for each token of its window: states f32[decode, 1, hidden] or
        [decode * window, 1, hidden] of kept f32[entries, hidden]. What entry 0 (padding) has kept may be anything.
        """

    def keep(self, kept: Array, entries: Array, residual: Array, places: Array) -> None:
        """Keep residual [tokens, hidden] at places i32[gainers] for entries i32[gainers]."""

    def copy_states(self, residual: Array, states: Array) -> None:
        """states f32[R, 1, hidden] = residual [R, hidden]."""

    def note_tails(self, plane: Array, wanted: Sequence[Tail], tails: Array) -> None:
        """tails i32[>= chunks] = what comes behind each chunk in plane i32[rows, max_len], or NO_TAIL.

        Raises DeviceError for one that is no part of the plane.
        """

    def next_tokens(self, rows: Rows, targets: Array, tails: Array, shape: PassShape, out: Array) -> None:
        """out i32[T]: the token behind each token of a pass: for windows what the target said, for chunks what comes
        next, where behind the last chunk of a prompt that is what the target said.

        targets i32[samples], see `StepKernels.accept`; one below 0 is no token, and its place says nothing that counts.
        """

    def newest_places(self, counts: Array, rows: Rows, shape: PassShape, out: Array) -> None:
        """out i32[gainers]: the token of the pass behind which each gaining row's newest one stands."""

    def lay_blocks(
        self, rows: Rows, shape: PassShape, mask: int, blocks: Array, last_seen: Array, wanted: Array
    ) -> None:
        """blocks i32[decode * window]: the newest token of each decode row, and the masks `mask`, `mask` + 1, ...
        behind it. last_seen, as long: the position of the last one. wanted i32[decode * (window - 1)]: the places of
        the masks.
        """
