"""Paged attention of one row against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from gpu.kernels import attention
from gpu.kernels.team import aligned

PAGES = 40


@njit
def attend(bf16, q, kv, group, dim, keys, pages, size, k, v, page_bytes, scratch, out):  # type: ignore[no-untyped-def]
    if bf16:
        attention.attend_bfloat16(q, kv, group, dim, keys, pages, size, k, v, page_bytes, scratch, out)
    else:
        attention.attend_float32(q, kv, group, dim, keys, pages, size, k, v, page_bytes, scratch, out)


def rounded(values: np.ndarray, bf16: bool) -> tuple[np.ndarray, np.ndarray]:
    """What is stored, and the numbers that it stands for."""
    if not bf16:
        return values, values
    tensor = torch.from_numpy(values).bfloat16()
    return tensor.view(torch.uint16).numpy(), tensor.float().numpy()


def on_cache_lines(values: np.ndarray) -> np.ndarray:
    made = aligned(values.shape, values.dtype)
    made[:] = values
    return made


def run(
    bf16: bool, group: int, dim: int, page_size: int, keys: int, junk: float = 0.0, seed: int = 0, kv_heads: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Output of the kernel and of numpy, [kv_heads, group, dim]. Slots behind the last key hold `junk`."""
    random = np.random.default_rng(seed)
    q = np.random.default_rng(seed + 1).standard_normal((kv_heads, 8, dim)).astype(np.float32)[:, :group].copy()
    k_page, k_values = rounded(random.standard_normal((PAGES, 2, dim, page_size)).astype(np.float32), bf16)
    v_page, v_values = rounded(random.standard_normal((PAGES, 2, page_size, dim)).astype(np.float32), bf16)
    pages = random.permutation(PAGES - 1)[: -(-keys // page_size)].astype(np.int32) + 1
    k_rows = k_values[pages].transpose(1, 0, 3, 2).reshape(2, -1, dim)[:kv_heads, :keys].astype(np.float64)
    v_rows = v_values[pages].transpose(1, 0, 2, 3).reshape(2, -1, dim)[:kv_heads, :keys].astype(np.float64)
    used = keys - (len(pages) - 1) * page_size
    k_page, v_page = on_cache_lines(k_page), on_cache_lines(v_page)
    spoilt = rounded(np.full((1,), junk, np.float32), bf16)[0][0]
    k_page[pages[-1], :, :, used:] = spoilt
    v_page[pages[-1], :, used:] = spoilt
    room = attention.scratch_floats(kv_heads * group, dim, keys)
    scratch, out = np.full(room + 64, 7, np.float32), np.empty((kv_heads, group, dim), np.float32)
    addresses = [a.ctypes.data for a in (q, pages, k_page, v_page, scratch, out)]
    attend(
        *(bf16, addresses[0], kv_heads, group, dim, keys, addresses[1], page_size, addresses[2], addresses[3]),
        *(k_page[0].nbytes, addresses[4], addresses[5]),
    )
    assert (scratch[room:] == 7).all()
    scores = q.astype(np.float64) @ k_rows.transpose(0, 2, 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return out, weights @ v_rows / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 31, 100])
def test_against_numpy(bf16: bool, keys: int) -> None:
    out, expected = run(bf16, 3, 64, 16, keys)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize(("dim", "page_size"), [(16, 16), (128, 32), (64, 64)])
def test_groups_and_sizes(group: int, dim: int, page_size: int) -> None:
    out, expected = run(True, group, dim, page_size, 70)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("junk", [np.nan, np.inf, 1e30])
def test_slots_behind_the_last_key_do_not_show(bf16: bool, junk: float) -> None:
    for keys in (1, 6, 21):
        clean, _ = run(bf16, 3, 32, 16, keys)
        out, _ = run(bf16, 3, 32, 16, keys, junk)
        np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize("bf16", [True, False])
def test_a_head_is_the_same_bits_in_every_group_and_beside_other_heads(bf16: bool) -> None:
    eight, _ = run(bf16, 8, 64, 16, 50)
    for group in range(1, 8):
        for kv_heads in (1, 2):
            fewer, _ = run(bf16, group, 64, 16, 50, kv_heads=kv_heads)
            np.testing.assert_array_equal(fewer, eight[:kv_heads, :group])
