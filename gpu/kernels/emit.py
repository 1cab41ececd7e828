"""Building blocks of native code that is written as LLVM instructions: vector types, loads, functions made of it.
it.

Owns the two numba types that stand for vectors of eight 32-bit lanes, float32 (`F32x8`) and int32 (`I32x8`), and the
ways to turn emitting code into functions that kernels call. Nothing here lets the compiler reorder float operations:
no fast-math flag is ever set."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import signature
from numba.extending import intrinsic, models, register_model

LANES = 8

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
F64 = ir.DoubleType()
VF32 = ir.VectorType(F32, LANES)
VI32 = ir.VectorType(I32, LANES)


class VectorType(types.Type):  # type: ignore[misc]
    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        super().__init__(name=name)
        self.llvm_type = llvm_type


f32x8 = VectorType("F32x8", VF32)
i32x8 = VectorType("I32x8", VI32)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm_type)


# --- instructions -----------------------------------------------------------------------------------------------------


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


# --- functions of it --------------------------------------------------------------------------------------------------


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
    """As `emitted`, for a large `emit` without result whose arguments are all int64: one copy, never inlined.

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
