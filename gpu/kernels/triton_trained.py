"""Triton kernels of trained drafters, behind the contract of drafters: what they take out of a pass and put into it.

Owns the CUDA side of `draft_kernels.TrainedKernels`. No kernel indexes what it was not given, whatever entries, places
and starts say, and padding keeps nothing. Never allocates, never lets what it queues depend on a value on the device;
what varies from step to step is not specialised, so that nothing is compiled while requests are running.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from gpu.kernels.cuda_columns import TorchColumns
from gpu.kernels.draft_kernels import NO_TAIL, Tail, check_tail
from gpu.kernels.step_kernels import Array, PassShape, Rows
from gpu.kernels.triton_gather import SPEC_WINDOWS, WARPS, spec_layouts
from gpu.kernels.triton_spec import KernelSpec

LOGITS_BLOCK = 4096  # logits that a program looks at at once
LOGITS_WARPS = 8
TOKENS_BLOCK = 256  # tokens that one program lays out
ROWS_BLOCK = 128


@triton.jit(do_not_specialize=["window", "place", "each"])
def best_kernel(  # type: ignore[no-untyped-def]
    logits, vocabulary, target, window, place, each, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One row of logits a program: the first of its largest ones, as a token, to its position of its window."""
    r = tl.program_id(0)
    row, lane = logits + r.to(tl.int64) * WIDTH, tl.arange(0, BLOCK)
    most, found = tl.full((BLOCK,), float("-inf"), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, WIDTH, BLOCK):
        x = tl.load(row + begin + lane, mask=begin + lane < WIDTH, other=float("-inf"))
        found = tl.where(x > most, begin + lane, found)  # which NaN never is
        most = tl.where(x > most, x, most)
    best = tl.min(tl.where(most == tl.max(most, axis=0), found, WIDTH - 1), axis=0)
    tl.store(target + r // each * window + place + r % each, tl.load(vocabulary + best))


@triton.jit
def recall_kernel(  # type: ignore[no-untyped-def]
    states, entries, out, ENTRIES: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One state a program, EACH of a decode row: that of its entry."""
    i = tl.program_id(0)
    entry = tl.load(entries + i // EACH)
    entry = tl.where((entry >= 0) & (entry < ENTRIES), entry, 0)
    column = tl.arange(0, BLOCK)
    state = tl.load(states + entry.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0)
    tl.store(out + i.to(tl.int64) * WIDTH + column, state, mask=column < WIDTH)


@triton.jit
def keep_kernel(  # type: ignore[no-untyped-def]
    states, entries, residual, places,
    ENTRIES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One gaining row a program: what its entry begins the next step with. residual has TOKENS rows."""
    i = tl.program_id(0)
    entry, place = tl.load(entries + i), tl.load(places + i)
    sound = (entry > 0) & (entry < ENTRIES) & (place >= 0) & (place < TOKENS)
    column = tl.arange(0, BLOCK)
    inside = sound & (column < WIDTH)
    state = tl.load(residual + place.to(tl.int64) * WIDTH + column, mask=inside, other=0.0)
    tl.store(states + entry.to(tl.int64) * WIDTH + column, state.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["decode", "before", "chunks", "total", "samples"])
def behind_kernel(  # type: ignore[no-untyped-def]
    tokens, starts, targets, tails, out, decode, before, chunks, total, samples,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one chunk a program, or behind all chunks of the windows: the token behind each.

    decode: rows in front of the chunks. before: their tokens. total: tokens of the pass. samples: targets of it.
    """
    c = tl.program_id(0)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if c == chunks:
        tl.store(out + j, tl.maximum(tl.load(targets + j, mask=j < before, other=0), 0), mask=j < before)
    else:
        begin, end = tl.load(starts + decode + c), tl.load(starts + decode + c + 1)
        end = tl.minimum(end, total)
        t = begin + j
        here = (t >= before) & (t < end)
        follows = tl.load(tokens + t + 1, mask=here & (t + 1 < end), other=0)
        each = tl.arange(0, CHUNKS)
        last = tl.sum((tl.load(tails + each, mask=each < c, other=0) < 0).to(tl.int32), axis=0)
        tail = tl.load(tails + c)
        said = tl.load(targets + before + last, mask=(tail < 0) & (before + last < samples), other=0)
        tail = tl.where(tail < 0, tl.maximum(said, 0), tail)
        tl.store(out + t, tl.where(t + 1 == end, tail, follows), mask=here)


@triton.jit(do_not_specialize=["decode", "rows"])
def newest_kernel(counts, logit_rows, out, decode, rows, WINDOW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The newest place of BLOCK rows a program, of which the first `decode` ones have windows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    windowed = i < decode
    place = i * WINDOW + tl.load(counts + i, mask=windowed, other=1) - 1
    behind = (i >= decode) & (i < rows)
    place = tl.where(behind, tl.load(logit_rows + decode * (WINDOW - 1) + i, mask=behind, other=0), place)
    tl.store(out + i, place, mask=i < rows)


@triton.jit(do_not_specialize=["mask", "total"])
def blocks_kernel(  # type: ignore[no-untyped-def]
    tokens, positions, blocks, last_seen, wanted, mask, total, WINDOW: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK tokens of blocks a program."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given, row, place = t < total, t // WINDOW, t % WINDOW
    newest = tl.load(tokens + t, mask=given & (place == 0), other=0)
    tl.store(blocks + t, tl.where(place == 0, newest, mask + place - 1), mask=given)
    last = tl.load(positions + row * WINDOW + WINDOW - 1, mask=given, other=0)
    tl.store(last_seen + t, last, mask=given)
    tl.store(wanted + t - row - 1, t, mask=given & (place > 0))


class TritonTrainedKernels(TorchColumns):
    """The kernels behind the contract of `draft_kernels.TrainedKernels`. Arrays are tensors."""

    def put_drafts(
        self, logits: Array, vocabulary: Array, target: Array, window: int, place: int, each: int = 1
    ) -> None:
        """Queue the choice of the likeliest tokens."""
        count, width = logits.shape
        assert logits.is_contiguous() and place + each <= window and count // each * window <= target.shape[0]
        assert width == vocabulary.shape[0]
        if count:
            constants = best_constants(width)
            best_kernel[(count,)](logits, vocabulary, target, window, place, each, **constants, num_warps=LOGITS_WARPS)

    def recall(self, kept: Array, rows: Rows, shape: PassShape, states: Array) -> None:
        """Queue what decode rows begin with."""
        entries, width = kept.shape
        if not shape.decode:
            return
        each = states.shape[0] // shape.decode
        assert each in (1, shape.window) and states.is_contiguous()
        assert states.shape == (shape.decode * each, 1, width) and shape.decode <= rows.entries.shape[0]
        constants = recall_constants(entries, each, width)
        recall_kernel[(shape.decode * each,)](kept, rows.entries, states, **constants, num_warps=WARPS)

    def keep(self, kept: Array, entries: Array, residual: Array, places: Array) -> None:
        """Queue what gaining rows leave for the next step."""
        count, (known, width) = entries.shape[0], kept.shape
        assert count <= places.shape[0] and residual.is_contiguous()
        if count:
            constants = keep_constants(known, residual.shape[0], width)
            keep_kernel[(count,)](kept, entries, residual, places, **constants, num_warps=WARPS)

    def copy_states(self, residual: Array, states: Array) -> None:
        """Queue the copy."""
        states[:, 0].copy_(residual)

    def note_tails(self, plane: Array, wanted: Sequence[Tail], tails: Array) -> None:
        """Queue the copies of what comes behind chunks."""
        tails[: len(wanted)].fill_(NO_TAIL)
        for chunk, tail in enumerate(wanted):
            if tail.end != NO_TAIL:
                check_tail(tail, plane.shape)
                tails[chunk : chunk + 1].copy_(plane[tail.row, tail.end : tail.end + 1], non_blocking=True)

    def next_tokens(self, rows: Rows, targets: Array, tails: Array, shape: PassShape, out: Array) -> None:
        """Queue the tokens behind those of the pass."""
        before, chunks = shape.decode * shape.window, shape.chunks
        assert shape.tokens <= min(out.shape[0], rows.tokens.shape[0])
        assert shape.samples <= targets.shape[0] and chunks <= tails.shape[0]
        grid = (chunks + (before > 0), triton.cdiv(max(shape.longest, before), TOKENS_BLOCK))
        behind_kernel[grid](
            *(rows.tokens, rows.starts, targets, tails, out, shape.decode, before, chunks, shape.tokens, shape.samples),
            **behind_constants(tails.shape[0]),
            num_warps=WARPS,
        )

    def newest_places(self, counts: Array, rows: Rows, shape: PassShape, out: Array) -> None:
        """Queue the places of newest tokens."""
        assert shape.gainers <= out.shape[0] and shape.decode <= counts.shape[0]
        assert shape.samples <= rows.logit_rows.shape[0]
        if shape.gainers:
            newest_kernel[(triton.cdiv(shape.gainers, ROWS_BLOCK),)](
                *(counts, rows.logit_rows, out, shape.decode, shape.gainers),
                **newest_constants(shape.window),
                num_warps=WARPS,
            )

    def lay_blocks(
        self, rows: Rows, shape: PassShape, mask: int, blocks: Array, last_seen: Array, wanted: Array
    ) -> None:
        """Queue the blocks of decode rows."""
        tokens = shape.decode * shape.window
        assert tokens <= min(blocks.shape[0], last_seen.shape[0], rows.tokens.shape[0])
        assert tokens - shape.decode <= wanted.shape[0]
        if tokens:
            blocks_kernel[(triton.cdiv(tokens, TOKENS_BLOCK),)](
                *(rows.tokens, rows.positions, blocks, last_seen, wanted, mask, tokens),
                **blocks_constants(shape.window),
                num_warps=WARPS,
            )


def best_constants(width: int) -> dict[str, Any]:
    """Of `best_kernel`. width: of the draft vocabulary."""
    return {"WIDTH": width, "BLOCK": min(LOGITS_BLOCK, triton.next_power_of_2(width))}


def recall_constants(entries: int, each: int, width: int) -> dict[str, Any]:
    """Of `recall_kernel`. width: of a state."""
    return {"ENTRIES": entries, "EACH": each, "WIDTH": width, "BLOCK": triton.next_power_of_2(width)}


def keep_constants(entries: int, tokens: int, width: int) -> dict[str, Any]:
    """Of `keep_kernel`."""
    return {"ENTRIES": entries, "TOKENS": tokens, "WIDTH": width, "BLOCK": triton.next_power_of_2(width)}


def behind_constants(chunks: int) -> dict[str, Any]:
    """Of `behind_kernel`. chunks: most that a pass can have."""
    return {"CHUNKS": triton.next_power_of_2(chunks), "BLOCK": TOKENS_BLOCK}


def newest_constants(window: int) -> dict[str, Any]:
    """Of `newest_kernel`."""
    return {"WINDOW": window, "BLOCK": ROWS_BLOCK}


def blocks_constants(window: int) -> dict[str, Any]:
    """Of `blocks_kernel`."""
    return {"WINDOW": window, "BLOCK": TOKENS_BLOCK}


def _specify(kernel: Any, constants: dict[str, Any], warps: int = WARPS, **types: str) -> KernelSpec:
    integers = ("window", "place", "each", "decode", "before", "chunks", "total", "samples", "rows", "mask")
    known = {**dict.fromkeys(integers, "i32"), **dict.fromkeys(("logits", "states"), "*fp32"), **types}
    signature = {name: known.get(name, "*i32") for name in kernel.arg_names if name not in constants}
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return KernelSpec(kernel, signature, constants, pointers, {"num_warps": warps})


SPEC_HIDDEN, SPEC_VOCABULARY = 1024, 32768  # of the trained drafters that specs are for


def _specs() -> list[KernelSpec]:
    most = SPEC_WINDOWS[-1]
    specs = [_specify(best_kernel, best_constants(SPEC_VOCABULARY), LOGITS_WARPS)]
    specs += [_specify(newest_kernel, newest_constants(window)) for window in SPEC_WINDOWS]
    specs += [_specify(blocks_kernel, blocks_constants(most))]
    for layout, (entries, _), chunk in spec_layouts():
        tokens = layout.max_running * most + chunk
        specs += [
            _specify(recall_kernel, recall_constants(entries, 1, SPEC_HIDDEN), out="*fp32"),
            _specify(recall_kernel, recall_constants(entries, most, SPEC_HIDDEN), out="*fp32"),
            _specify(keep_kernel, keep_constants(entries, tokens, SPEC_HIDDEN), residual="*bf16"),
            _specify(keep_kernel, keep_constants(entries, tokens, SPEC_HIDDEN), residual="*fp32"),
            _specify(behind_kernel, behind_constants(layout.max_running)),
        ]
    return specs


SPECS: list[KernelSpec] = _specs()
