"""The mill in torch, through the page table: one wrong page, position, length or token changes everything behind it.

Owns the model and its sampler, for checks of the step program on any device that torch knows. Nothing in a pass depends
on values that only the device knows: it can be captured.
"""

from typing import Any

import torch
from torch import Tensor

from tools.mill import MASK, VOCAB, slot_value


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
