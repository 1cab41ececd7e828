"""The mill in torch: a model of a few lines whose every token depends on all tokens before it, through the page table.

Owns a model, a sampler and their reference in plain Python, for checks of the step program on any device that torch
knows. Each slot of its cache holds a hash of token and position; the next token is a hash of the slots of all positions
so far, so that one wrong page, position, length or token changes everything behind it. Nothing in a pass depends on
values that only the device knows: it can be captured.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

VOCAB = 101
PRIME, MASK = 1000003, 2147483647


def slot_value(token: Any, position: Any) -> tuple[Any, Any]:
    """What the two caches hold for a token at a position: ints, or i64 tensors of one shape."""
    return (token * 7919 + 12345) % PRIME, (position * 104729 + token) % PRIME


def next_token(values: Iterable[tuple[int, int]]) -> int:
    """The greedy token behind a sequence of slot values."""
    total = 0
    for i, (k, v) in enumerate(values):
        total = (total * 31 + k * 7 + v + i) % MASK
    return total % VOCAB


def reference(prompt: list[int], n: int) -> list[int]:
    """The n greedy tokens after `prompt`, without pages, steps or streams."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token([slot_value(t, p) for p, t in enumerate(tokens)]))
    return tokens[len(prompt) :]


class TorchMill:
    """The model: its caches are i64[pages * page_size] on `device`. `positions_max` bounds the length of a row."""

    def __init__(self, pages: int, page_size: int, positions_max: int, device: str) -> None:
        self._page_size = page_size
        self._positions = torch.arange(positions_max, device=device)
        self.k_cache = torch.zeros(pages * page_size, dtype=torch.int64, device=device)
        self.v_cache = torch.zeros(pages * page_size, dtype=torch.int64, device=device)

    def _slots(self, page_rows: Tensor, seqs: Tensor, positions: Tensor) -> Tensor:
        """i64, the slot of each (row, position); what lies beyond a row's pages is anywhere in the cache."""
        pages = page_rows[seqs, positions // self._page_size].long()
        return (pages * self._page_size + positions % self._page_size).clamp_(0, len(self.k_cache) - 1)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        seqs: Tensor,
        page_rows: Tensor,
        logit_rows: Tensor,
        logits: Tensor,
        extents: Any,
    ) -> None:
        """See `gpu.step.Model`. logits: 1 for the next token, 0 for all others."""
        # What a pass with a missing edge reads may be anything: an index out of range would end the CUDA context.
        at = positions.long().clamp_(0, page_rows.shape[1] * self._page_size - 1)
        rows = seqs.long().clamp_(0, len(page_rows) - 1)
        slots = self._slots(page_rows, rows, at)
        k, v = slot_value(tokens.long(), at)
        self.k_cache.index_put_((slots,), k)
        self.v_cache.index_put_((slots,), v)
        wanted = logit_rows.long().clamp_(0, len(tokens) - 1)
        rows, last = rows[wanted], at[wanted]
        every = self._positions.clamp(max=page_rows.shape[1] * self._page_size - 1)
        past = self._slots(page_rows, rows[:, None].expand(-1, len(every)), every[None].expand(len(rows), -1))
        keys, values = self.k_cache[past], self.v_cache[past]
        total = torch.zeros_like(last)
        for i in range(len(self._positions)):
            more = (total * 31 + keys[:, i] * 7 + values[:, i] + i) % MASK
            total = torch.where(last >= i, more, total)
        logits.zero_()
        logits.scatter_(1, (total % VOCAB)[:, None], 1.0)


def mill_sample(
    logits: Tensor, temp: Any, top_p: Any, min_p: Any, top_k: Any, seed: Any, position: Any, out: Tensor
) -> None:
    """The greedy sampler; see `gpu.step.Sampler`."""
    out.copy_(logits.argmax(dim=1))
