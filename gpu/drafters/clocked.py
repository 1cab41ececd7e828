"""The clocked drafter: passes that take the time that they are told, and drafts that are right as often as told.

Owns no state: it reads what the clocked model's cache holds of a row, knows from that what the model will choose, and
is wrong on purpose. A step has the passes of an MTP drafter: as many as there are drafts but one, since the first draft
is what the pass behind the model's has left, and that pass. (It is found anew from the cache instead of coming through
a relay: the passes cost the same, and it is the same token.)
"""

from gpu.batch import Batch
from gpu.device.protocol import Buffer, Device, Regions
from gpu.drafters.drafter import Launch
from gpu.kernels.step_kernels import PassShape, Rows
from gpu.lanes import Lane
from gpu.models.clocked import ClockedModel, pass_time, run_draft
from shm.records import StepView


class ClockedDrafter:
    """See `drafter.Drafter`."""

    def __init__(self, device: Device, model: ClockedModel) -> None:
        self._model = model
        self._cache = device.adopt(model.k_cache, "clocked.words")

    @property
    def observes(self) -> Regions:
        """Nothing but the caches."""
        return ()

    def draft(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape) -> None:
        """The first pass writes all drafts; the others only take their time."""
        if not shape.decode or shape.window == 1:
            return
        inputs = (batch.tokens, batch.positions, batch.pages, self._cache)
        reads = tuple(part.region() for part in inputs)
        launch("draft", self._draft, rows, shape, reads=reads, writes=(batch.tokens.region(),))
        for number in range(2, shape.window - 1):
            took_ns = self._model.draft_ns[shape.decode]
            launch(f"draft {number}", pass_time, took_ns, self._model.work, reads=(), writes=())

    def prefill(
        self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, step: StepView, plane: Buffer
    ) -> None:
        """Nothing: prompts are in the model's cache."""

    def learn(self, launch: Launch, batch: Batch, rows: Rows, shape: PassShape, lane: Lane) -> None:
        """The pass behind the model's, which takes its time."""
        launch("draft extend", pass_time, self._model.extend_ns[shape.rows], self._model.work, reads=(), writes=())

    def _draft(self, rows: Rows, shape: PassShape) -> None:
        model = self._model
        took_ns = model.draft_ns[shape.decode] if shape.window > 2 else 0  # a single draft needs no pass
        arrays = (rows.tokens, rows.positions, rows.pages, model.k_cache)
        run_draft(*arrays, shape.decode, shape.window, model.seed, model.share, took_ns, model.work)
