"""One position of every window, on tensors: taking it out of a pass for a draft model, and putting back its choice.

Owns the copy of `columns` for torch. It looks at no value, so that it can be captured.
"""

import torch

from gpu.kernels.columns import Array


class TorchColumns:
    """On tensors."""

    def take(self, source: Array, window: int, place: int, target: Array) -> None:
        """See `Columns`."""
        target.copy_(source[place : len(target) * window : window])

    def put_best(self, logits: Array, target: Array, window: int, place: int) -> None:
        """See `Columns`."""
        target[place : len(logits) * window : window].copy_(logits.argmax(dim=1))

    def add(self, source: Array, number: int, target: Array) -> None:
        """See `Columns`."""
        torch.add(source, number, out=target).clamp_(min=0)

    def count(self, target: Array) -> None:
        """See `Columns`."""
        torch.arange(len(target), out=target)
