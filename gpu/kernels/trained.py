"""What trained drafters take out of a pass and put into it, on the host.

Owns loops over rows and tokens and nothing else: no memory, no policy. Those that are compiled run without the
interpreter lock.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu.kernels.columns import HostColumns
from gpu.kernels.draft_kernels import NO_TAIL, Tail, check_tail
from gpu.kernels.native import host_kernel
from gpu.kernels.step_kernels import Array, PassShape, Rows


@host_kernel
def next_tokens(
    tokens: Any, starts: Any, targets: Any, tails: Any, decode: Any, chunks: Any, window: Any, out: Any
) -> None:
    """See `TrainedKernels.next_tokens`."""
    before = decode * window
    for t in range(before):
        out[t] = max(targets[t], 0)
    last = 0
    for c in range(chunks):
        begin, end = starts[decode + c], starts[decode + c + 1]
        for t in range(begin, end - 1):
            out[t] = tokens[t + 1]
        if tails[c] >= 0:
            out[end - 1] = tails[c]
        else:
            out[end - 1] = max(targets[before + last], 0)
            last += 1


@host_kernel
def newest_places(counts: Any, logit_rows: Any, decode: Any, lasts: Any, window: Any, out: Any) -> None:
    """See `TrainedKernels.newest_places`."""
    for i in range(decode):
        out[i] = i * window + counts[i] - 1
    for k in range(lasts):
        out[decode + k] = logit_rows[decode * window + k]


class HostTrainedKernels(HostColumns):
    """See `TrainedKernels`."""

    def put_drafts(
        self, logits: Array, vocabulary: Array, target: Array, window: int, place: int, each: int = 1
    ) -> None:
        """See `TrainedKernels`."""
        best = vocabulary[logits.argmax(axis=1)].reshape(-1, each)
        target[: len(best) * window].reshape(-1, window)[:, place : place + each] = best

    def recall(self, kept: Array, rows: Rows, shape: PassShape, states: Array) -> None:
        """See `TrainedKernels`."""
        states.reshape(shape.decode, -1, states.shape[2])[:] = kept[rows.entries[: shape.decode]][:, None]

    def keep(self, kept: Array, entries: Array, residual: Array, places: Array) -> None:
        """See `TrainedKernels`."""
        kept[entries] = residual[places]

    def copy_states(self, residual: Array, states: Array) -> None:
        """See `TrainedKernels`."""
        np.copyto(states[:, 0], residual)

    def note_tails(self, plane: Array, wanted: Sequence[Tail], tails: Array) -> None:
        """See `TrainedKernels`."""
        for chunk, tail in enumerate(wanted):
            if tail.end == NO_TAIL:
                tails[chunk] = NO_TAIL
            else:
                check_tail(tail, plane.shape)
                tails[chunk] = plane[tail.row, tail.end]

    def next_tokens(self, rows: Rows, targets: Array, tails: Array, shape: PassShape, out: Array) -> None:
        """See `TrainedKernels`."""
        next_tokens(rows.tokens, rows.starts, targets, tails, shape.decode, shape.chunks, shape.window, out)

    def newest_places(self, counts: Array, rows: Rows, shape: PassShape, out: Array) -> None:
        """See `TrainedKernels`."""
        newest_places(counts, rows.logit_rows, shape.decode, shape.lasts, shape.window, out)

    def lay_blocks(
        self, rows: Rows, shape: PassShape, mask: int, blocks: Array, last_seen: Array, wanted: Array
    ) -> None:
        """See `TrainedKernels`."""
        count, window = shape.decode, shape.window
        tokens = count * window
        blocks.reshape(count, window)[:] = mask - 1 + np.arange(window, dtype=np.int32)
        blocks[::window] = rows.tokens[:tokens:window]
        last_seen.reshape(count, window)[:] = rows.positions[window - 1 : tokens : window, None]
        wanted.reshape(count, window - 1)[:] = np.arange(tokens, dtype=np.int32).reshape(count, window)[:, 1:]
