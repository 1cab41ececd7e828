"""Right bfloat16 in Triton's interpreter, which keeps bfloat16 as bits in uint16 and computes with those as integers.

Owns replacements for the parts of the interpreter that compute or convert: they work in float32 and round once, to
nearest even, as a GPU does for one operation. Loads, stores, shapes and selections move bits and stay as they are.
Applies to this process for good, and only to the interpreter.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, ReduceScanOpInterface, TensorHandle

_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers that bfloat16 bits stand for."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32).reshape(bits.shape)


def to_bits(numbers: Any) -> NDArray[np.uint16]:
    """The nearest bfloat16 of each number, even in a tie, as bits."""
    numbers = np.ascontiguousarray(numbers, np.float32)
    bits = numbers.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)


def _is_bf16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _up(value: Any) -> Any:
    return TensorHandle(from_bits(value.data), tl.float32) if _is_bf16(value) else value


def _down(handle: Any) -> Any:
    if handle.data.dtype == np.bool_:
        return TensorHandle(handle.data, tl.int1)
    return TensorHandle(to_bits(handle.data), tl.bfloat16)


def _in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute` with bfloat16 operands widened, and the result rounded if any of them was."""

    def computed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(arg in _BITWISE or arg is np.where for arg in args if callable(arg)):
            return compute(self, *args, **kwargs)  # moves bits
        result = compute(self, *(_up(arg) for arg in args), **kwargs)
        return _down(result) if any(_is_bf16(arg) for arg in args) else result

    return computed


def _dot(compute: Callable[..., Any]) -> Callable[..., Any]:
    def computed(self: Any, a: Any, b: Any, total: Any, *args: Any) -> Any:
        result = compute(self, _up(a), _up(b), _up(total), *args)
        return _down(result) if _is_bf16(total) else result

    return computed


def _cast(compute: Callable[..., Any]) -> Callable[..., Any]:
    def computed(self: Any, source: Any, target: Any, *rounding: Any) -> Any:
        if target.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            return TensorHandle(to_bits(source.data), tl.bfloat16)
        if target.scalar == tl.float32 and _is_bf16(source):
            return _up(source)
        return compute(self, source, target, *rounding)

    return computed


def _reduce(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions and scans: widened, and the results that are still numbers rounded."""

    def computed(self: Any, given: Any) -> Any:
        if not isinstance(given, tuple):
            return compute(self, given)  # comes back with a tuple
        narrow = [_is_bf16(value.handle) for value in given]
        wide = tuple(
            self.to_tensor(from_bits(value.handle.data), tl.float32) if is_narrow else value
            for value, is_narrow in zip(given, narrow, strict=True)
        )
        results = compute(self, wide)
        return tuple(
            self.to_tensor(to_bits(result.handle.data.reshape(result.shape)), tl.bfloat16) if is_narrow else result
            for result, is_narrow in zip(results, (*narrow, *[False] * len(results)), strict=False)
        )

    return computed


def _constant(self: Any, value: float) -> Any:
    return TensorHandle(to_bits([value]), tl.bfloat16)


def correct_bf16() -> None:
    """Make the interpreter of this process compute bfloat16 rightly. Once is enough; more often does no harm."""
    builder: Any = InterpreterBuilder
    if getattr(builder, "get_bf16", None) is _constant:
        return
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_erf"):
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.create_dot = _dot(builder.create_dot)
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _cast(builder.create_fp_to_fp)
    builder.get_bf16 = _constant
    ReduceScanOpInterface.apply = _reduce(ReduceScanOpInterface.apply)
