"""Rotary frequencies: the plain ones, and each scaling against its definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gpu.models.rope import rope_frequencies, rope_tables

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def plain(head_dim: int, theta: float) -> list[float]:
    return [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]


def llama3_divisor(frequency: float) -> float:
    """What a frequency is divided by, as published with Llama 3.1."""
    wave = 2 * math.pi / frequency
    if wave < 8192 / 4.0:
        return 1.0
    if wave > 8192 / 1.0:
        return 8.0
    smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
    return 1 / ((1 - smooth) / 8.0 + smooth)


def test_plain_frequencies_and_tables() -> None:
    np.testing.assert_allclose(rope_frequencies(64, 1e5, None), plain(64, 1e5), rtol=1e-6)
    np.testing.assert_array_equal(rope_frequencies(64, 1e5, {"rope_type": "default"}), rope_frequencies(64, 1e5, None))
    cosines, sines = rope_tables(64, 100, 1e5, None)
    assert cosines.shape == sines.shape == (100, 32)
    np.testing.assert_allclose(cosines[99], np.cos(99 * np.array(plain(64, 1e5))), atol=1e-4)
    np.testing.assert_allclose(sines[99], np.sin(99 * np.array(plain(64, 1e5))), atol=1e-4)


def test_linear_scaling() -> None:
    scaled = rope_frequencies(64, 1e4, {"rope_type": "linear", "factor": 4.0})
    np.testing.assert_allclose(scaled, np.array(plain(64, 1e4)) / 4, rtol=1e-6)


def test_llama3_scaling_by_its_rule_and_by_its_factors() -> None:
    base = plain(128, 5e5)
    factors = [llama3_divisor(frequency) for frequency in base]
    assert min(factors) == 1.0
    assert max(factors) == 8.0
    assert any(1.0 < factor < 8.0 for factor in factors)
    expected = [frequency / factor for frequency, factor in zip(base, factors, strict=True)]
    np.testing.assert_allclose(rope_frequencies(128, 5e5, LLAMA3), expected, rtol=1e-5)
    np.testing.assert_allclose(
        rope_frequencies(128, 5e5, {"rope_type": "factors", "factors": factors}), expected, rtol=1e-5
    )


def test_other_scalings_are_refused() -> None:
    with pytest.raises(ValueError, match="'yarn' is not supported"):
        rope_frequencies(64, 1e4, {"rope_type": "yarn", "factor": 4.0})
