"""Small kernels that the compile tests try their own tools on, and a greedy one for the controls."""

import triton
import triton.language as tl

from gpu.kernels.triton_spec import KernelSpec


@triton.jit(do_not_specialize=["offset"])
def shift_kernel(x, out, count, offset, scale, BLOCK: tl.constexpr):
    """out[i] = x[i] * scale + offset."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count)
    tl.store(out + place, (value * scale + offset).to(out.dtype.element_ty), mask=place < count)


@triton.jit
def product_kernel(a, b, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """out [M, N] = sum over steps of a [M, K] @ b [K, N]: registers and shared memory by the size of its tile."""
    rows, columns, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for step in range(steps):
        left = tl.load(a + step * M * K + rows * K + inner[None, :])
        right = tl.load(b + step * K * N + inner[:, None] * N + columns)
        total = tl.dot(left, right, total)
    tl.store(out + rows * N + columns, total.to(out.dtype.element_ty))


def shift(types=("*bf16", "*bf16"), aligned=("x", "out", "count"), **options) -> KernelSpec:
    """A spec of the first one."""
    signature = {"x": types[0], "out": types[1], "count": "i32", "offset": "i32", "scale": "fp32"}
    return KernelSpec(shift_kernel, signature, {"BLOCK": 128}, aligned, options)


def product(m: int, n: int, k: int, **options) -> KernelSpec:
    """A spec of the second one."""
    signature = {"a": "*bf16", "b": "*bf16", "out": "*bf16", "steps": "i32"}
    return KernelSpec(product_kernel, signature, {"M": m, "N": n, "K": k}, ("a", "b", "out"), options)
