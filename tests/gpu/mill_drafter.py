"""Drafters for the mill: the real ones, and one that knows the model and errs where chance has it."""

from typing import Any

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Region, Regions
from gpu.drafters.drafter import Drafter, Launch
from gpu.drafters.ngram import NgramDrafter
from gpu.drafters.standalone import StandaloneDrafter
from gpu.kernels.columns import HostColumns
from gpu.kernels.ngram import HostNgramKernels
from gpu.kernels.step_kernels import PassShape, Rows
from gpu.lanes import Lane
from shm.config import ServerConfig
from shm.records import StepView
from tools.mill import VOCAB, next_token, slot_value


class MillDrafter:
    """Reads the caches of a PagedMill to draft, in a launch of its own. luck: of four drafts, how many are right."""

    def __init__(self, model: Any, luck: int = 3) -> None:
        self.model, self.luck = model, luck
        self.caches: tuple[Region, ...] = ()  # set by whoever knows the program

    @property
    def observes(self) -> Regions:
        return ()

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        if shape.window > 1:
            tokens = batch.tokens.region()
            reads = (tokens, batch.positions.region(), batch.pages.region(), *self.caches)
            launch("draft", self._draft, rows, shape, reads=reads, writes=(tokens,))

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """It has nothing of its own."""

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """It has nothing of its own."""

    def _draft(self, rows: Any, shape: PassShape) -> None:
        size = self.model.page_size
        for i in range(shape.decode):
            first = i * shape.window
            at = int(rows.positions[first])
            slots = [int(rows.pages[i, p // size]) * size + p % size for p in range(at)]
            text = list(zip(self.model.k_cache[slots].tolist(), self.model.v_cache[slots].tolist(), strict=True))
            for w in range(1, shape.window):
                text.append(slot_value(int(rows.tokens[first + w - 1]), at + w - 1))
                best = next_token(text)
                lucky = (best * 31 + at + w) % 4 < self.luck
                rows.tokens[first + w] = best if lucky else (best + 1) % VOCAB


def make_drafter(kind: str, device: Device, config: ServerConfig, model: Any) -> Drafter:
    """mill: as above. ngram, shared, standalone: the real ones, the last with the target as its own draft model."""
    if kind == "mill":
        return MillDrafter(model)
    if kind in ("ngram", "shared"):
        return NgramDrafter(device, config, HostNgramKernels(), shared=kind == "shared")
    assert kind == "standalone"
    return StandaloneDrafter(device, config, type(model)(config.pages, config.page_size), HostColumns())
