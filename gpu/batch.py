"""The batch: one pass laid out for the model and the sampler, and the gather that lays it out.

Owns the step-private buffers of the forward stream, and the one launch that reads shared tables. Everything behind
the gather works on these private copies, so the fence can open right behind it, early in the step. The batch does not
rotate, because no other stream ever touches it, and never may.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device.protocol import Buffer, Device, DeviceError, Regions
from gpu.kernels.host_step import OK, Rows, Tables, explain, gather_chunks, gather_decode
from gpu.lanes import Lane
from gpu.relay import Relay
from gpu.sampling_table import SamplingTable
from gpu.slots import SlotTable
from shm.config import ServerConfig
from shm.records import CHUNK_COUNT, CHUNK_LAST, ResultLayout, StepView


@dataclass(frozen=True)
class PassShape:
    """The extents of one pass: decode rows come first, then the chunks."""

    decode: int  # decode rows, padding included
    chunks: int
    tokens: int
    samples: int  # rows that get a token: decode rows and last chunks

    @classmethod
    def of_decode(cls, rows: int) -> "PassShape":
        """A pass of `rows` decode rows and nothing else."""
        return cls(rows, 0, rows, rows)

    @classmethod
    def of_step(cls, step: StepView) -> "PassShape":
        """The pass of a descriptor, without padding."""
        decode, chunks = step.n_decode, step.n_chunks
        if not chunks:
            return cls.of_decode(decode)
        counts, last = step.chunks[CHUNK_COUNT, :chunks], step.chunks[CHUNK_LAST, :chunks]
        return cls(decode, chunks, decode + int(counts.sum()), decode + int(np.count_nonzero(last)))

    @property
    def rows(self) -> int:
        """Sequences that take part."""
        return self.decode + self.chunks


@dataclass(frozen=True)
class PassArrays:
    """The parts of the buffers that a pass of one shape uses, in the order in which those who use them take them."""

    model: tuple[Any, ...]  # arguments of Model.forward
    sampler: tuple[Any, ...]  # arguments of a sampler
    entries: NDArray[np.int32]  # [samples]
    lengths: NDArray[np.int32]  # [samples]
    sampled: NDArray[np.int32]  # [samples]


class Batch:
    """The buffers of one pass, sized for the largest one; see `kernels.host_step.Rows` for what each holds."""

    def __init__(self, device: Device, config: ServerConfig) -> None:
        self.max_rows = ResultLayout(config).max_rows
        self.max_tokens = config.max_running + config.prefill_chunk
        rows, tokens = self.max_rows, self.max_tokens

        def buffer(shape: tuple[int, ...], dtype: type[np.generic], name: str) -> Buffer:
            return device.buffer(shape, dtype, f"batch.{name}")

        self.tokens = buffer((tokens,), np.int32, "tokens")
        self.positions = buffer((tokens,), np.int32, "positions")
        self.seqs = buffer((tokens,), np.int32, "seqs")
        self.pages = buffer((rows, config.pages_per_row), np.int32, "pages")
        self.logit_rows = buffer((rows,), np.int32, "logit_rows")
        self.entries = buffer((rows,), np.int32, "entries")
        self.places = buffer((rows,), np.int32, "places")
        self.real = buffer((3, rows), np.float32, "real")
        self.top_k = buffer((rows,), np.int32, "top_k")
        self.seed = buffer((rows,), np.uint64, "seed")
        self.logits = buffer((rows, config.model.vocab_size), np.float32, "logits")
        model = (self.tokens, self.positions, self.seqs, self.pages, self.logit_rows)
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
        """The arrays that a gather fills; the lengths go to the lane, since another stream may read them."""
        return Rows(
            tokens=self.tokens.array,
            positions=self.positions.array,
            seqs=self.seqs.array,
            pages=self.pages.array,
            logit_rows=self.logit_rows.array,
            entries=self.entries.array,
            lengths=lane.lengths.array,
            places=self.places.array,
            real=self.real.array,
            top_k=self.top_k.array,
            seed=self.seed.array,
        )

    def arrays(self, lane: Lane, shape: PassShape) -> PassArrays:
        """What a pass of `shape` in `lane` works on."""
        rows, tokens, samples = self.rows(lane), shape.tokens, shape.samples
        logits, sampled = self.logits.array[:samples], lane.sampled.array[:samples]
        token_planes = (rows.tokens[:tokens], rows.positions[:tokens], rows.seqs[:tokens])
        parameters = (*(real[:samples] for real in rows.real), rows.top_k[:samples], rows.seed[:samples])
        return PassArrays(
            model=(*token_planes, rows.pages[: shape.rows], rows.logit_rows[:samples], logits),
            sampler=(logits, *parameters, rows.places[:samples], sampled),
            entries=rows.entries[:samples],
            lengths=rows.lengths[:samples],
            sampled=sampled,
        )


class Gather:
    """Reads relay, slot table and sampling table for one pass. The last read of a shared table in a step."""

    def __init__(self, relay: Relay, slots: SlotTable, sampling: SamplingTable, page_size: int) -> None:
        self._page_size = page_size
        self._poison = relay.poison
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
        """Fill `rows` for the descriptor in `lane`. Raises DeviceError for what no scheduler may ask for.

        The number of live rows is taken from the descriptor, because a captured gather serves every batch that is
        padded to its size.
        """
        step = lane.view
        fault = gather_decode(
            self._tables, step.decode_entries, step.n_decode, shape.decode, rows, self._page_size, self._poison
        )
        if fault == OK and shape.chunks:
            fault = gather_chunks(
                self._tables,
                step.chunks,
                shape.chunks,
                lane.ids.array,
                shape.decode,
                rows,
                self._page_size,
                self._poison,
            )
        if fault != OK:
            raise DeviceError(explain(fault))
