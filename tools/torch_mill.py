"""The mill in torch, through the page table: one wrong page, position, length or token changes everything behind it.

Owns the model, its sampler and its drafter, for checks of the step program on any device that torch knows. Nothing in a
pass depends on values that only the device knows: it can be captured.
"""

from typing import Any

import torch
from torch import Tensor

from gpu.batch import Batch
from gpu.device.protocol import Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.step_kernels import PassShape, Rows
from tools.mill import MASK, VOCAB, slot_value


class TorchMill:
    """The model: its caches are i64[pages * page_size] on `device`. `positions_max` bounds the length of a row."""

    def __init__(self, pages: int, page_size: int, positions_max: int, device: str) -> None:
        self._page_size = page_size
        self.positions = torch.arange(positions_max, device=device)  # also as numbers of rows
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
        logits.zero_()
        logits.scatter_(1, (self.total(page_rows, rows[wanted], at[wanted] + 1) % VOCAB)[:, None], 1.0)

    def total(self, page_rows: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """i64, the hash of the first `counts` positions of each of `rows`."""
        every = self.positions.clamp(max=page_rows.shape[1] * self._page_size - 1)
        past = self._slots(page_rows, rows[:, None].expand(-1, len(every)), every[None].expand(len(rows), -1))
        keys, values = self.k_cache[past], self.v_cache[past]
        total = torch.zeros_like(counts)
        for i in range(len(self.positions)):
            more = (total * 31 + keys[:, i] * 7 + values[:, i] + i) % MASK
            total = torch.where(counts > i, more, total)
        return total


class TorchMillDrafter:
    """It knows the model, and errs in one draft of four, so that rows gain any number of tokens; see `Drafter`."""

    def __init__(self, mill: TorchMill) -> None:
        self._mill = mill
        self.caches: Regions = ()  # of the program, by whoever makes it

    @property
    def observes(self) -> Regions:
        """Nothing of the model's but its caches."""
        return ()

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """Write what the mill says next, most of the time."""
        if shape.decode and shape.window > 1:
            tokens = batch.tokens.region()
            reads = (tokens, batch.positions.region(), batch.pages.region(), *self.caches)
            launch("draft", self._draft, rows, shape, reads=reads, writes=(tokens,))

    def prefill(self, *_: Any) -> None:
        """It has nothing of its own."""

    def learn(self, *_: Any) -> None:
        """It has nothing of its own."""

    def _draft(self, rows: Rows, shape: PassShape) -> None:
        taken = shape.decode * shape.window
        tokens, positions = (_tensor(array)[:taken].view(-1, shape.window) for array in (rows.tokens, rows.positions))
        pages, at = _tensor(rows.pages)[: shape.decode], positions[:, 0].long()
        total = self._mill.total(pages, self._mill.positions[: shape.decode], at)
        for w in range(1, shape.window):
            k, v = slot_value(tokens[:, w - 1].long(), at)
            total = (total * 31 + k * 7 + v + at) % MASK
            at = at + 1
            best = total % VOCAB
            tokens[:, w] = torch.where((best * 31 + at) % 4 < 3, best, (best + 1) % VOCAB)


def _tensor(array: Any) -> Tensor:
    """A view of the same memory."""
    return array if isinstance(array, Tensor) else torch.from_numpy(array)


def mill_sample(
    logits: Tensor, temp: Any, top_p: Any, min_p: Any, top_k: Any, seed: Any, position: Any, out: Tensor
) -> None:
    """The greedy sampler; see `gpu.step.Sampler`."""
    out.copy_(logits.argmax(dim=1))
