"""The batch: one pass laid out for the model and the sampler, and the gather that lays it out.

Owns the step-private buffers of the forward stream, and the one launch that reads shared tables. Everything behind
the gather works on these private copies, so the fence can open right behind it, early in the step. The batch does not
rotate, because no other stream ever touches it, and never may.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.device.protocol import Buffer, Device, Regions
from gpu.kernels.step_kernels import Array, Extents, Gained, PassShape, Rows, StepKernels, Tables
from gpu.lanes import Lane
from gpu.relay import Relay
from gpu.sampling_table import SamplingTable
from gpu.slots import SlotTable
from shm.config import ServerConfig
from shm.records import ResultLayout


@dataclass(frozen=True)
class PassArrays:
    """The parts of the buffers that a pass of one shape uses, in the order in which those who use them take them."""

    model: tuple[Any, ...]  # arguments of Model.forward
    sampler: tuple[Any, ...]  # arguments of a sampler
    targets: Array  # i32[samples] what it makes
    gained: Gained
    entries: Array  # i32[gainers]


class Batch:
    """The buffers of one pass, sized for the largest one; see `kernels.step_kernels` for what each holds."""

    def __init__(self, device: Device, config: ServerConfig) -> None:
        self.max_rows = ResultLayout(config).max_rows
        self.max_tokens = config.pass_tokens
        rows, tokens, samples = self.max_rows, self.max_tokens, self.max_rows * config.window

        def buffer(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Buffer:
            return device.buffer(shape, dtype, f"batch.{name}")

        self.tokens = buffer((tokens,), np.int32, "tokens")
        self.positions = buffer((tokens,), np.int32, "positions")
        self.seqs = buffer((tokens,), np.int32, "seqs")
        self.pages = buffer((rows, config.pages_per_row), np.int32, "pages")
        self.starts = buffer((rows + 1,), np.int32, "starts")
        self.ends = buffer((rows,), np.int32, "ends")
        self.entries = buffer((rows,), np.int32, "entries")
        self.newest = buffer((rows,), np.int32, "newest")
        self.logit_rows = buffer((samples,), np.int32, "logit_rows")
        self.places = buffer((samples,), np.int32, "places")
        self.real = buffer((3, samples), np.float32, "real")
        self.top_k = buffer((samples,), np.int32, "top_k")
        self.seed = buffer((samples,), np.uint64, "seed")
        self.targets = buffer((samples,), np.int32, "targets")
        self.logits = buffer((samples, config.model.vocab_size), np.float32, "logits")
        model = (self.tokens, self.positions, self.seqs, self.pages, self.logit_rows, self.starts, self.ends)
        sampler = (self.places, self.real, self.top_k, self.seed)
        self.model_inputs: Regions = tuple(b.region() for b in model)
        self.sampler_inputs: Regions = tuple(b.region() for b in (*sampler, self.logits))
        self.gathered: Regions = tuple(b.region() for b in (*model, *sampler, self.entries))

    def check(self, shape: PassShape) -> None:
        """Assert that a pass fits: these are bounds that the scheduler keeps."""
        assert shape.rows >= 1, "a step computes something"
        assert shape.rows <= self.max_rows, (shape, self.max_rows)
        assert shape.tokens <= self.max_tokens, (shape, self.max_tokens)

    def rows(self, lane: Lane) -> Rows:
        """The arrays that a gather fills; what another stream may read goes to the lane."""
        return Rows(
            tokens=self.tokens.array,
            positions=self.positions.array,
            seqs=self.seqs.array,
            pages=self.pages.array,
            starts=self.starts.array,
            ends=self.ends.array,
            entries=self.entries.array,
            lengths=lane.lengths.array,
            logit_rows=self.logit_rows.array,
            places=self.places.array,
            real=self.real.array,
            top_k=self.top_k.array,
            seed=self.seed.array,
        )

    def arrays(self, lane: Lane, shape: PassShape) -> PassArrays:
        """What a pass of `shape` in `lane` works on."""
        rows, tokens, samples, gainers = self.rows(lane), shape.tokens, shape.samples, shape.gainers
        logits, targets = self.logits.array[:samples], self.targets.array[:samples]
        extents = Extents(rows.starts[: shape.rows + 1], rows.ends[: shape.rows], shape.longest)
        token_planes = (rows.tokens[:tokens], rows.positions[:tokens], rows.seqs[:tokens])
        parameters = (*(real[:samples] for real in rows.real), rows.top_k[:samples], rows.seed[:samples])
        return PassArrays(
            model=(*token_planes, rows.pages[: shape.rows], rows.logit_rows[:samples], logits, extents),
            sampler=(logits, *parameters, rows.places[:samples], targets),
            targets=targets,
            gained=Gained(lane.counts[:gainers], lane.gained, self.newest.array[:gainers]),
            entries=rows.entries[:gainers],
        )


class Gather:
    """Reads relay, slot table and sampling table for one pass. The last read of a shared table in a step."""

    def __init__(self, kernels: StepKernels, relay: Relay, slots: SlotTable, sampling: SamplingTable) -> None:
        self._kernels = kernels
        self._tables = Tables(
            length=relay.length.array,
            token=relay.token.array,
            pages=slots.table.array,
            real=sampling.real.array,
            top_k=sampling.top_k.array,
            seed=sampling.seed.array,
        )
        self.reads: Regions = (*relay.regions, slots.region, *sampling.regions)
        self.writes: Regions = relay.regions if relay.poison else ()

    def run(self, lane: Lane, rows: Rows, shape: PassShape) -> None:
        """Fill `rows` for the descriptor in `lane`. Raises DeviceError for what no scheduler may ask for."""
        self._kernels.gather(lane.step, self._tables, lane.ids.array, rows, shape, lane.fault)
