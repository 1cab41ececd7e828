"""The contract of paged attention on CUDA, which Triton and FlashInfer implement alike.

Owns the protocol alone. Callers treat every implementation the same way: `warm` once, `plan` before a pass is launched
or replayed, `begin` once and `run` once a layer inside of the pass. It never says how lengths are used:
`needs_host_lengths` alone tells whether they have to be known on the CPU.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu.kernels.step_kernels import Extents

Array = Any  # torch.Tensor


class Attention(Protocol):
    """Softmax attention over a paged key/value cache, scaled by 1 / sqrt(D), causal inside of a pass.

    T tokens of R rows, HQ query heads that share HKV key/value heads, D dims of a head. A row's tokens are contiguous
    and ascending; token t stands at positions[t] of row seqs[t] and attends keys 0..positions[t] of its row. Padding
    rows have one token at position 0 in page 0.
    """

    needs_host_lengths: bool  # a pass can only be planned when its lengths have reached the CPU

    def plan(self, lengths: NDArray[np.int32] | None, rows: int) -> None:
        """Prepare the next pass of one token a row, over `rows` rows, padding included.

        Called on the launching thread, with the stream of the pass current, never inside of a capture, and again
        before every replay. lengths i32[live rows]: tokens of each row in the cache once the pass has run; rows behind
        them are padding. None: the pass may have more tokens a row, and is done by kernels that need no plan. Only
        where `needs_host_lengths` says so must it be called at all. Never waits for the device. Raises ValueError for
        lengths that no row can have.
        """

    def warm(
        self,
        q: Array,
        k_layer: Array,
        v_layer: Array,
        page_rows: Array,
        seqs: Array,
        positions: Array,
        extents: Extents,
        out: Array,
    ) -> None:
        """Compile and load what passes that are never captured can need, whatever their shape, and compute nothing.

        Takes the arguments of any pass, see `run`: what matters is where they lie, their types, and the row length.
        """

    def begin(self, page_rows: Array, extents: Extents) -> None:
        """Queue what all layers of a pass share, behind whatever wrote its arrays; may be captured. For the arguments
        see `run`.
        """

    def run(
        self,
        q: Array,
        k_layer: Array,
        v_layer: Array,
        page_rows: Array,
        seqs: Array,
        positions: Array,
        extents: Extents,
        out: Array,
    ) -> None:
        """Queue attention of one layer on the current stream; may be captured, then holds for all lengths.

        q, out [T, HQ, D]; k_layer, v_layer [pages, page_size, HKV, D], of which the pass's own keys and values are
        already written; page_rows i32[R, pages_per_row], valid as far as the positions reach; seqs, positions i32[T];
        extents: see `Extents`, with lengths on the device.
        """
