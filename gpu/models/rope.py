"""Tables of rotary position embeddings (Su et al., "RoFormer"), with the scalings that Llama models use.

Owns which frequencies a model rotates by; never touches activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


def rope_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> Float32:
    """Radians per position of each pair of dims: float32 [head_dim/2].

    `scaling` is None or a rope_scaling as shm.config.ModelInfo has it: "default", "linear" (factor), "llama3", or
    "factors" (factors: a divisor of each frequency, as GGUF files of Llama 3 carry them). Raises ValueError for
    others.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain: Float32 = (np.float32(1) / np.power(np.float32(theta), exponents)).astype(np.float32)
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    if scaling is None or kind in (None, "default"):
        return plain
    if kind in ("linear", "factors"):
        divisors: Float32 = np.asarray(scaling["factor" if kind == "linear" else "factors"], dtype=np.float32)
        return plain / divisors
    if kind != "llama3":
        raise ValueError(f"rope_scaling of type {kind!r} is not supported")
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(scaling["original_max_position_embeddings"])
    waves = 2 * math.pi / plain.astype(np.float64)
    share = np.clip((context / waves - low) / (high - low), 0, 1)  # 1: keep, 0: divide by the factor
    return ((1 - share) * plain / factor + share * plain).astype(np.float32)


def rope_tables(
    head_dim: int, positions: int, theta: float, scaling: Mapping[str, Any] | None
) -> tuple[Float32, Float32]:
    """Cosines and sines: float32 [positions, head_dim/2] each."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * rope_frequencies(head_dim, theta, scaling)
    return np.cos(angles.astype(np.float64)).astype(np.float32), np.sin(angles.astype(np.float64)).astype(np.float32)
