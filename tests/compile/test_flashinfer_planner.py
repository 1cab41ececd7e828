"""FlashInfer's own decode module, compiled for Hopper, and its planner, run on the CPU; needs no GPU.

`make check-cuda` installs what this needs: FlashInfer, nvcc, and a stand-in for the CUDA runtime that records.
"""

import contextlib
import ctypes
import itertools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpu.kernels import flashinfer_attention as fi
from gpu.kernels.step_kernels import Extents
from gpu.kernels.triton_compile import cuda_tool
from tests.compile.fake_driver import active

pytestmark = pytest.mark.skipif("STEPAHEAD_FAKE_CUDART" not in os.environ, reason="run by `make check-cuda`")

SHAPE = fi.Shape(32, 8, 128, 16, 256, torch.bfloat16, torch.device("cpu"))
ROWS = 8
# Where FlashInfer's plan says that it put what. In front: the rows of work that the launch has, padding included.
REQUESTS, TILES, VALID, CHUNK = 3, 4, 6, 7


class Runtime:
    """What the stand-in for the CUDA runtime has recorded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["STEPAHEAD_FAKE_CUDART"], ctypes.RTLD_GLOBAL)
        for name in ("fake_copy", "fake_launch"):
            getattr(self._library, name).restype = ctypes.POINTER(ctypes.c_uint64)

    def reset(self) -> None:
        self._library.fake_reset()

    def copies(self) -> list[tuple[int, ...]]:
        """Destination, source and bytes of each."""
        return [tuple(self._library.fake_copy(i)[:3]) for i in range(self._library.fake_copied())]

    def launches(self) -> list[tuple[int, ...]]:
        """Grid, block and shared memory of each."""
        return [tuple(self._library.fake_launch(i)[:7]) for i in range(self._library.fake_launched())]


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture(scope="module")
def library(runtime: Runtime) -> Any:
    """FlashInfer, where tensors of the CPU pass for those of a GPU."""
    flashinfer, missing = fi.load()
    assert not missing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", not_pinned(torch.empty))
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(flashinfer.decode, "device_support_pdl", lambda device: False)
        patch.setattr(flashinfer.decode, "get_device_sm_count", lambda device: 132)
        patch.setattr(sys.modules["flashinfer.xqa"], "get_compute_capability", lambda device: (9, 0))
        yield flashinfer


def not_pinned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.empty, where no memory can be pinned."""

    def made(*size: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return empty(*size, **named)

    return made


def compile_module(spec: Any) -> None:
    """Compile a module, see that it is for Hopper, and say how long that took."""
    began = time.monotonic()
    spec.build(verbose=False)
    (built,) = spec.build_dir.rglob("*.so")
    assert ".sm_90a.cubin" in cuda_tool("cuobjdump", built.read_bytes(), "--list-elf")
    print(f"\n{spec.name}: {time.monotonic() - began:.0f} s, {built.stat().st_size / 1e6:.2f} MB")


def test_the_decode_module_compiles(library: Any) -> None:
    from flashinfer.jit.attention import modules

    kinds = (SHAPE.dtype,) * 3
    compile_module(modules.gen_batch_decode_module(*kinds, torch.int32, SHAPE.dim, SHAPE.dim, 0, False, False))


@pytest.mark.parametrize(("group", "dim"), [(SHAPE.heads // SHAPE.kv_heads, SHAPE.dim), (3, 64)], ids=["8B", "135M"])
def test_the_module_for_lengths_on_the_device_compiles(library: Any, group: int, dim: int) -> None:
    from flashinfer.jit.xqa import gen_xqa_module

    compile_module(gen_xqa_module(SHAPE.dtype, SHAPE.dtype, SHAPE.page_size, dim, group, False, SHAPE.dtype))


def random_lengths(rng: np.random.Generator, live: int) -> np.ndarray:
    longest = int(rng.choice([40, SHAPE.page_size * SHAPE.pages_per_row]))
    return rng.integers(1, longest + 1, live).astype(np.int32)


def run(attention: fi.PlannedDecode | fi.DeviceLengths, rows: int) -> None:
    """One pass of a layer."""
    q = torch.zeros(rows, SHAPE.heads, SHAPE.dim, dtype=SHAPE.dtype)
    layer = torch.zeros(9, SHAPE.page_size, SHAPE.kv_heads, SHAPE.dim, dtype=SHAPE.dtype)
    ints = torch.zeros(rows, SHAPE.pages_per_row, dtype=torch.int32)
    ends = torch.ones(rows, dtype=torch.int32)
    extents = Extents(ends, ends, 1)
    with active(90):
        attention.begin(ints, extents)
    attention.run(q, layer, layer.clone(), ints, ends, ends, extents, torch.zeros_like(q))


def test_lengths_on_the_device_are_launched_without_a_plan(library: Any, runtime: Runtime) -> None:
    attention = fi.DeviceLengths(library, SHAPE, own=None)  # type: ignore[arg-type]
    runtime.reset()
    run(attention, ROWS)
    (launch,) = runtime.launches()
    assert launch[1:3] == (SHAPE.kv_heads, ROWS)
    assert runtime.copies() == []


def work_of(attention: fi.PlannedDecode, info: list[int], rows: int) -> dict[int, list[int]]:
    """Which pieces of each row's pages the plan hands out, and how many pages each has."""
    padded = info[0]
    plan = attention._target.numpy()

    def array(which: int, kind: type, count: int) -> np.ndarray:
        return plan[info[which] :].view(np.uint8)[: count * np.dtype(kind).itemsize].view(kind)

    valid = array(VALID, np.bool_, padded)
    requests, tiles = array(REQUESTS, np.int32, padded)[valid], array(TILES, np.int32, padded)[valid]
    return {row: sorted(tiles[requests == row].tolist()) for row in range(rows)}


def test_one_captured_launch_serves_all_lengths(library: Any, runtime: Runtime) -> None:
    """In four respects that a captured graph depends on, whatever the lengths and whichever wrapper planned."""
    attention = fi.PlannedDecode(library, SHAPE, own=None)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    infos, launches, sources, times = set(), set(), [], []
    for _ in range(60):
        lengths = random_lengths(rng, int(rng.integers(0, ROWS + 1)))
        runtime.reset()
        began = time.perf_counter()
        attention.plan(lengths, ROWS)
        times.append(time.perf_counter() - began)
        ((to, source, _),) = runtime.copies()
        assert to == attention._target.data_ptr(), "a plan goes to the memory that the captured launch reads"
        sources.append(source)
        info = [int(word) for word in attention._wrappers[ROWS].wrapper._plan_info]
        infos.add(tuple(info))
        work = work_of(attention, info, ROWS)
        chunk = int(attention._target.numpy()[info[CHUNK] :][:4].view(np.int32)[0])
        padded = np.ones(ROWS, np.int64)
        padded[: len(lengths)] = lengths
        for row, length in enumerate(padded):
            assert work[row] == list(range(-(-int(length) // chunk))), "every key once"
        runtime.reset()
        run(attention, ROWS)
        launches.add(tuple(runtime.launches()))
    assert len(infos) == 1, "the layout of a plan is part of the launch"
    assert len(launches) == 1 and len(next(iter(launches))) > 0
    assert len(set(sources)) == fi.PLANS
    assert all(now != then for then, now in itertools.pairwise(sources)), "pinned buffers take turns"
    print(f"\nplan: {sorted(times)[len(times) // 2] * 1e6:.0f} us; launch {next(iter(launches))}")
