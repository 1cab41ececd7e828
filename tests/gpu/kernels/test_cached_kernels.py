"""Kernels that different processes compiled, loaded into one: each must stay what it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpu.kernels import attention, gemm, packing
from gpu.models import passes

ROOT = Path(__file__).parents[3]
COMPILE = "from gpu.kernels import packing; packing.PACK['{0}'].compile()"
# Packs one matrix in all three precisions, and looks at what the bytes mean.
CHECK = """
import numpy as np
from gpu.kernels import packing
from gpu.kernels.team import Team, aligned
matrix = np.full((16, 16), 0.5, np.float32)
team = Team(1)
for precision, size in (("int8", 1), ("bfloat16", 2), ("float32", 4)):
    panels, scales = aligned((256 * size,), np.uint8), aligned((16,), np.float32)
    packing.Packer(team, precision, 16).pack(matrix, panels, scales)
    first = {"int8": np.int8, "bfloat16": np.uint16, "float32": np.float32}[precision]
    print(precision, panels.view(first)[0], len(set(panels.view(first).tolist())))
"""


def python(code: str, cache: Path) -> str:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_of_one_source_from_different_processes_do_not_mix(tmp_path: Path) -> None:
    for precision in gemm.WEIGHT_BYTES:
        python(COMPILE.format(precision), tmp_path)
    assert python(CHECK, tmp_path).split("\n")[:3] == ["int8 127 1", "bfloat16 16128 1", "float32 0.5 1"]


@pytest.mark.parametrize(
    "made",
    [
        [packing._pack_int8, packing._pack_bfloat16, packing._pack_float32],
        [passes._pass_int8, passes._pass_bfloat16, passes._pass_float32],
        list(gemm.ROWS_BY_PANEL.values()),
        [attention.attend_bfloat16, attention.attend_float32],
    ],
)
def test_closures_of_one_source_have_names_of_their_own(made: list) -> None:
    names = [kernel.py_func.__qualname__ for kernel in made]
    assert len(set(names)) == len(names)
    assert np.all(["_" in name for name in names])
