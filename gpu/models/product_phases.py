"""Phases of a pass whose tasks are panels of a weight matrix: all matrix products.

Owns how products are cut into tasks. A task writes the columns of its own panels only; which columns share a task,
and how rows are cut into blocks, never shows in a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpu.kernels.gemm import COLUMNS
from gpu.kernels.native import kernel
from gpu.kernels.rows import silu_times
from gpu.kernels.team import TASKS_MAX, await_phase, finish, take
from gpu.kernels.vectors import load_f32, store_f32, word
from gpu.models.words import (
    ACTIVATIONS,
    FFN,
    GATED,
    HIDDEN,
    PANEL_STRIDE,
    ROW_SCALES,
    STORE,
    TOKEN_COUNT,
    task_count,
    worker_scratch,
)

GATE_ROWS = 12  # rows between which gate and up panels alternate, so that both stay in the first-level cache
PANELS_AHEAD = 2  # which panel is fetched while one is used
TASK_WEIGHTS_BYTES = 36864  # panels of one task, at least, when rows are few


@kernel
def panels_per_task(rows: int, panel_bytes: int) -> int:
    """Few rows: a stretch of memory that is worth streaming. Many rows: one panel is work enough. None: all at once."""
    if rows == 0:
        return TASKS_MAX
    return max(1, TASK_WEIGHTS_BYTES // (panel_bytes * ((rows + 3) // 4)))


@kernel
def copy_columns(source: int, out: int, out_stride: int, rows: int, columns: int) -> None:
    """The first `columns` of each row of a 16-column block to their places."""
    for row in range(rows):
        for column in range(columns):
            value = load_f32(source + 4 * (COLUMNS * row + column))
            store_f32(out + out_stride * row + 4 * column, value)


def make_multiply(rows_by_panel: Callable[..., None], weight_bytes: int, activation_bytes: int) -> Callable[..., int]:
    """Phase: rows of activations times a matrix, stored to or added to `out`."""

    @kernel
    def multiply(
        block: int,
        worker: int,
        control: int,
        serial: int,
        rows: int,
        k: int,
        columns: int,
        weights: int,
        scales: int,
        out: int,
        out_stride: Any,
        adds: int,  # STORE or ADD; ADD needs a whole number of panels
    ) -> int:
        panel_bytes = COLUMNS * k * weight_bytes
        panels = (columns + COLUMNS - 1) // COLUMNS
        group = panels_per_task(rows, panel_bytes)
        tasks = task_count(panels, group)
        x, row_scales = word(block, ACTIVATIONS), word(block, ROW_SCALES)
        stride, ahead = activation_bytes * k, PANELS_AHEAD * panel_bytes
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for p in range(task * group, min(panels, (task + 1) * group)):
                w, column_scales = weights + p * panel_bytes, scales + 4 * COLUMNS * p
                place, place_stride, left = out + 4 * COLUMNS * p, out_stride, columns - COLUMNS * p
                if left < COLUMNS:  # the last columns of a vocabulary: by way of memory that has room for 16
                    place, place_stride = worker_scratch(block, worker), PANEL_STRIDE
                rows_by_panel(x, stride, rows, w, k, ahead, row_scales, column_scales, place, place_stride, adds)
                if left < COLUMNS:
                    copy_columns(place, out + 4 * COLUMNS * p, out_stride, rows, left)
            finish(control, serial, tasks)
        return await_phase(control, serial)

    return multiply


def make_gate_up(rows_by_panel: Callable[..., None], weight_bytes: int, activation_bytes: int) -> Callable[..., int]:
    """Phase: silu(rows times gate) * (rows times up)."""

    @kernel
    def gate_up(block: int, worker: int, control: int, serial: int, weights: int, scales: int) -> int:
        """silu(gate) * up. Panels alternate: 16 columns of gate, the same 16 of up."""
        rows, k, ffn = word(block, TOKEN_COUNT), word(block, HIDDEN), word(block, FFN)
        panel_bytes = COLUMNS * k * weight_bytes
        couples = ffn // COLUMNS
        group = panels_per_task(rows, 2 * panel_bytes)
        tasks = task_count(couples, group)
        stride, ahead = activation_bytes * k, PANELS_AHEAD * panel_bytes
        gate = worker_scratch(block, worker)
        up = gate + 4 * COLUMNS * GATE_ROWS
        while True:
            task = take(control, serial, tasks)
            if task < 0:
                break
            for p in range(task * group, min(couples, (task + 1) * group)):
                w, column_scales = weights + 2 * p * panel_bytes, scales + 8 * COLUMNS * p
                first, pieces = 0, (rows + GATE_ROWS - 1) // GATE_ROWS
                while first < rows:
                    count = (rows - first + pieces - 1) // pieces
                    x, row_scales = word(block, ACTIVATIONS) + stride * first, word(block, ROW_SCALES) + 4 * first
                    rows_by_panel(x, stride, count, w, k, ahead, row_scales, column_scales, gate, PANEL_STRIDE, STORE)
                    w_up, up_scales = w + panel_bytes, column_scales + 4 * COLUMNS
                    rows_by_panel(x, stride, count, w_up, k, ahead, row_scales, up_scales, up, PANEL_STRIDE, STORE)
                    out = word(block, GATED) + 4 * (first * ffn + COLUMNS * p)
                    for row in range(count):
                        silu_times(gate + 64 * row, up + 64 * row, out + 4 * ffn * row, COLUMNS)
                    first += count
                    pieces -= 1
            finish(control, serial, tasks)
        return await_phase(control, serial)

    return gate_up
