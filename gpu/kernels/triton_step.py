"""Triton kernels of the step's own bookkeeping, behind the contract that the step program calls.

Owns the CUDA side of `step_kernels.StepKernels`: the writes to the shared tables and to the relay, and what rows gain;
the gather is in `triton_gather`. Everything is queued on torch's current stream; what the host has to know it takes
from its own view of the descriptor, never from the device. A kernel cannot raise: it leaves the largest fault code in
`fault`, and leaves out what is wrong. No kernel indexes what it was not given, whatever a descriptor says. No two
writes of one step may name the same place.
"""

from typing import Any

import triton
import triton.language as tl

from gpu.device.protocol import DeviceError
from gpu.kernels import step_kernels
from gpu.kernels.step_kernels import BAD_SOURCE, FAULT_BITS, Array, Configured, Gained, PassShape, Rows, Tables, explain
from gpu.kernels.triton_gather import SPEC_WINDOWS, WARPS, TritonGather, _report, spec_layouts, specify
from gpu.kernels.triton_spec import KernelSpec
from shm import records
from shm.records import StepLayout, StepView

WRITES_BLOCK = 128  # table writes of one program
SCATTER_BLOCK = 512  # table entries that a program sets at a time

_BAD_ENTRY = tl.constexpr(step_kernels.BAD_ENTRY)
_BAD_PAGE = tl.constexpr(step_kernels.BAD_PAGE)
_SLOT_PLANES, _SLOT_ENTRY = tl.constexpr(records.SLOT_PLANES), tl.constexpr(records.SLOT_ENTRY)
_SLOT_INDEX, _SLOT_PAGE = tl.constexpr(records.SLOT_INDEX), tl.constexpr(records.SLOT_PAGE)
_SAMPLING_ENTRY = tl.constexpr(records.SAMPLING_ENTRY)
_SAMPLING_REAL = tl.constexpr(records.SAMPLING_TEMPERATURE)  # and the two planes behind it
_SAMPLING_TOP_K = tl.constexpr(records.SAMPLING_TOP_K)
_SAMPLING_LO, _SAMPLING_HI = tl.constexpr(records.SAMPLING_SEED_LO), tl.constexpr(records.SAMPLING_SEED_HI)


@triton.jit(do_not_specialize=["count"])
def write_slots_kernel(  # type: ignore[no-untyped-def]
    step,
    table,
    fault,
    count,
    ENTRIES: tl.constexpr,
    PER_ROW: tl.constexpr,
    PAGES: tl.constexpr,
    WRITES_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """table[entry, index] = page, one write a lane."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = i < count
    write = step + WRITES_AT + i * _SLOT_PLANES
    entry = tl.load(write + _SLOT_ENTRY, mask=given, other=1)
    index = tl.load(write + _SLOT_INDEX, mask=given, other=0)
    page = tl.load(write + _SLOT_PAGE, mask=given, other=1)
    exists = (entry > 0) & (entry < ENTRIES)
    sound = (index >= 0) & (index < PER_ROW) & (page > 0) & (page < PAGES)
    tl.store(table + entry * PER_ROW + index, page, mask=given & exists & sound)
    code = tl.where(exists, _BAD_PAGE, _BAD_ENTRY)
    _report(fault, code, entry, given & ((exists & sound) == 0))


@triton.jit(do_not_specialize=["count"])
def write_sampling_kernel(  # type: ignore[no-untyped-def]
    step,
    real,
    top_k,
    seed,
    fault,
    count,
    ENTRIES: tl.constexpr,
    SAMPLING_AT: tl.constexpr,
    MAX_RUNNING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Set the parameters of one entry a lane."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = i < count
    write = step + SAMPLING_AT + i
    entry = tl.load(write + _SAMPLING_ENTRY * MAX_RUNNING, mask=given, other=1)
    exists = (entry > 0) & (entry < ENTRIES)
    wanted = given & exists
    for k in tl.static_range(3):
        bits = tl.load(write + (_SAMPLING_REAL + k) * MAX_RUNNING, mask=wanted, other=0)
        tl.store(real + k * ENTRIES + entry, bits.to(tl.float32, bitcast=True), mask=wanted)
    tl.store(top_k + entry, tl.load(write + _SAMPLING_TOP_K * MAX_RUNNING, mask=wanted, other=0), mask=wanted)
    low = tl.load(write + _SAMPLING_LO * MAX_RUNNING, mask=wanted, other=0)
    high = tl.load(write + _SAMPLING_HI * MAX_RUNNING, mask=wanted, other=0)
    bits64 = low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)
    tl.store(seed + entry, bits64, mask=wanted)
    _report(fault, tl.full((BLOCK,), _BAD_ENTRY, tl.int32), entry, given & (exists == 0))


@triton.jit(do_not_specialize=["count"])
def scatter_kernel(table, entries, values, count, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """table[entries] = values, by one program."""
    for begin in range(0, count, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        entry = tl.load(entries + i, mask=i < count, other=0)
        exists = (entry >= 0) & (entry < ENTRIES)
        tl.store(table + entry, tl.load(values + i, mask=i < count, other=0), mask=(i < count) & exists)


@triton.jit(do_not_specialize=["decode", "rows"])
def accept_kernel(  # type: ignore[no-untyped-def]
    tokens, entries, lengths, targets, counts, gained, newest, table, decode, rows,
    ENTRIES: tl.constexpr, WINDOW: tl.constexpr, PLANES: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What all rows gain, by one program; the first `decode` rows have a window of drafts, the others a single target.

    gained: PLANES planes, PLANE apart.
    """
    for begin in range(0, rows, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        given, windowed = i < rows, i < decode
        first = tl.where(windowed, i * WINDOW, decode * WINDOW + i - decode)
        last, count = tl.load(targets + first, mask=given, other=0), tl.full((BLOCK,), 1, tl.int32)
        tl.store(gained + i, last, mask=given)
        for w in tl.static_range(1, WINDOW):
            draft = tl.load(tokens + first + w, mask=windowed, other=0)
            target = tl.load(targets + first + w, mask=windowed, other=0)
            takes = windowed & (count == w) & (last >= 0) & (draft == last)
            last = tl.where(takes, target, last)
            count += takes.to(tl.int32)
            tl.store(gained + w * PLANE + i, tl.where(takes, target, -1), mask=given)
        for w in tl.static_range(WINDOW, PLANES):
            tl.store(gained + w * PLANE + i, tl.full((BLOCK,), -1, tl.int32), mask=given)
        tl.store(counts + i, count, mask=given)
        tl.store(newest + i, last, mask=given)
        length = tl.load(lengths + i, mask=given, other=0)
        length = tl.where(length > 0, length + count - 1, length)  # padding stays at length 0 for ever
        tl.store(lengths + i, length, mask=given)
        entry = tl.load(entries + i, mask=given, other=0)
        tl.store(table + entry, length, mask=given & (entry >= 0) & (entry < ENTRIES))


class TritonStepKernels(Configured):
    """The kernels behind the contract of `step_kernels.StepKernels`. Arrays are tensors; seeds are i64."""

    def __init__(self, layout: StepLayout, *, page_size: int, pages: int, poison: bool) -> None:
        """See `Configured`."""
        super().__init__(layout, page_size=page_size, pages=pages, poison=poison)
        self._gather = TritonGather(layout, page_size=page_size, poison=poison)

    def view(self, descriptor: Array) -> Array:
        """A descriptor as kernels take it: i32[layout.nbytes // 4]."""
        return descriptor

    def upload(self, slot: StepView, payload: Array, descriptor: Array, plane: Array, ids: Array, fault: Array) -> None:
        """Queue the copies of the used part of a descriptor, and of its chunks' tokens from the ledger's plane."""
        ints = slot.used_nbytes // 4
        descriptor[:ints].copy_(payload[:ints], non_blocking=True)
        at = 0
        for entry, row, start, count in slot.chunks[: records.CHUNK_LAST, : slot.n_chunks].T.tolist():
            inside = 0 <= row < plane.shape[0] and start >= 0 and 1 <= count <= plane.shape[1] - start
            if not inside or at + count > ids.shape[0]:
                raise DeviceError(explain(BAD_SOURCE | entry << FAULT_BITS))
            ids[at : at + count].copy_(plane[row, start : start + count], non_blocking=True)
            at += count

    def write_slots(self, step: Array, count: int, table: Array, fault: Array) -> None:
        """Apply the slot writes of a step."""
        assert 0 < count <= self._layout.slot_write_cap and table.is_contiguous()
        constants = slot_constants(self._layout, table.shape, self._pages)
        grid = (triton.cdiv(count, WRITES_BLOCK),)
        write_slots_kernel[grid](step, table, fault, count, **constants, num_warps=WARPS)

    def write_sampling(self, step: Array, count: int, real: Array, top_k: Array, seed: Array, fault: Array) -> None:
        """Apply the sampling writes of a step."""
        assert 0 < count <= self._layout.max_running and real.is_contiguous()
        constants = sampling_constants(self._layout, top_k.shape[0])
        grid = (triton.cdiv(count, WRITES_BLOCK),)
        write_sampling_kernel[grid](step, real, top_k, seed, fault, count, **constants, num_warps=WARPS)

    def gather(self, step: Array, tables: Tables, ids: Array, rows: Rows, shape: PassShape, fault: Array) -> None:
        """Lay out the pass of a step."""
        self._gather.run(step, tables, ids, rows, shape, fault)

    def accept(self, rows: Rows, targets: Array, gained: Gained, table: Array, shape: PassShape) -> None:
        """Say what each row gains, and publish its length."""
        planes, width = gained.tokens.shape
        assert shape.window <= planes and shape.gainers <= width and shape.samples <= targets.shape[0]
        assert shape.tokens <= rows.tokens.shape[0]
        if shape.gainers:
            accept_kernel[(1,)](
                *(rows.tokens, rows.entries, rows.lengths, targets, *gained, table, shape.decode, shape.gainers),
                **accept_constants(table.shape[0], shape.window, planes, gained.tokens.stride(0)),
                num_warps=WARPS,
            )

    def stash(self, table: Array, entries: Array, tokens: Array) -> None:
        """Leave the newest token of each entry for the next step."""
        _scatter(table, entries, tokens)

    def deliver(self, outcome: Array, payload: Array, ints: int) -> None:
        """Queue the copy of a step's outcome to pinned memory."""
        payload[:ints].copy_(outcome[:ints], non_blocking=True)


def _scatter(table: Array, entries: Array, values: Array) -> None:
    count = entries.shape[0]
    if count:
        constants = {"ENTRIES": table.shape[0], "BLOCK": SCATTER_BLOCK}
        scatter_kernel[(1,)](table, entries, values, count, **constants, num_warps=WARPS)


def slot_constants(layout: StepLayout, table: Any, pages: int) -> dict[str, Any]:
    """Of `write_slots_kernel`. table: its shape."""
    return {
        "ENTRIES": table[0], "PER_ROW": table[1], "PAGES": pages, "WRITES_AT": layout.slot_writes_at,
        "BLOCK": WRITES_BLOCK,
    }  # fmt: skip


def sampling_constants(layout: StepLayout, entries: int) -> dict[str, Any]:
    """Of `write_sampling_kernel`."""
    return {
        "ENTRIES": entries, "SAMPLING_AT": layout.sampling_at, "MAX_RUNNING": layout.max_running,
        "BLOCK": WRITES_BLOCK,
    }  # fmt: skip


def accept_constants(entries: int, window: int, planes: int, plane: int) -> dict[str, Any]:
    """Of `accept_kernel`. planes of the tokens gained, and how far apart they are."""
    return {"ENTRIES": entries, "WINDOW": window, "PLANES": planes, "PLANE": plane, "BLOCK": WRITES_BLOCK}


SPECS: list[KernelSpec] = [
    spec
    for layout, pages, _ in spec_layouts()
    for spec in (
        specify(write_slots_kernel, slot_constants(layout, pages, 10000)),
        specify(write_sampling_kernel, sampling_constants(layout, pages[0])),
        specify(scatter_kernel, {"ENTRIES": pages[0], "BLOCK": SCATTER_BLOCK}),
        *(
            specify(accept_kernel, accept_constants(pages[0], window, most, pages[0] - 1))
            for most in SPEC_WINDOWS
            for window in sorted({1, most})
        ),
    )
]
