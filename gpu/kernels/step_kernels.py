"""The kernels of the step's own bookkeeping, as the step program calls them on any device.

Owns the contract alone: what each operation reads and writes, array by array. Arrays are numpy on the host device and
tensors on CUDA; whoever calls these only slices them and hands them on. On the host a method is the operation; on CUDA
it queues the operation on the current stream and returns. Never holds memory of a step.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from shm.config import ServerConfig
from shm.records import CHUNK_COUNT, CHUNK_LAST, StepLayout, StepView

Array = Any  # numpy.ndarray or torch.Tensor

NO_DRAFT = 0  # a token as good as any other: where a drafter has nothing to say, the target decides anyway

# What a kernel finds wrong with a descriptor: a code, with the entry in the bits above it.
OK = 0
BAD_ENTRY, BAD_PAGE, BAD_POSITION, NOT_PUBLISHED, NOT_FILLED, BAD_SOURCE = 1, 2, 3, 4, 5, 6
FAULT_BITS = 8
_FAULTS = {
    BAD_ENTRY: "entry {} does not exist",
    BAD_PAGE: "a slot write for entry {} names a page or an index that does not exist, or the padding page",
    BAD_POSITION: "entry {} has reached a position past the end of its slot table row",
    NOT_PUBLISHED: "entry {} is read before a step has published its length and token",
    NOT_FILLED: "entry {} reaches a position for which the scheduler has reserved no page",
    BAD_SOURCE: "a chunk of entry {} lies outside of its ledger row, or is larger than a step may take",
}


def explain(fault: int) -> str:
    """The sentence for a fault code other than OK."""
    return _FAULTS[fault & ((1 << FAULT_BITS) - 1)].format(fault >> FAULT_BITS)


class Tables(NamedTuple):
    """What a gather reads. The slot and sampling tables are shared with the schedule stream, the relay is not."""

    length: Array  # i32[entries] relay: tokens in the KV cache
    token: Array  # i32[entries] relay: newest token, not in the cache yet
    pages: Array  # i32[entries, pages_per_row] slot table
    real: Array  # f32[3, entries] temperature, top_p, min_p
    top_k: Array  # i32[entries]
    seed: Array  # u64[entries]; on CUDA the same bits as i64


class Rows(NamedTuple):
    """What a gather writes: one pass, laid out for the model and the sampler. Private to the step that gathered it."""

    tokens: Array  # i32[tokens]
    positions: Array  # i32[tokens] of each token in its sequence
    seqs: Array  # i32[tokens] row of `pages`
    pages: Array  # i32[rows, pages_per_row] only what the positions of the row reach is valid
    starts: Array  # i32[rows + 1] first token of each row, and behind the last row the number of tokens
    ends: Array  # i32[rows] tokens in the cache of each row once the pass has run
    entries: Array  # i32[gainers] relay entry that gains tokens
    lengths: Array  # i32[gainers] its length once it has gained one; 0 for padding
    logit_rows: Array  # i32[samples] index into tokens
    places: Array  # i32[samples] position of the token to be sampled
    real: Array  # f32[3, samples]
    top_k: Array  # i32[samples]
    seed: Array  # u64[samples]; on CUDA the same bits as i64


class Gained(NamedTuple):
    """What the rows of a pass gain."""

    counts: Array  # i32[gainers] tokens, from 1 on
    tokens: Array  # i32[window, rows] those tokens, plane by plane, and -1 behind them; strided
    newest: Array  # i32[gainers] the last one of each row


class Extents(NamedTuple):
    """Where the tokens of each row lie, for implementations that work row by row."""

    starts: Array  # i32[rows + 1], see Rows
    ends: Array  # i32[rows], see Rows
    longest: int  # most tokens of one row


@dataclass(frozen=True)
class PassShape:
    """The extents of one pass: decode rows come first, a window of tokens each, then the chunks. Known to the host."""

    decode: int  # decode rows, padding included
    chunks: int
    tokens: int
    lasts: int  # chunks that are the last of their prompt, and get a token
    longest: int  # most tokens of one row
    window: int = 1  # tokens of each decode row: the newest, and the drafts behind it

    @classmethod
    def of_decode(cls, rows: int, window: int = 1) -> "PassShape":
        """A pass of `rows` decode rows and nothing else."""
        return cls(rows, 0, rows * window, 0, window, window)

    @classmethod
    def of_step(cls, step: StepView) -> "PassShape":
        """The pass of a descriptor, without padding."""
        decode, chunks, window = step.n_decode, step.n_chunks, 1 + step.drafts
        if not chunks:
            return cls.of_decode(decode, window)
        counts, last = step.chunks[CHUNK_COUNT, :chunks], step.chunks[CHUNK_LAST, :chunks]
        tokens, longest = decode * window + int(counts.sum()), max(window, int(counts.max()))
        return cls(decode, chunks, tokens, int(np.count_nonzero(last)), longest, window)

    @property
    def rows(self) -> int:
        """Sequences that take part."""
        return self.decode + self.chunks

    @property
    def gainers(self) -> int:
        """Rows that gain tokens: decode rows, then last chunks."""
        return self.decode + self.lasts

    @property
    def samples(self) -> int:
        """Tokens that are sampled: one behind each token of a window, and one behind each last chunk."""
        return self.decode * self.window + self.lasts


class Configured:
    """Kernels that are made from a layout and three figures of the configuration, all of which it knows."""

    def __init__(self, layout: StepLayout, *, page_size: int, pages: int, poison: bool) -> None:
        """pages: of the KV cache, page 0 included. poison: mark relay entries that hold nothing to read."""
        self._layout = layout
        self._page_size = page_size
        self._pages = pages
        self._poison = poison

    @classmethod
    def of(cls, config: ServerConfig) -> Self:
        """The kernels of a server."""
        return cls(StepLayout(config), page_size=config.page_size, pages=config.pages, poison=config.poison)


class StepKernels(Protocol):
    """Each method is the body of one launch. `fault` is i32[1]: where a device that cannot raise leaves its code."""

    def view(self, descriptor: Array) -> Any:
        """What the others take as `step`: descriptor i32[layout.nbytes // 4] on the device."""

    def upload(self, slot: StepView, payload: Array, descriptor: Array, plane: Array, ids: Array, fault: Array) -> None:
        """Copy the used part of payload i32[layout.nbytes // 4], whose view on the host is `slot`, to `descriptor`.

        The tokens of all chunks go from plane i32[rows, max_len], the ledger's, to ids i32[prefill_chunk], end to end.
        Raises DeviceError for a chunk that is no part of its row, or has no room.
        """

    def write_slots(self, step: Any, count: int, table: Array, fault: Array) -> None:
        """Apply the step's `count` slot writes to table i32[entries, pages_per_row].

        A write that names what does not exist, or page 0, is a fault. No two of a step name the same place: a device
        may apply them in any order.
        """

    def write_sampling(self, step: Any, count: int, real: Array, top_k: Array, seed: Array, fault: Array) -> None:
        """Apply the step's `count` sampling writes to the table, see Tables. A write of no entry is a fault."""

    def gather(self, step: Any, tables: Tables, ids: Array, rows: Rows, shape: PassShape, fault: Array) -> None:
        """Lay out the step's pass in `rows`. The number of live decode rows is read from the descriptor on the device,
        because a captured gather serves every batch that is padded to its size. What no scheduler may ask for is a
        fault.
        """

    def accept(self, rows: Rows, targets: Array, gained: Gained, table: Array, shape: PassShape) -> None:
        """Say what each row gains, and publish its length: table[entry], i32[entries].

        targets i32[samples]: the token that the target chose behind each token of a window, and behind each last chunk.
        A row gains its targets up to the first one that differs from the draft behind it in rows.tokens: so what is
        gained is what the target would have chosen without drafts, at any temperature. Fills `gained`; rows.lengths
        counts from then on what was gained, and stays 0 for padding. A target below 0 is no token: a row ends there.
        """

    def stash(self, table: Array, entries: Array, tokens: Array) -> None:
        """Set table[entries] = tokens, i32[gainers]; a repeated entry can only be padding."""

    def deliver(self, outcome: Array, payload: Array, ints: int) -> None:
        """Copy the first `ints` of outcome i32 on the device to payload i32 in pinned memory."""
