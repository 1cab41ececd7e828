"""Triton's interpreter computes bfloat16 as torch does, operation by operation and to the bit."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

N = 256


@triton.jit
def arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, a + b)
    tl.store(out + N + i, a - b)
    tl.store(out + 2 * N + i, a * b)
    tl.store(out + 3 * N + i, tl.where(a > b, a, b))
    tl.store(out + 4 * N + i, -a)
    tl.store(out + 5 * N + i, a * 0.3)
    tl.store(out + 6 * N + i, tl.maximum(a, b))
    tl.store(out + 7 * N + i, tl.full((N,), 1.7, tl.bfloat16))
    tl.store(out + 8 * N + i, tl.load(x + i, mask=i % 2 == 0, other=0.1))


@triton.jit
def rounding(x, out, wide, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16))
    tl.store(wide + i, tl.load(out + i).to(tl.float32))


@triton.jit
def reductions(x, out, place, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out, tl.max(a, axis=0))
    tl.store(out + 1, tl.min(a, axis=0))
    tl.store(out + 2, tl.sum(a.to(tl.float32), axis=0))
    tl.store(place, tl.argmax(a, axis=0))


@triton.jit
def product(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + i, tl.dot(tl.load(x + i), tl.load(y + i)))


def numbers(seed: int, n: int = N) -> Any:
    """Of all sizes, with ties between two bfloat16 numbers and what lies at the ends of the range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * torch.logspace(-6, 6, n)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0, 1e-40, 3.3e38, 3.4028e38])
    x[: len(ties)] = ties
    return x


def bits(x: Any) -> list[int]:
    return (x.contiguous().view(torch.int16) & 0xFFFF).tolist()


@pytest.mark.filterwarnings("ignore:overflow")
def test_arithmetic() -> None:
    x, y = numbers(1).bfloat16(), numbers(2).flip(0).bfloat16()
    out = torch.zeros(9, N, dtype=torch.bfloat16)
    arithmetic[(1,)](x, y, out, N)
    even = torch.arange(N) % 2 == 0
    expected = [
        x + y, x - y, x * y, torch.where(x > y, x, y), 0 - x, x * torch.tensor(0.3).bfloat16(), torch.maximum(x, y),
        torch.full((N,), 1.7).bfloat16(), torch.where(even, x, torch.tensor(0.1).bfloat16()),
    ]  # fmt: skip
    for i, row in enumerate(expected):
        assert bits(out[i]) == bits(row), i


def test_numbers_are_rounded_to_the_nearest_even_one() -> None:
    x = numbers(3)
    x[-1], x[-2], x[-3] = float("inf"), float("-inf"), float("nan")
    out, wide = torch.zeros(N, dtype=torch.bfloat16), torch.zeros(N)
    rounding[(1,)](x, out, wide, N)
    assert out[-3].isnan()
    assert wide[-3].isnan()
    there = torch.arange(N) != N - 3
    assert bits(out[there]) == bits(x.bfloat16()[there])
    assert torch.equal(wide[there], x.bfloat16()[there].float())


def test_reductions() -> None:
    x = numbers(4)[16:144].bfloat16()
    out, place = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    reductions[(1,)](x, out, place, 128)
    assert (out[0], out[1], place[0]) == (x.max(), x.min(), x.argmax())
    assert float(out[2]) == pytest.approx(float(x.float().sum()), rel=2**-8)


def test_products_add_up_in_float32() -> None:
    x, y = (numbers(seed, 1024)[:256].reshape(16, 16).bfloat16() for seed in (5, 6))
    out = torch.zeros(16, 16)
    product[(1,)](x, y, out, 16)
    torch.testing.assert_close(out, x.float() @ y.float())
