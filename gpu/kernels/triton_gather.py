"""Triton kernels that gather a step: its pass, laid out for the model and the sampler, from the shared tables.

Owns the CUDA side of `step_kernels.StepKernels.gather`. A kernel cannot raise, so it leaves the largest fault code in
`fault`, and what is wrong takes part as padding: its tokens stand at position 0, in page 0. No kernel indexes what it
was not given, whatever a descriptor says. Whatever varies from step to step is no constant of a kernel and is not
specialised, so that nothing is compiled while requests are running.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl

from gpu.kernels import step_kernels
from gpu.kernels.step_kernels import FAULT_BITS, Array, PassShape, Rows, Tables
from gpu.kernels.triton_spec import KernelSpec
from shm import records
from shm.records import StepLayout

PAGES_BLOCK = 256  # pages that a program copies at a time
TOKENS_BLOCK = 256  # tokens of a chunk that one program lays out
WARPS = 2
SPEC_WINDOWS = (1, 4)  # of the servers that specs are for; with drafts, steps without any have a variant too

_BAD_ENTRY = tl.constexpr(step_kernels.BAD_ENTRY)
_BAD_POSITION = tl.constexpr(step_kernels.BAD_POSITION)
_NOT_PUBLISHED = tl.constexpr(step_kernels.NOT_PUBLISHED)
_NOT_FILLED = tl.constexpr(step_kernels.NOT_FILLED)
_BAD_SOURCE = tl.constexpr(step_kernels.BAD_SOURCE)
_NO_DRAFT = tl.constexpr(step_kernels.NO_DRAFT)
_FAULT_BITS = tl.constexpr(FAULT_BITS)
_ENTRY_MASK = tl.constexpr((1 << (31 - FAULT_BITS)) - 1)  # keeps a code positive, so that the largest one is a fault
_CHUNK_ENTRY, _CHUNK_START = tl.constexpr(records.CHUNK_ENTRY), tl.constexpr(records.CHUNK_START)
_CHUNK_COUNT, _CHUNK_LAST = tl.constexpr(records.CHUNK_COUNT), tl.constexpr(records.CHUNK_LAST)


@triton.jit
def _report(fault, code, entry, mask):  # type: ignore[no-untyped-def]
    """Leave the code and the entry where the mask is set; the largest of all stays."""
    tl.atomic_max(fault + entry * 0, code | ((entry & _ENTRY_MASK) << _FAULT_BITS), mask=mask)


@triton.jit
def _take_pages(  # type: ignore[no-untyped-def]
    pages, entry, last, row_pages, row, PER_ROW: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the pages of positions 0..last of `entry` to row `row`. Returns how many of them are missing."""
    missing = 0
    used = last // PAGE_SIZE + 1
    for begin in range(0, used, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        page = tl.load(pages + entry * PER_ROW + j, mask=j < used, other=1)
        tl.store(row_pages + row * PER_ROW + j, page, mask=j < used)
        missing += tl.sum((page == 0).to(tl.int32), axis=0)
    return tl.where(entry == 0, 0, missing)


@triton.jit
def _take_gainer(entry, length, entries, lengths, gainer, wanted):  # type: ignore[no-untyped-def]
    """Gainer `gainer`, if wanted, is `entry`, which will have `length` tokens in the cache once it has gained one."""
    tl.store(entries + gainer, entry, mask=wanted)
    tl.store(lengths + gainer, tl.where(entry == 0, 0, length), mask=wanted)  # padding stays at length 0 for ever


@triton.jit
def _take_sample(  # type: ignore[no-untyped-def]
    real, top_k, seed, entry, place, logit, logit_rows, places, row_real, row_top_k, row_seed,
    sample, wanted, ENTRIES: tl.constexpr, SAMPLES: tl.constexpr,
):  # fmt: skip
    """Sample `sample`, if wanted, is the token of `entry` at position `place`, from the logits of token `logit`."""
    tl.store(logit_rows + sample, logit, mask=wanted)
    tl.store(places + sample, place, mask=wanted)
    for k in tl.static_range(3):
        tl.store(row_real + k * SAMPLES + sample, tl.load(real + k * ENTRIES + entry, mask=wanted), mask=wanted)
    tl.store(row_top_k + sample, tl.load(top_k + entry, mask=wanted), mask=wanted)
    tl.store(row_seed + sample, tl.load(seed + entry, mask=wanted), mask=wanted)


@triton.jit
def gather_decode_kernel(  # type: ignore[no-untyped-def]
    step, length, token, pages, real, top_k, seed,
    tokens, positions, seqs, row_pages, starts, ends,
    entries, lengths, logit_rows, places, row_real, row_top_k, row_seed, fault,
    ENTRIES: tl.constexpr, PER_ROW: tl.constexpr, PAGE_SIZE: tl.constexpr, SAMPLES: tl.constexpr,
    N_DECODE: tl.constexpr, DECODE_AT: tl.constexpr, WINDOW: tl.constexpr, POISON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One decode row a program: the newest token of an entry and room for drafts, or padding behind the live rows."""
    i = tl.program_id(0)
    given = tl.load(step + DECODE_AT + i, mask=i < tl.load(step + N_DECODE), other=0)
    exists = (given >= 0) & (given < ENTRIES)
    at = tl.load(length + given, mask=exists, other=0)
    newest = tl.load(token + given, mask=exists, other=0)
    published = (at >= 0) & (newest >= 0)
    inside = at <= PER_ROW * PAGE_SIZE - WINDOW
    code = tl.where(inside, 0, _BAD_POSITION)
    code = tl.where(published, code, _NOT_PUBLISHED)
    code = tl.where(exists, code, _BAD_ENTRY)
    entry = tl.where(code == 0, given, 0)
    at = tl.where(code == 0, at, 0)
    newest = tl.where(code == 0, newest, 0)
    missing = _take_pages(pages, entry, at + WINDOW - 1, row_pages, i, PER_ROW, PAGE_SIZE, BLOCK)
    code = tl.where(missing > 0, _NOT_FILLED, code)
    _report(fault, code, given, code != 0)
    tl.store(starts + i, i * WINDOW)
    tl.store(starts + i + 1, (i + 1) * WINDOW, mask=i + 1 == tl.num_programs(0))
    tl.store(ends + i, at + WINDOW)
    for w in tl.static_range(WINDOW):
        t = i * WINDOW + w
        tl.store(tokens + t, newest if w == 0 else newest * 0 + _NO_DRAFT)
        tl.store(positions + t, at + w)
        tl.store(seqs + t, i)
        _take_sample(
            real, top_k, seed, entry, at + w + 1, t, logit_rows, places, row_real, row_top_k, row_seed,
            t, t < SAMPLES, ENTRIES, SAMPLES,
        )  # fmt: skip
    _take_gainer(entry, at + 1, entries, lengths, i, i * WINDOW < SAMPLES)
    if POISON:
        tl.store(token + entry, -1, mask=entry != 0)  # consumed: nobody may read it again before the next is stashed


@triton.jit(do_not_specialize=["decode", "before", "total"])
def gather_chunks_kernel(  # type: ignore[no-untyped-def]
    step, length, token, pages, real, top_k, seed, ids,
    tokens, positions, seqs, row_pages, starts, ends,
    entries, lengths, logit_rows, places, row_real, row_top_k, row_seed, fault, decode, before, total,
    ENTRIES: tl.constexpr, PER_ROW: tl.constexpr, PAGE_SIZE: tl.constexpr, SAMPLES: tl.constexpr, IDS: tl.constexpr,
    CHUNKS_AT: tl.constexpr, MAX_RUNNING: tl.constexpr, CHUNKS: tl.constexpr, POISON: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one chunk a program; the first one of a chunk sees to its row, and to its sample if it is last.

    decode: rows in front of the chunks. before: their tokens. total: tokens of the pass.
    """
    c = tl.program_id(0)
    chunks = step + CHUNKS_AT
    given = tl.load(chunks + _CHUNK_ENTRY * MAX_RUNNING + c)
    start = tl.load(chunks + _CHUNK_START * MAX_RUNNING + c)
    count = tl.load(chunks + _CHUNK_COUNT * MAX_RUNNING + c)
    each = tl.arange(0, CHUNKS)
    sizes = tl.load(chunks + _CHUNK_COUNT * MAX_RUNNING + each, mask=each < c, other=0)
    begin = tl.sum(tl.minimum(tl.maximum(sizes, 0), IDS + 1), axis=0)  # what is behind a wrong size fits or is refused
    is_last = tl.load(chunks + _CHUNK_LAST * MAX_RUNNING + each, mask=each <= c, other=0) != 0
    exists = (given >= 0) & (given < ENTRIES)
    end = start + count
    code = tl.where((end > 0) & (end <= PER_ROW * PAGE_SIZE), 0, _BAD_POSITION)
    code = tl.where(exists, code, _BAD_ENTRY)
    fits = (begin >= 0) & (count > 0) & (count <= IDS) & (begin <= IDS - count) & (begin <= total - before - count)
    code = tl.where(fits & (start >= 0), code, _BAD_SOURCE)
    count = tl.where(fits, count, 0)
    begin = tl.where(fits, begin, 0)
    sound = code == 0
    entry = tl.where(sound, given, 0)
    row = decode + c
    first = before + begin

    j = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    here = j < count
    tl.store(tokens + first + j, tl.load(ids + begin + j, mask=here & sound, other=0), mask=here)
    tl.store(positions + first + j, tl.where(sound, start + j, 0), mask=here)
    tl.store(seqs + first + j, row, mask=here)

    if tl.program_id(1) == 0:
        end = tl.where(sound, end, 1)
        missing = _take_pages(pages, entry, end - 1, row_pages, row, PER_ROW, PAGE_SIZE, BLOCK)
        code = tl.where(missing > 0, _NOT_FILLED, code)
        _report(fault, code, given, code != 0)
        tl.store(starts + row, first)
        tl.store(starts + row + 1, first + count, mask=c + 1 == tl.num_programs(0))
        tl.store(ends + row, end)
        last = tl.sum((is_last & (each < c)).to(tl.int32), axis=0)
        wanted = (tl.sum((is_last & (each == c)).to(tl.int32), axis=0) > 0) & (before + last < SAMPLES)
        _take_sample(
            real, top_k, seed, entry, end, tl.maximum(first + count - 1, 0), logit_rows, places,
            row_real, row_top_k, row_seed, before + last, wanted, ENTRIES, SAMPLES,
        )  # fmt: skip
        _take_gainer(entry, end, entries, lengths, decode + last, wanted)
        if POISON:
            tl.store(length + entry, -1, mask=entry != 0)  # what an earlier request left here is not to be read
            tl.store(token + entry, -1, mask=entry != 0)


def table_constants(pages: Any, samples: int, *, page_size: int, poison: bool) -> dict[str, Any]:
    """What both kernels have in common. pages: shape of the slot table. samples: most that a pass can have."""
    return {
        "ENTRIES": pages[0],
        "PER_ROW": pages[1],
        "PAGE_SIZE": page_size,
        "SAMPLES": samples,
        "POISON": poison,
        "BLOCK": min(PAGES_BLOCK, triton.next_power_of_2(pages[1])),
    }


def decode_constants(layout: StepLayout) -> dict[str, Any]:
    """Where a descriptor has its decode rows."""
    places = layout.view(np.arange(layout.nbytes // 4, dtype=np.int32))  # each int is its own index
    return {"N_DECODE": places.n_decode, "DECODE_AT": layout.decode_at}


def chunk_constants(layout: StepLayout, ids: int) -> dict[str, Any]:
    """Where a descriptor has its chunks. ids: most tokens of all chunks."""
    return {
        "IDS": ids,
        "CHUNKS_AT": layout.chunks_at,
        "MAX_RUNNING": layout.max_running,
        "CHUNKS": triton.next_power_of_2(layout.max_running),
        "TOKENS": min(TOKENS_BLOCK, triton.next_power_of_2(ids)),
    }


class TritonGather:
    """Launches the gather of a step: one kernel for the decode rows, one for the chunks if there are any."""

    def __init__(self, layout: StepLayout, *, page_size: int, poison: bool) -> None:
        self._layout = layout
        self._page_size = page_size
        self._poison = poison
        self._decode = decode_constants(layout)

    def run(self, step: Array, tables: Tables, ids: Array, rows: Rows, shape: PassShape, fault: Array) -> None:
        """See `StepKernels.gather`."""
        most = rows.real.shape[1]
        assert tables.pages.is_contiguous() and rows.pages.is_contiguous() and tables.real.is_contiguous()
        assert shape.rows <= rows.pages.shape[0] and shape.samples <= most and shape.tokens <= rows.tokens.shape[0]
        common = table_constants(tables.pages.shape, most, page_size=self._page_size, poison=self._poison)
        if shape.decode:
            grid = (shape.decode,)
            own = {**self._decode, "WINDOW": shape.window}
            gather_decode_kernel[grid](step, *tables, *rows, fault, **common, **own, num_warps=WARPS)
        if shape.chunks:
            own = chunk_constants(self._layout, ids.shape[0])
            parts = (shape.chunks, triton.cdiv(shape.longest, own["TOKENS"]))
            gather_chunks_kernel[parts](
                *(step, *tables, ids, *rows, fault, shape.decode, shape.decode * shape.window, shape.tokens),
                **common,
                **own,
                num_warps=WARPS,
            )


def specify(kernel: Any, constants: Mapping[str, Any]) -> KernelSpec:
    """The variant of a kernel of the step that has these constants, with memory as `StepProgram` lays it out."""
    types = {"real": "*fp32", "row_real": "*fp32", "seed": "*i64", "row_seed": "*i64"}
    types |= dict.fromkeys(("count", "decode", "before", "total", "rows"), "i32")
    signature = {name: types.get(name, "*i32") for name in kernel.arg_names if name not in constants}
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return KernelSpec(kernel, signature, dict(constants), pointers, {"num_warps": WARPS})


def spec_layouts() -> list[tuple[StepLayout, tuple[int, int], int]]:
    """Layout, shape of the slot table and prefill chunk of the servers that specs are for."""
    sizes = ((64, 512, 512), (256, 2048, 2048))
    configs: list[Any] = [
        SimpleNamespace(max_running=running, pages_per_row=per_row, prefill_chunk=chunk)
        for running, per_row, chunk in sizes
    ]
    return [(StepLayout(c), (c.max_running + 1, c.pages_per_row), c.prefill_chunk) for c in configs]


def _variants(layout: StepLayout, pages: tuple[int, int], ids: int, poison: bool) -> Iterator[KernelSpec]:
    for most in SPEC_WINDOWS:
        common = table_constants(pages, (pages[0] - 1) * most, page_size=16, poison=poison)
        for window in sorted({1, most}):
            yield specify(gather_decode_kernel, common | decode_constants(layout) | {"WINDOW": window})
        yield specify(gather_chunks_kernel, common | chunk_constants(layout, ids))


SPECS: list[KernelSpec] = [
    spec
    for layout, pages, ids in spec_layouts()
    for poison in (False, True)
    for spec in _variants(layout, pages, ids, poison)
]
