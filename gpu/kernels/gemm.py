"""Matrix product of a few rows with packed weights, in int8, bfloat16 and float32.

Owns the micro kernels (up to 6 rows by 16 columns, all accumulators in registers) and the layout of a weight panel. A
panel holds 16 output columns, k running slowest: `[k/2][16][2]` for int8 and bfloat16, `[k][16]` for float32. Each
output is one chain over k from 0 upwards in one lane, so that its bits depend on its row and its column only: never
on how many rows are computed together, and never on which thread does it. int8 sums are int32 and exact
(`activation_limit` keeps them in range)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

from gpu.kernels.emit import (
    F32,
    I8,
    I16,
    I32,
    I64,
    VF32,
    VI32,
    bf16_halves,
    call_llvm,
    const,
    fma_value,
    load_at,
    outlined,
    pointer,
    prefetch,
    splat_value,
)
from gpu.kernels.native import kernel

COLUMNS = 16  # of a panel
ROWS_MAX = 6  # of a micro kernel: 12 accumulators, 2 weight vectors, 2 others make 16 registers

INT8, BFLOAT16, FLOAT32 = "int8", "bfloat16", "float32"
WEIGHT_BYTES = {INT8: 1, BFLOAT16: 2, FLOAT32: 4}
ACTIVATION_BYTES = {INT8: 2, BFLOAT16: 4, FLOAT32: 4}

HAS_PMADDWD = bool(binding.get_host_cpu_features().get("avx2", False))
V16I8, V16I16, V16I32 = (ir.VectorType(t, COLUMNS) for t in (I8, I16, I32))

Values = list[ir.Value]


def activation_limit(k: int) -> int:
    """Largest |activation| for which the int32 sum of `k` products with int8 weights (|w| <= 127) cannot overflow."""
    return min(32767, (2**31 - 1) // (127 * k))


def _multiply_add_pairs(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x[2i]*y[2i] + x[2i+1]*y[2i+1] of int16 as int32; never overflows here, for |y| <= 127."""
    if HAS_PMADDWD:
        return call_llvm(b, "llvm.x86.avx2.pmadd.wd", VI32, [x, y])
    products = b.mul(b.sext(x, V16I32), b.sext(y, V16I32))
    mask = ir.VectorType(I32, 8)
    halves = [
        b.shuffle_vector(products, products, ir.Constant(mask, [2 * i + odd for i in range(8)])) for odd in (0, 1)
    ]
    return b.add(halves[0], halves[1])


def _step_int8(b: ir.IRBuilder, rows: Values, w: ir.Value, i: ir.Value, sums: list[Values]) -> None:
    """Two k at once: 32 bytes of weights, one int16 pair of each row."""
    offset = b.shl(i, const(5))
    weights = [b.sext(load_at(b, w, b.add(offset, const(16 * c)), V16I8, 16), V16I16) for c in (0, 1)]
    for row, x in enumerate(rows):
        pair = load_at(b, x, b.shl(i, const(2)), I32, 4)
        pairs = b.bitcast(splat_value(b, pair, VI32), V16I16)
        for c in (0, 1):
            product = _multiply_add_pairs(b, pairs, weights[c])
            b.store(b.add(b.load(sums[row][c]), product), sums[row][c])


def _add_products(b: ir.IRBuilder, rows: Values, k: ir.Value, weights: Values, sums: list[Values]) -> None:
    for row, x in enumerate(rows):
        value = splat_value(b, load_at(b, x, b.shl(k, const(2)), F32, 4))
        for c in (0, 1):
            b.store(fma_value(b, value, weights[c], b.load(sums[row][c])), sums[row][c])


def _step_bfloat16(b: ir.IRBuilder, rows: Values, w: ir.Value, i: ir.Value, sums: list[Values]) -> None:
    """Two k at once: 64 bytes of weights, two float32 of each row, the lower k first."""
    offset = b.shl(i, const(6))
    halves = [bf16_halves(b, load_at(b, w, b.add(offset, const(32 * c)), VI32, 32)) for c in (0, 1)]
    for odd in (0, 1):
        k = b.add(b.shl(i, const(1)), const(odd))
        _add_products(b, rows, k, [halves[0][odd], halves[1][odd]], sums)


def _step_float32(b: ir.IRBuilder, rows: Values, w: ir.Value, i: ir.Value, sums: list[Values]) -> None:
    """Two k, one after the other: 128 bytes of weights."""
    for odd in (0, 1):
        k = b.add(b.shl(i, const(1)), const(odd))
        offset = b.shl(k, const(6))
        weights = [load_at(b, w, b.add(offset, const(32 * c)), VF32, 32) for c in (0, 1)]
        _add_products(b, rows, k, weights, sums)


_STEPS = {INT8: _step_int8, BFLOAT16: _step_bfloat16, FLOAT32: _step_float32}
_UNROLL = {INT8: 2, BFLOAT16: 1, FLOAT32: 1}


def _micro_kernel(precision: str, row_count: int, variant: str) -> Any:
    """Product of `row_count` rows with one panel, stored to or added to `out`. k is a multiple of 4 (int8) or 2."""
    accumulator = VI32 if precision == INT8 else VF32
    step, unroll = _STEPS[precision], _UNROLL[precision]

    def block(
        b: ir.IRBuilder,
        x: ir.Value,  # address of the rows' activations
        x_stride: ir.Value,  # bytes from row to row
        w: ir.Value,  # address of the panel
        k: ir.Value,
        ahead: ir.Value,  # bytes from a weight to the one to be fetched with it
        row_scale: ir.Value,  # address, int8 only
        column_scale: ir.Value,  # address, int8 only
        out: ir.Value,
        out_stride: ir.Value,
        adds: ir.Value,  # 1: out += product
    ) -> None:
        zero = ir.Constant(accumulator, [0] * 8)
        sums = [[cgutils.alloca_once_value(b, zero) for _ in (0, 1)] for _ in range(row_count)]
        for each in [s for pair in sums for s in pair]:
            b.store(zero, each)
        rows = [pointer(b, b.add(x, b.mul(x_stride, const(r)))) for r in range(row_count)]
        panel = pointer(b, w)
        pair_bytes = 2 * COLUMNS * WEIGHT_BYTES[precision]
        with cgutils.for_range_slice(b, const(0), b.lshr(k, const(1)), const(unroll), I64) as (i, _):
            for line in range(0, unroll * pair_bytes, 64):
                prefetch(b, panel, b.add(b.add(b.mul(i, const(pair_bytes)), const(line)), ahead))
            for u in range(unroll):
                step(b, rows, panel, b.add(i, const(u)), sums)
        results = [[b.load(s) for s in pair] for pair in sums]
        if precision == INT8:
            results = _scaled(b, results, row_scale, column_scale)
        _deliver(b, results, out, out_stride, adds)

    return outlined(f"rows{row_count}_by_panel_{precision}{variant}", block)


def _scaled(b: ir.IRBuilder, sums: list[Values], row_scale: ir.Value, column_scale: ir.Value) -> list[Values]:
    columns = [load_at(b, pointer(b, column_scale), const(32 * c), VF32, 4) for c in (0, 1)]
    scaled = []
    for r, pair in enumerate(sums):
        row = splat_value(b, load_at(b, pointer(b, row_scale), const(4 * r), F32, 4))
        scaled.append([b.fmul(b.sitofp(pair[c], VF32), b.fmul(row, columns[c])) for c in (0, 1)])
    return scaled


def _deliver(b: ir.IRBuilder, results: list[Values], out: ir.Value, out_stride: ir.Value, adds: ir.Value) -> None:
    places = [
        [b.add(b.add(out, b.mul(out_stride, const(r))), const(32 * c)) for c in (0, 1)] for r in range(len(results))
    ]
    pairs = [(pointer(b, places[r][c], VF32), results[r][c]) for r in range(len(results)) for c in (0, 1)]
    with b.if_else(b.icmp_signed("!=", adds, const(0))) as (then, otherwise):
        with then:
            for place, value in pairs:
                b.store(b.fadd(b.load(place, align=4), value), place, align=4)
        with otherwise:
            for place, value in pairs:
                b.store(value, place, align=4)


def make_rows_by_panel(precision: str, variant: str = "") -> Callable[..., None]:
    """Product of any number of rows with one panel, in blocks of nearly equal size. `variant` sets names apart."""
    one, two, three, four, five, six = (_micro_kernel(precision, r, variant) for r in range(1, ROWS_MAX + 1))

    @kernel
    def rows_by_panel(
        x: int,
        x_stride: int,
        rows: int,
        w: int,
        k: int,
        ahead: int,
        row_scale: int,
        column_scale: int,
        out: int,
        out_stride: int,
        adds: int,
    ) -> None:
        blocks = (rows + 5) // 6
        while blocks > 0:
            count = (rows + blocks - 1) // blocks
            if count == 6:
                six(x, x_stride, w, k, ahead, row_scale, column_scale, out, out_stride, adds)
            elif count == 5:
                five(x, x_stride, w, k, ahead, row_scale, column_scale, out, out_stride, adds)
            elif count == 4:
                four(x, x_stride, w, k, ahead, row_scale, column_scale, out, out_stride, adds)
            elif count == 3:
                three(x, x_stride, w, k, ahead, row_scale, column_scale, out, out_stride, adds)
            elif count == 2:
                two(x, x_stride, w, k, ahead, row_scale, column_scale, out, out_stride, adds)
            else:
                one(x, x_stride, w, k, ahead, row_scale, column_scale, out, out_stride, adds)
            x += count * x_stride
            row_scale += 4 * count
            out += count * out_stride
            rows -= count
            blocks -= 1

    return rows_by_panel


rows_by_panel_int8 = make_rows_by_panel(INT8)
rows_by_panel_bfloat16 = make_rows_by_panel(BFLOAT16)
rows_by_panel_float32 = make_rows_by_panel(FLOAT32)
ROWS_BY_PANEL = {INT8: rows_by_panel_int8, BFLOAT16: rows_by_panel_bfloat16, FLOAT32: rows_by_panel_float32}
