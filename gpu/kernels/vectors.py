"""Vectors of eight 32-bit lanes as values in native code: float32 (`F32x8`) and int32 (`I32x8`).

Owns the two numba types, their operators, and loads and stores at plain addresses (int64). Nothing here sums across lanes
in an order that depends on anything but the number of lanes, and nothing lets the compiler reorder float operations:
what is written is what runs, so a result depends on its operands alone.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 8

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
F64 = ir.DoubleType()
VF32 = ir.VectorType(F32, LANES)
VI32 = ir.VectorType(I32, LANES)


class _VectorType(types.Type):
    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        super().__init__(name=name)
        self.llvm_type = llvm_type


f32x8 = _VectorType("F32x8", VF32)
i32x8 = _VectorType("I32x8", VI32)


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm_type)


# --- building blocks for code that emits IR ---------------------------------------------------------------------------


def const(value: int, kind: ir.Type = I64) -> ir.Constant:
    """Integer constant."""
    return ir.Constant(kind, value)


def splat_value(b: ir.IRBuilder, value: ir.Value, kind: ir.VectorType = VF32) -> ir.Value:
    """Vector with `value` in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    lane = b.insert_element(undefined, value, const(0, I32))
    return b.shuffle_vector(lane, undefined, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def load_at(b: ir.IRBuilder, base: ir.Value, offset: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    """Load of `kind` at the i8 pointer `base` plus `offset` bytes."""
    return b.load(b.bitcast(b.gep(base, [offset]), kind.as_pointer()), align=align)


def pointer(b: ir.IRBuilder, address: ir.Value, kind: ir.Type = I8) -> ir.Value:
    """Pointer to `kind` from an integer address."""
    return b.inttoptr(address, kind.as_pointer())


def call_llvm(b: ir.IRBuilder, name: str, result: ir.Type, operands: list[ir.Value]) -> ir.Value:
    """Call of an LLVM intrinsic by its full name."""
    kind = ir.FunctionType(result, [o.type for o in operands])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), operands)


def fma_value(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x*y + z, rounded once, per lane."""
    return call_llvm(b, "llvm.fma.v8f32", VF32, [x, y, z])


def prefetch(b: ir.IRBuilder, base: ir.Value, offset: ir.Value) -> None:
    """Ask for the cache line at `base` + `offset`; an address outside the buffer does no harm."""
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [b.gep(base, [offset]), const(0, I32), const(3, I32), const(1, I32)])


def interleave(b: ir.IRBuilder, even: ir.Value, odd: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(even0, odd0, even1, odd1, ...) as two vectors."""
    low = [i // 2 + LANES * (i % 2) for i in range(LANES)]
    mask = ir.VectorType(I32, LANES)
    return (
        b.shuffle_vector(even, odd, ir.Constant(mask, low)),
        b.shuffle_vector(even, odd, ir.Constant(mask, [i + LANES // 2 for i in low])),
    )


def bf16_halves(b: ir.IRBuilder, pairs: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Float32 vectors of the lower and the upper bfloat16 of each 32-bit lane."""
    lower = b.shl(pairs, ir.Constant(VI32, [16] * LANES))
    upper = b.and_(pairs, ir.Constant(VI32, [0xFFFF0000 - (1 << 32)] * LANES))
    return b.bitcast(lower, VF32), b.bitcast(upper, VF32)


# --- functions that native code calls ---------------------------------------------------------------------------------


def _positional(emit: Callable[..., Any]) -> inspect.Signature:
    """What numba folds call arguments by; it has no way to fold *args."""
    names = ["context", *list(inspect.signature(emit).parameters)[1:]]
    return inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])


def emitted(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function for native code from `emit(builder, *values) -> value`, with the numba types given."""

    def make(emit: Callable[..., Any]) -> Any:
        def typing(_context: Any, *_given: Any) -> Any:
            def codegen(_target: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
                return emit(builder, *values)

            return signature(result, *arguments), codegen

        typing.__signature__ = _positional(emit)  # type: ignore[attr-defined]
        typing.__name__, typing.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typing)

    return make


def outlined(name: str, emit: Callable[..., None]) -> Any:
    """As `emitted`, for a large `emit` without result whose arguments are all int64: one copy, called and never inlined.

    `name` is unique for what is emitted. Inlining large loops at every call costs most of the time to compile.
    """

    def call(builder: ir.IRBuilder, *values: ir.Value) -> None:
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [I64] * len(values)), name)
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            emit(inner, *function.args)
            inner.ret_void()
        builder.call(function, values)

    call.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
    call.__name__ = name
    return emitted(types.void, *[types.int64] * (len(inspect.signature(emit).parameters) - 1))(call)


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


def _operator(function: Any, kind: _VectorType, emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> None:
    @infer_global(function)
    class _Template(AbstractTemplate):
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
