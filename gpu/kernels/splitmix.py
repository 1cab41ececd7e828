"""SplitMix64's finaliser for native code: every bit of what comes out depends on every bit of what goes in.

Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.kernels.native import kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # odd, and near 2**64 divided by the golden ratio: steps between states
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@kernel
def mix(z: Any) -> Any:
    """uint64 to uint64, one to one."""
    z = (z ^ (z >> np.uint64(30))) * MIX_1
    z = (z ^ (z >> np.uint64(27))) * MIX_2
    return z ^ (z >> np.uint64(31))
