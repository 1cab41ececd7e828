"""One position of every window: taking it out of a pass for a draft model, and putting back what that model chose.

Owns the contract and the copy for numpy; the one for torch is `cuda_columns`, so that the host device never imports
torch. They look at no value, so that they can be captured.
"""

from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor


class Columns(Protocol):
    """`window` tokens of each of R rows lie side by side in a pass."""

    def take(self, source: Array, window: int, place: int, target: Array) -> None:
        """target i32[R] = position `place` of each window of source i32[>= R * window]."""

    def put_best(self, logits: Array, target: Array, window: int, place: int) -> None:
        """Position `place` of each window of target i32[>= R * window] = the likeliest token of logits f32[R, V]."""

    def add(self, source: Array, number: int, target: Array) -> None:
        """target = source + number, a position: never below 0, whatever padding says."""

    def count(self, target: Array) -> None:
        """target = 0, 1, 2, ..."""


class HostColumns:
    """On arrays."""

    def take(self, source: Array, window: int, place: int, target: Array) -> None:
        """See `Columns`."""
        np.copyto(target, source[place : len(target) * window : window])

    def put_best(self, logits: Array, target: Array, window: int, place: int) -> None:
        """See `Columns`."""
        target[place : len(logits) * window : window] = logits.argmax(axis=1)

    def add(self, source: Array, number: int, target: Array) -> None:
        """See `Columns`."""
        np.maximum(np.add(source, number, out=target), 0, out=target)

    def count(self, target: Array) -> None:
        """See `Columns`."""
        target[:] = np.arange(len(target))
