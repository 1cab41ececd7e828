"""Operations on vectors of eight 32-bit lanes in native code: `F32x8` and `I32x8`.

Owns loads and stores at plain addresses (int64), arithmetic, and the few sums and maxima across lanes, each in one
fixed order. What is written is what runs, so a result depends on its operands alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin

from gpu.kernels.emit import (
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF32,
    VI32,
    VectorType,
    call_llvm,
    const,
    emitted,
    f32x8,
    fma_value,
    i32x8,
    pointer,
    splat_value,
)


def _loader(name: str, result: Any, kind: ir.Type, align: int) -> Any:
    def load(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return b.load(pointer(b, address, kind), align=align)

    load.__name__ = name
    return emitted(result, types.int64)(load)


def _storer(name: str, value_type: Any, align: int) -> Any:
    def store(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
        b.store(value, pointer(b, address, value.type), align=align)

    store.__name__ = name
    return emitted(types.void, types.int64, value_type)(store)


load_f32x8 = _loader("load_f32x8", f32x8, VF32, 4)
load_f32 = _loader("load_f32", types.float32, F32, 4)
load_f64 = _loader("load_f64", types.float64, F64, 8)
load_i32 = _loader("load_i32", types.int32, I32, 4)
load_i64 = _loader("load_i64", types.int64, I64, 8)
load_u64 = _loader("load_u64", types.uint64, I64, 8)
load_i8 = _loader("load_i8", types.int8, I8, 1)
load_u16 = _loader("load_u16", types.uint16, I16, 2)
store_f32x8 = _storer("store_f32x8", f32x8, 4)
store_f32 = _storer("store_f32", types.float32, 4)
store_f64 = _storer("store_f64", types.float64, 8)
store_i32 = _storer("store_i32", types.int32, 4)
store_i64 = _storer("store_i64", types.int64, 8)
store_i8 = _storer("store_i8", types.int8, 1)
store_u16 = _storer("store_u16", types.uint16, 2)


@emitted(types.int64, types.int64, types.int64)
def word(b: ir.IRBuilder, block: ir.Value, index: ir.Value) -> ir.Value:
    """int64 number `index` behind the address `block`."""
    return b.load(pointer(b, b.add(block, b.shl(index, const(3))), I64), align=8)


@emitted(f32x8, types.float32)
def splat(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The scalar in every lane."""
    return splat_value(b, value)


@emitted(i32x8, types.int32)
def splat_i32(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The integer in every lane."""
    return splat_value(b, value, VI32)


@emitted(f32x8, f32x8, f32x8, f32x8)
def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x*y + z, rounded once."""
    return fma_value(b, x, y, z)


@emitted(f32x8, f32x8, f32x8)
def vmax(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x > y ? x : y in each lane (y where either is NaN)."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@emitted(f32x8, f32x8, f32x8)
def vmin(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x < y ? x : y in each lane (y where either is NaN)."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


@emitted(i32x8, i32x8, i32x8)
def vmax_i32(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Signed maximum."""
    return b.select(b.icmp_signed(">", x, y), x, y)


@emitted(f32x8, f32x8, f32x8, f32x8)
def keep_above(b: ir.IRBuilder, x: ir.Value, limit: ir.Value, y: ir.Value) -> ir.Value:
    """y where x >= limit or x is NaN, else 0."""
    return b.select(b.fcmp_unordered(">=", x, limit), y, ir.Constant(VF32, [0.0] * LANES))


@emitted(f32x8, f32x8)
def vsqrt(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Square root, correctly rounded."""
    return call_llvm(b, "llvm.sqrt.v8f32", VF32, [x])


@emitted(i32x8, f32x8)
def round_to_i32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Nearest integer, ties to even; |x| must be below 2^31."""
    return b.fptosi(call_llvm(b, "llvm.rint.v8f32", VF32, [x]), VI32)


@emitted(f32x8, i32x8)
def to_f32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Nearest float."""
    return b.sitofp(x, VF32)


@emitted(i32x8, f32x8)
def bits_of(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The same bits as integers."""
    return b.bitcast(x, VI32)


@emitted(f32x8, i32x8)
def from_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The same bits as floats."""
    return b.bitcast(x, VF32)


@emitted(types.int32, types.float32)
def bits_of_f32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The bits of one float."""
    return b.bitcast(x, I32)


@emitted(types.float32, types.int32)
def f32_from_bits(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """One float from its bits."""
    return b.bitcast(x, F32)


@emitted(types.float32, f32x8)
def sum_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """((x0+x4)+(x2+x6)) + ((x1+x5)+(x3+x7)): always this order."""
    lanes = [b.extract_element(x, const(i, I32)) for i in range(LANES)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [b.fadd(lanes[i], lanes[i + half]) for i in range(half)]
    return lanes[0]


@emitted(types.float32, f32x8)
def max_lanes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Largest lane."""
    lanes = [b.extract_element(x, const(i, I32)) for i in range(LANES)]
    best = lanes[0]
    for lane in lanes[1:]:
        best = b.select(b.fcmp_ordered(">", lane, best), lane, best)
    return best


@emitted(types.int32, i32x8)
def max_lanes_i32(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Largest lane, signed."""
    lanes = [b.extract_element(x, const(i, I32)) for i in range(LANES)]
    best = lanes[0]
    for lane in lanes[1:]:
        best = b.select(b.icmp_signed(">", lane, best), lane, best)
    return best


@emitted(types.void, types.int64, i32x8)
def store_as_i16(b: ir.IRBuilder, address: ir.Value, x: ir.Value) -> None:
    """Eight int16 from the lower halves of the lanes."""
    kind = ir.VectorType(I16, LANES)
    b.store(b.trunc(x, kind), pointer(b, address, kind), align=2)


@emitted(types.void, types.int64, i32x8)
def store_as_i8(b: ir.IRBuilder, address: ir.Value, x: ir.Value) -> None:
    """Eight int8 from the lower bytes of the lanes."""
    kind = ir.VectorType(I8, LANES)
    b.store(b.trunc(x, kind), pointer(b, address, kind), align=1)


def _round_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    bits = b.bitcast(x, VI32)
    odd = b.and_(b.lshr(bits, ir.Constant(VI32, [16] * LANES)), ir.Constant(VI32, [1] * LANES))
    rounded = b.add(bits, b.add(odd, ir.Constant(VI32, [0x7FFF] * LANES)))
    bits = b.select(b.fcmp_unordered("uno", x, x), ir.Constant(VI32, [0x7FC00000] * LANES), rounded)
    return b.and_(bits, ir.Constant(VI32, [0xFFFF0000 - (1 << 32)] * LANES))


@emitted(f32x8, f32x8)
def round_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Nearest bfloat16 as float32, ties to even; NaN stays NaN."""
    return b.bitcast(_round_bf16(b, x), VF32)


@emitted(types.void, types.int64, f32x8)
def store_as_bf16(b: ir.IRBuilder, address: ir.Value, x: ir.Value) -> None:
    """Eight bfloat16, rounded to nearest even."""
    kind = ir.VectorType(I16, LANES)
    high = b.lshr(_round_bf16(b, x), ir.Constant(VI32, [16] * LANES))
    b.store(b.trunc(high, kind), pointer(b, address, kind), align=2)


# --- operators --------------------------------------------------------------------------------------------------------


def _operator(function: Any, kind: VectorType, emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> None:
    @infer_global(function)
    class _Template(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, _kws: Any) -> Any:
            return signature(kind, kind, kind) if args == (kind, kind) else None

    @lower_builtin(function, kind, kind)
    def _lower(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Any) -> ir.Value:
        return emit(builder, *args)


_operator(operator.add, f32x8, lambda b, x, y: b.fadd(x, y))
_operator(operator.sub, f32x8, lambda b, x, y: b.fsub(x, y))
_operator(operator.mul, f32x8, lambda b, x, y: b.fmul(x, y))
_operator(operator.truediv, f32x8, lambda b, x, y: b.fdiv(x, y))
_operator(operator.add, i32x8, lambda b, x, y: b.add(x, y))
_operator(operator.and_, i32x8, lambda b, x, y: b.and_(x, y))
_operator(operator.lshift, i32x8, lambda b, x, y: b.shl(x, y))
