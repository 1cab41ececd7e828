"""Triton kernels that draft by looking up the end of a text in what came before it, behind the contract of drafters.

Owns the CUDA side of `draft_kernels.NgramKernels`. A look-up is two kernels: every piece of every text that may be
searched has a program of its own, and the best place of each row survives in a word of scratch memory; then one program
a row copies what followed there. No kernel indexes what it was not given, whatever entries, positions and lengths say:
what makes no sense is passed over. Never lets what it queues depend on a value on the device; what varies from step to
step is not specialised, so that nothing is compiled while requests are running.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
import triton
import triton.language as tl

from gpu.kernels import draft_kernels
from gpu.kernels.draft_kernels import SHARED_LEAST, Text, check_text
from gpu.kernels.step_kernels import Array, Gained, PassShape, Rows
from gpu.kernels.triton_gather import SPEC_WINDOWS, WARPS, spec_layouts
from gpu.kernels.triton_spec import KernelSpec
from shm.config import ServerConfig
from shm.records import ResultLayout

PLACES_BLOCK = 1024  # places of a text that one program looks at
GAINS_BLOCK = 128  # rows whose gains one program notes
SEARCH_WARPS = 4

_MATCH_MAX = tl.constexpr(draft_kernels.MATCH_MAX)


@triton.jit
def search_kernel(  # type: ignore[no-untyped-def]
    history, known, positions, entries, best,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block, text): best[row] becomes the largest rank of a place in one BLOCK of one text.

    A rank orders places: the longest match, one's own text, the lowest entry, the latest place. 0 is none.
    """
    i = tl.program_id(0)
    entry = tl.load(entries + i)
    at = tl.load(positions + i * WINDOW)
    sound = (entry > 0) & (entry < ENTRIES) & (at >= 0) & (at < WIDTH)
    text, last, order, least = entry, at - 1, ENTRIES - 1, 1
    if SHARED:
        text = tl.program_id(2) + 1
        is_own = text == entry
        last = tl.where(is_own, last, tl.minimum(tl.maximum(tl.load(known + text), 0), WIDTH) - 2)
        order = tl.where(is_own, order, ENTRIES - 1 - text)
        least = tl.where(is_own, 1, LEAST)
    last = tl.where(sound, last, -1)
    begin = tl.program_id(1) * BLOCK
    if begin <= last:
        own, theirs = history + entry.to(tl.int64) * WIDTH + at, history + text.to(tl.int64) * WIDTH
        place = begin + tl.arange(0, BLOCK)
        same, count = place <= last, tl.zeros((BLOCK,), tl.int32)
        for m in tl.static_range(_MATCH_MAX):
            token = tl.load(own - m, mask=m <= at, other=0)
            same = same & (place >= m) & (m <= at)
            same = same & (tl.load(theirs + place - m, mask=same, other=0) == token)
            count += same.to(tl.int32)
        rank = (count.to(tl.int64) * ENTRIES + order) * WIDTH + place
        most = tl.max(tl.where(count >= least, rank, 0), axis=0)
        tl.atomic_max(best + i, most, mask=most > 0)


@triton.jit
def draft_kernel(  # type: ignore[no-untyped-def]
    history, known, tokens, positions, entries, best,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One row a program: copy what followed on the place that was found, in its period; best[row] is 0 again."""
    i = tl.program_id(0)
    rank = tl.load(best + i)
    tl.store(best + i, 0)
    place = (rank % WIDTH).to(tl.int32)
    order = (rank // WIDTH % ENTRIES).to(tl.int32)
    is_own, found = order == ENTRIES - 1, rank > 0
    entry = tl.where(is_own, tl.load(entries + i), ENTRIES - 1 - order)
    length = tl.load(positions + i * WINDOW, mask=found & is_own, other=0) + 1
    theirs = tl.load(known + entry, mask=found & (is_own == 0), other=0)
    length = tl.where(is_own, length, tl.minimum(theirs, WIDTH))
    w = tl.arange(0, LANES)
    wanted = found & (w > 0) & (w < WINDOW)
    follows = place + 1 + tl.maximum(w - 1, 0) % tl.maximum(length - 1 - place, 1)
    token = tl.load(history + entry.to(tl.int64) * WIDTH + follows, mask=wanted, other=0)
    tl.store(tokens + i * WINDOW + w, token, mask=wanted)


@triton.jit(do_not_specialize=["gainers"])
def note_kernel(  # type: ignore[no-untyped-def]
    history, known, entries, lengths, counts, gained, gainers,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Append what BLOCK rows have gained. gained: PLANES planes, PLANE apart."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = i < gainers
    entry = tl.load(entries + i, mask=given, other=0)
    sound = given & (entry > 0) & (entry < ENTRIES)
    length = tl.load(lengths + i, mask=sound, other=0)
    count = tl.load(counts + i, mask=sound, other=0)
    sound = sound & (length >= 0) & (length < WIDTH) & (count > 0) & (count <= PLANES)
    text = history + entry.to(tl.int64) * WIDTH
    for w in tl.static_range(PLANES):
        place = length - count + 1 + w
        wanted = sound & (w < count) & (place >= 0)
        tl.store(text + place, tl.load(gained + w * PLANE + i, mask=wanted, other=0), mask=wanted)
    tl.store(known + entry, length + 1, mask=sound)


class TritonNgramKernels:
    """The kernels behind the contract of `draft_kernels.NgramKernels`. Arrays are tensors."""

    def __init__(self, rows: int, device: str) -> None:
        """rows: most that decode in one step. device: torch's name of it."""
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)  # of each row; 0 between look-ups

    @classmethod
    def of(cls, config: ServerConfig, device: str) -> Self:
        """The kernels of a server."""
        return cls(ResultLayout(config).max_rows, device)

    def note_prompts(self, history: Array, known: Array, plane: Array, texts: Sequence[Text]) -> None:
        """Queue the copies of texts."""
        for text in texts:
            check_text(text, history.shape, plane.shape)
            history[text.entry, : text.end].copy_(plane[text.row, : text.end], non_blocking=True)
            known[text.entry : text.entry + 1].fill_(text.end)

    def look_up(self, history: Array, known: Array, rows: Rows, shape: PassShape, *, shared: bool) -> None:
        """Draft what followed before."""
        entries, width = history.shape
        assert history.is_contiguous() and known.shape[0] == entries
        assert shape.decode <= min(self._best.shape[0], rows.entries.shape[0])
        assert shape.decode * shape.window <= rows.tokens.shape[0]
        if not shape.decode or shape.window < 2:
            return
        places = (rows.positions, rows.entries, self._best)
        grid = (shape.decode, triton.cdiv(width - 1, PLACES_BLOCK), entries - 1 if shared else 1)
        search_kernel[grid](
            *(history, known, *places),
            **search_constants(entries, width, shape.window, shared=shared),
            num_warps=SEARCH_WARPS,
        )
        draft_kernel[(shape.decode,)](
            *(history, known, rows.tokens, *places), **draft_constants(entries, width, shape.window), num_warps=1
        )

    def note_gains(self, history: Array, known: Array, rows: Rows, gained: Gained, shape: PassShape) -> None:
        """Append what was gained."""
        (entries, width), (planes, most) = history.shape, gained.tokens.shape
        assert history.is_contiguous() and shape.gainers <= min(most, gained.counts.shape[0])
        if shape.gainers:
            note_kernel[(triton.cdiv(shape.gainers, GAINS_BLOCK),)](
                *(history, known, rows.entries, rows.lengths, gained.counts, gained.tokens, shape.gainers),
                **note_constants(entries, width, planes, gained.tokens.stride(0)),
                num_warps=WARPS,
            )


def search_constants(entries: int, width: int, window: int, *, shared: bool) -> dict[str, Any]:
    """Of `search_kernel`. entries, width: shape of the texts."""
    return {
        "ENTRIES": entries, "WIDTH": width, "WINDOW": window, "SHARED": shared, "LEAST": SHARED_LEAST,
        "BLOCK": PLACES_BLOCK,
    }  # fmt: skip


def draft_constants(entries: int, width: int, window: int) -> dict[str, Any]:
    """Of `draft_kernel`."""
    return {"ENTRIES": entries, "WIDTH": width, "WINDOW": window, "LANES": triton.next_power_of_2(window)}


def note_constants(entries: int, width: int, planes: int, plane: int) -> dict[str, Any]:
    """Of `note_kernel`. planes of the tokens gained, and how far apart they are."""
    return {"ENTRIES": entries, "WIDTH": width, "PLANES": planes, "PLANE": plane, "BLOCK": GAINS_BLOCK}


def _specify(kernel: Any, constants: dict[str, Any], warps: int) -> KernelSpec:
    types = {"best": "*i64", "gainers": "i32"}
    signature = {name: types.get(name, "*i32") for name in kernel.arg_names if name not in constants}
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    return KernelSpec(kernel, signature, constants, pointers, {"num_warps": warps})


def _specs() -> list[KernelSpec]:
    specs, window = [], SPEC_WINDOWS[-1]
    for layout, (entries, per_row), _ in spec_layouts():
        width = per_row * 16 + 1
        specs += [
            _specify(search_kernel, search_constants(entries, width, window, shared=shared), SEARCH_WARPS)
            for shared in (False, True)
        ]
        specs += [
            _specify(draft_kernel, draft_constants(entries, width, window), 1),
            _specify(note_kernel, note_constants(entries, width, window, layout.max_running), WARPS),
        ]
    return specs


SPECS: list[KernelSpec] = _specs()
