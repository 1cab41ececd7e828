"""Packing of float32 weight matrices into panels, and the reading back of single rows as embeddings.

Owns the rounding of weights: int8 with one scale per output channel (absmax / 127), bfloat16 to nearest even, or
float32 as it is. Layouts are those of `gemm`. Work is shared by panels; a panel's bytes depend on its own 16 rows
only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gpu.kernels.gemm import BFLOAT16, COLUMNS, FLOAT32, INT8, WEIGHT_BYTES
from gpu.kernels.native import entry, kernel
from gpu.kernels.team import Team, await_phase, finish, take
from gpu.kernels.vectors import (
    bits_of,
    f32_from_bits,
    load_f32,
    load_f32x8,
    load_i8,
    load_i32,
    load_u16,
    max_lanes_i32,
    round_to_i32,
    splat,
    splat_i32,
    store_as_bf16,
    store_as_i8,
    store_f32,
    store_f32x8,
    store_i32,
    store_u16,
    vmax_i32,
    word,
)

SOURCE, ROWS, K, TARGET, SCALES, PANEL_STEP, SCRATCH, SCRATCH_BYTES = range(8)  # words of the job's block


@kernel
def _round_int8(row: int, k: int, out: int, scale: int) -> None:
    largest = splat_i32(0)
    for i in range(0, 4 * k, 32):
        largest = vmax_i32(bits_of(load_f32x8(row + i)) & splat_i32(0x7FFFFFFF), largest)
    top = f32_from_bits(max_lanes_i32(largest))
    if top < 1e-30:
        store_f32(scale, 0.0)
        step = splat(0.0)
    else:
        store_f32(scale, top / np.float32(127))
        step = splat(127) / splat(top)
    for i in range(0, k, 8):
        store_as_i8(out + i, round_to_i32(load_f32x8(row + 4 * i) * step))


@kernel
def _round_bfloat16(row: int, k: int, out: int, scale: int) -> None:
    for i in range(0, k, 8):
        store_as_bf16(out + 2 * i, load_f32x8(row + 4 * i))


@kernel
def _round_float32(row: int, k: int, out: int, scale: int) -> None:
    for i in range(0, 4 * k, 32):
        store_f32x8(out + i, load_f32x8(row + i))


@kernel
def _spread_int8(row: int, k: int, panel: int, column: int) -> None:
    for i in range(k // 2):
        store_u16(panel + 32 * i + 2 * column, load_u16(row + 2 * i))


@kernel
def _spread_bfloat16(row: int, k: int, panel: int, column: int) -> None:
    for i in range(k // 2):
        store_i32(panel + 64 * i + 4 * column, load_i32(row + 4 * i))


@kernel
def _spread_float32(row: int, k: int, panel: int, column: int) -> None:
    for i in range(k):
        store_i32(panel + 64 * i + 4 * column, load_i32(row + 4 * i))


def _pack(
    round_row: Callable[[int, int, int, int], None], spread: Callable[[int, int, int, int], None], size: int
) -> Callable[[int, int, int, int], None]:
    @kernel
    def pack(worker: int, block: int, control: int, first: int) -> None:
        source, rows = word(block, SOURCE), word(block, ROWS)
        k, target = word(block, K), word(block, TARGET)
        scales, step = word(block, SCALES), word(block, PANEL_STEP)
        scratch = word(block, SCRATCH) + worker * word(block, SCRATCH_BYTES)
        panels = (rows + COLUMNS - 1) // COLUMNS
        while True:
            number = take(control, first, panels)
            if number < 0:
                break
            place = number * step
            for column in range(min(COLUMNS, rows - number * COLUMNS)):
                row = source + 4 * k * (number * COLUMNS + column)
                round_row(row, k, scratch, scales + 4 * (place * COLUMNS + column))
                spread(scratch, k, target + place * COLUMNS * k * size, column)
            finish(control, first, panels)
        await_phase(control, first)

    return pack


_pack_int8 = _pack(_round_int8, _spread_int8, 1)
_pack_bfloat16 = _pack(_round_bfloat16, _spread_bfloat16, 2)
_pack_float32 = _pack(_round_float32, _spread_float32, 4)


@entry
def pack_int8(worker: int, block: int, control: int, first: int) -> None:
    """Job: pack into int8 panels with scales."""
    _pack_int8(worker, block, control, first)


@entry
def pack_bfloat16(worker: int, block: int, control: int, first: int) -> None:
    """Job: pack into bfloat16 panels."""
    _pack_bfloat16(worker, block, control, first)


@entry
def pack_float32(worker: int, block: int, control: int, first: int) -> None:
    """Job: pack into float32 panels."""
    _pack_float32(worker, block, control, first)


PACK = {INT8: pack_int8, BFLOAT16: pack_bfloat16, FLOAT32: pack_float32}


class Packer:
    """Packs matrices with the threads of a team."""

    def __init__(self, team: Team, precision: str, k_max: int) -> None:
        self.precision = precision
        self._team = team
        self._block = team.block(8)
        self._scratch_bytes = (4 * k_max + 63) // 64 * 64
        self._scratch = np.empty(self._scratch_bytes * team.threads, np.uint8)

    def pack(
        self,
        matrix: npt.NDArray[np.float32],
        panels: npt.NDArray[np.uint8],
        scales: npt.NDArray[np.float32],
        panel_first: int = 0,
        panel_step: int = 1,
    ) -> None:
        """Pack `matrix` [rows, k] into every `panel_step`-th panel of `panels` (bytes) from `panel_first` on.

        `scales` has 16 float32 a panel; columns behind the last row stay as they were (zero). k is a multiple of 16.
        """
        source = np.ascontiguousarray(matrix, np.float32)
        rows, k = source.shape
        panel_bytes = COLUMNS * k * WEIGHT_BYTES[self.precision]
        last = panel_first + (-(-rows // COLUMNS) - 1) * panel_step
        if k % 16 or 4 * k > self._scratch_bytes or (last + 1) * panel_bytes > panels.nbytes:
            raise ValueError(f"a matrix of {rows} x {k} does not fit its panels")
        target = panels.ctypes.data + panel_first * panel_bytes
        scale = scales.ctypes.data + 4 * COLUMNS * panel_first
        scratch = self._scratch.ctypes.data
        self._block[:] = (source.ctypes.data, rows, k, target, scale, panel_step, scratch, self._scratch_bytes)
        self._team.run(PACK[self.precision], self._block)


@kernel
def embed_int8(panels: int, scales: int, row: int, k: int, out: int) -> None:
    """Row `row` of a packed matrix as k float32."""
    place = panels + (row // COLUMNS) * COLUMNS * k + 2 * (row % COLUMNS)
    scale = load_f32(scales + 4 * row)
    for i in range(k):
        store_f32(out + 4 * i, np.float32(load_i8(place + 32 * (i // 2) + i % 2)) * scale)


@kernel
def embed_bfloat16(panels: int, scales: int, row: int, k: int, out: int) -> None:
    """Row `row` of a packed matrix as k float32."""
    place = panels + (row // COLUMNS) * COLUMNS * k * 2 + 4 * (row % COLUMNS)
    for i in range(k):
        store_i32(out + 4 * i, np.int32(load_u16(place + 64 * (i // 2) + 2 * (i % 2))) << np.int32(16))


@kernel
def embed_float32(panels: int, scales: int, row: int, k: int, out: int) -> None:
    """Row `row` of a packed matrix as k float32."""
    place = panels + (row // COLUMNS) * COLUMNS * k * 4 + 4 * (row % COLUMNS)
    for i in range(k):
        store_i32(out + 4 * i, load_i32(place + 64 * i))
