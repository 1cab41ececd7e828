"""Row kernels and vector operations against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from gpu.kernels import rows
from gpu.kernels.vectors import load_f32x8, store_as_bf16, store_f32x8


@njit
def exp_all(source: int, out: int, n: int) -> None:
    for i in range(0, 4 * n, 32):
        store_f32x8(out + i, rows.exp8(load_f32x8(source + i)))


@njit
def bf16_all(source: int, out: int, n: int) -> None:
    for i in range(0, n, 8):
        store_as_bf16(out + 2 * i, load_f32x8(source + 4 * i))


@njit
def norm(x: int, weight: int, out: int, n: int, epsilon: float) -> None:
    rows.rms_norm(x, weight, out, n, epsilon)


@njit
def condense(x: int, n: int, out: int, scale: int, limit: float) -> None:
    rows.condense_int8(x, n, out, scale, limit)


@njit
def silu(gate: int, up: int, out: int, n: int) -> None:
    rows.silu_times(gate, up, out, n)


@njit
def rotate(x: int, heads: int, dim: int, cosine: int, sine: int, factor: float) -> None:
    rows.rotate(x, heads, dim, cosine, sine, factor)


@njit
def cache(bf16: bool, k: int, v: int, k_page: int, v_page: int, slot: int, heads: int, dim: int, page: int) -> None:
    if bf16:
        rows.cache_bfloat16(k, v, k_page, v_page, slot, heads, dim, page)
    else:
        rows.cache_float32(k, v, k_page, v_page, slot, heads, dim, page)


def at(array: np.ndarray) -> int:
    return array.ctypes.data


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_exp() -> None:
    x = np.concatenate([np.linspace(-86.9, 87.9, 8000), normal(8000) * 3, np.zeros(8)]).astype(np.float32)
    out = np.empty_like(x)
    exp_all(at(x), at(out), len(x))
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=3e-7)
    assert (out[-8:] == 1).all()


def test_exp_at_the_edges() -> None:
    x = np.array([-np.inf, -1e30, -88, -87.5, np.nan, 0, 1, 88], np.float32)
    out = np.empty_like(x)
    exp_all(at(x), at(out), 8)
    assert out[:4].tolist() == [0, 0, 0, 0]
    assert np.isnan(out[4])
    assert out[5] == 1


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 80000, dtype=np.uint32)
    halves = (np.arange(0, 65536, dtype=np.uint32) << 16) | 0x8000  # exactly between two bfloat16
    x = np.concatenate([bits, halves]).view(np.float32)
    x = np.ascontiguousarray(x[~np.isnan(x)][: len(x) // 8 * 8 - 2048])
    out = np.empty(len(x), np.uint16)
    bf16_all(at(x), at(out), len(x) // 8 * 8)
    expected = torch.from_numpy(x).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(out[: len(x) // 8 * 8], expected[: len(x) // 8 * 8])
    x = np.full(8, np.nan, np.float32)
    x[1] = np.uint32(0x7FFFFFFF).view(np.float32)
    bf16_all(at(x), at(out), 8)
    assert np.isnan(torch.from_numpy(out[:8].copy()).view(torch.bfloat16).float().numpy()).all()


@pytest.mark.parametrize("n", [16, 64, 576])
def test_rms_norm(n: int) -> None:
    x, weight, out = normal(n), normal(n, seed=1), np.empty(n, np.float32)
    norm(at(x), at(weight), at(out), n, 1e-5)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(out, exact / np.sqrt((exact**2).mean() + 1e-5) * weight, rtol=1e-5)


@pytest.mark.parametrize("limit", [127, 11009, 32767])
def test_condense_int8(limit: int) -> None:
    x, out, scale = normal(128) * 5, np.empty(128, np.int16), np.empty(1, np.float32)
    condense(at(x), 128, at(out), at(scale), limit)
    assert np.abs(out).max() == limit
    assert np.isclose(scale[0], np.abs(x).max() / limit, rtol=1e-6)
    assert np.abs(out * scale[0].astype(np.float64) - x).max() <= scale[0] * 0.501


def test_condense_int8_of_nothing_and_of_faults() -> None:
    x, out, scale = np.zeros(16, np.float32), np.ones(16, np.int16), np.ones(1, np.float32)
    condense(at(x), 16, at(out), at(scale), 127)
    assert scale[0] == 0
    assert not out.any()
    for fault in (np.nan, np.inf, -np.inf):
        x[7] = fault
        condense(at(x), 16, at(out), at(scale), 127)
        assert not np.isfinite(scale[0])


def test_silu_times() -> None:
    gate, up, out = normal(64) * 20, normal(64, seed=1), np.empty(64, np.float32)
    gate[0] = -200
    silu(at(gate), at(up), at(out), 64)
    exact = gate.astype(np.float64)
    np.testing.assert_allclose(out, exact / (1 + np.exp(-exact)) * up, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dim", [16, 64])
def test_rotate(dim: int) -> None:
    x, angles = normal(3, dim), normal(dim // 2, seed=2)
    cosine, sine = np.cos(angles), np.sin(angles)
    a, b = x[:, : dim // 2].copy(), x[:, dim // 2 :].copy()
    rotate(at(x), 3, dim, at(cosine), at(sine), 0.5)
    np.testing.assert_allclose(x, np.hstack([a * cosine - b * sine, b * cosine + a * sine]) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_cache_writes_one_slot_and_nothing_else(dtype: Any) -> None:
    heads, dim, page, slot = 2, 16, 32, 19
    k, v = normal(heads, dim), normal(heads, dim, seed=1)
    k_page, v_page = np.zeros((heads, dim, page), dtype), np.zeros((heads, page, dim), dtype)
    expected = [k.copy(), v.copy()]
    if dtype == np.uint16:
        expected = [torch.from_numpy(t).bfloat16().view(torch.uint16).numpy() for t in expected]
    cache(dtype == np.uint16, at(k), at(v), at(k_page), at(v_page), slot, heads, dim, page)
    np.testing.assert_array_equal(k_page[:, :, slot], expected[0])
    np.testing.assert_array_equal(v_page[:, slot], expected[1])
    k_page[:, :, slot] = 0
    v_page[:, slot] = 0
    assert not k_page.any()
    assert not v_page.any()
