"""Packing and matrix products against numpy, and a row's independence of the rows beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from gpu.kernels import gemm, packing
from gpu.kernels.team import Team, aligned

PRECISIONS = ("int8", "bfloat16", "float32")
COLUMNS = gemm.COLUMNS


@njit
def int8(x, xs, rows, w, k, ahead, rs, cs, out, os, adds):  # type: ignore[no-untyped-def]
    gemm.rows_by_panel_int8(x, xs, rows, w, k, ahead, rs, cs, out, os, adds)


@njit
def bfloat16(x, xs, rows, w, k, ahead, rs, cs, out, os, adds):  # type: ignore[no-untyped-def]
    gemm.rows_by_panel_bfloat16(x, xs, rows, w, k, ahead, rs, cs, out, os, adds)


@njit
def float32(x, xs, rows, w, k, ahead, rs, cs, out, os, adds):  # type: ignore[no-untyped-def]
    gemm.rows_by_panel_float32(x, xs, rows, w, k, ahead, rs, cs, out, os, adds)


@njit
def embed(panels, scales, row, k, out, precision):  # type: ignore[no-untyped-def]
    if precision == 1:
        packing.embed_int8(panels, scales, row, k, out)
    elif precision == 2:
        packing.embed_bfloat16(panels, scales, row, k, out)
    else:
        packing.embed_float32(panels, scales, row, k, out)


MULTIPLY = {"int8": int8, "bfloat16": bfloat16, "float32": float32}


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def pack(team: Team, precision: str, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, k = matrix.shape
    columns = -(-rows // COLUMNS) * COLUMNS
    panels = aligned((columns * k * gemm.WEIGHT_BYTES[precision],), np.uint8)
    scales = aligned((columns,), np.float32)
    packing.Packer(team, precision, k).pack(matrix, panels, scales)
    return panels, scales


def unpack(precision: str, panels: np.ndarray, k: int) -> np.ndarray:
    """Stored numbers as [columns, k]."""
    if precision == "float32":
        return panels.view(np.float32).reshape(-1, k, COLUMNS).transpose(0, 2, 1).reshape(-1, k)
    stored = panels.view(np.int8 if precision == "int8" else np.uint16)
    return stored.reshape(-1, k // 2, COLUMNS, 2).transpose(0, 2, 1, 3).reshape(-1, k)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(16, 16), (48, 32), (35, 64)])
def test_packing_rounds_and_places_every_weight(team: Team, precision: str, shape: tuple[int, int]) -> None:
    matrix = normal(*shape) * 3
    panels, scales = pack(team, precision, matrix)
    stored = unpack(precision, panels, shape[1])
    assert not stored[shape[0] :].any()
    stored = stored[: shape[0]]
    if precision == "int8":
        expected = np.abs(matrix).max(1) / np.float32(127)
        np.testing.assert_allclose(scales[: shape[0]], expected, rtol=1e-6)
        assert np.abs(stored * expected[:, None].astype(np.float64) - matrix).max() <= expected.max() * 0.501
    elif precision == "bfloat16":
        np.testing.assert_array_equal(stored, torch.from_numpy(matrix).bfloat16().view(torch.uint16).numpy())
    else:
        np.testing.assert_array_equal(stored, matrix)
    out = np.empty(shape[1], np.float32)
    for row in (0, shape[0] - 1):
        embed(panels.ctypes.data, scales.ctypes.data, row, shape[1], out.ctypes.data, PRECISIONS.index(precision) + 1)
        np.testing.assert_allclose(out, matrix[row], atol=np.abs(matrix).max() / 200)


def test_packing_into_every_second_panel(team: Team) -> None:
    a, b = normal(32, 16), normal(32, 16, seed=1)
    panels, scales = aligned((64 * 16 * 4,), np.uint8), aligned((64,), np.float32)
    packer = packing.Packer(team, "float32", 16)
    packer.pack(a, panels, scales, 0, 2)
    packer.pack(b, panels, scales, 1, 2)
    stored = unpack("float32", panels, 16).reshape(4, 16, 16)
    np.testing.assert_array_equal(stored[0::2].reshape(32, 16), a)
    np.testing.assert_array_equal(stored[1::2].reshape(32, 16), b)
    with pytest.raises(ValueError, match="does not fit"):
        packer.pack(b, panels, scales, 3, 2)


def inputs(precision: str, rows: int, k: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    if precision == "int8":
        x = aligned((rows, k), np.int16)
        x[:] = np.random.default_rng(3).integers(-limit, limit + 1, (rows, k))
    else:
        x = aligned((rows, k), np.float32)
        x[:] = normal(rows, k, seed=3)
    return x, np.abs(normal(rows, seed=4)) + np.float32(0.1)


def multiply(
    precision: str, x: np.ndarray, scale: np.ndarray, packed: tuple[np.ndarray, np.ndarray], out: np.ndarray, adds: int
) -> None:
    rows, k = x.shape
    panel_bytes = COLUMNS * k * gemm.WEIGHT_BYTES[precision]
    for p in range(out.shape[1] // COLUMNS):
        MULTIPLY[precision](
            *(x.ctypes.data, x.strides[0], rows, packed[0].ctypes.data + p * panel_bytes, k, panel_bytes),
            *(scale.ctypes.data, packed[1].ctypes.data + 64 * p, out.ctypes.data + 64 * p, out.strides[0], adds),
        )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 32])
def test_products(team: Team, precision: str, rows: int) -> None:
    k, matrix = 64, normal(48, 64)
    packed = pack(team, precision, matrix)
    x, scale = inputs(precision, rows, k, gemm.activation_limit(k))
    out = np.full((rows, 48), 2.0, np.float32)
    multiply(precision, x, scale, packed, out, 0)
    stored = unpack(precision, packed[0], k)
    if precision == "int8":
        sums = x.astype(np.int64) @ stored.astype(np.int64).T
        expected = sums.astype(np.float32) * (scale[:, None] * packed[1][None])
        np.testing.assert_array_equal(out, expected)
    else:
        weights = matrix if precision == "float32" else torch.from_numpy(matrix).bfloat16().float().numpy()
        expected = (x.astype(np.float64) @ weights.astype(np.float64).T).astype(np.float32)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    sums_on_top = np.full((rows, 48), 2.0, np.float32)
    multiply(precision, x, scale, packed, sums_on_top, 1)
    np.testing.assert_array_equal(sums_on_top, out + np.float32(2))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_row_is_the_same_bits_whatever_is_beside_it(team: Team, precision: str) -> None:
    packed = pack(team, precision, normal(16, 96))
    x, scale = inputs(precision, 32, 96, 3000)
    whole = np.empty((32, 16), np.float32)
    multiply(precision, x, scale, packed, whole, 0)
    for first, count in [(i, 1) for i in range(32)] + [(3, 7), (0, 13), (9, 6)]:
        part = np.empty((count, 16), np.float32)
        multiply(precision, x[first : first + count], scale[first : first + count], packed, part, 0)
        np.testing.assert_array_equal(part, whole[first : first + count])


@pytest.mark.parametrize("k", [16, 576, 1536, 8192])
def test_the_largest_activations_do_not_overflow(team: Team, k: int) -> None:
    matrix = np.where(normal(16, k) > 0, 1, -1).astype(np.float32)
    packed = pack(team, "int8", matrix)
    limit = gemm.activation_limit(k)
    x = aligned((2, k), np.int16)
    x[0], x[1] = matrix[5] * limit, -matrix[5] * limit
    out = np.empty((2, 16), np.float32)
    multiply("int8", x, np.ones(2, np.float32), packed, out, 0)
    assert out[0, 5] == np.float32(127 * limit * k) * packed[1][5]
    assert out[1, 5] == -out[0, 5]


def test_the_portable_form_of_the_pair_product_is_the_same(team: Team, monkeypatch: Any) -> None:
    monkeypatch.setattr(gemm, "HAS_PMADDWD", False)
    made = gemm.make_rows_by_panel("int8", "_portable")

    @njit
    def run(x, xs, rows, w, k, ahead, rs, cs, out, os, adds):  # type: ignore[no-untyped-def]
        made(x, xs, rows, w, k, ahead, rs, cs, out, os, adds)

    packed = pack(team, "int8", normal(16, 64))
    x, scale = inputs("int8", 5, 64, 4000)
    usual, other = np.empty((5, 16), np.float32), np.empty((5, 16), np.float32)
    multiply("int8", x, scale, packed, usual, 0)
    monkeypatch.setitem(MULTIPLY, "int8", run)
    multiply("int8", x, scale, packed, other, 0)
    np.testing.assert_array_equal(usual, other)
