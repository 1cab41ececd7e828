"""The part of the check that compiles: every specified variant of every Triton kernel, for the GPU that is there.

Owns a pool of processes, one for each CPU. What they compile stays in Triton's cache on disk, where the parts that
follow find it. Each variant goes Triton's own way to a launch, up to the launch itself, so that it gets the key under
which a launch looks for it; the keys of `gpu.kernels.triton_compile` are those of one version of Triton only. On the
host, where there is no GPU to compile for, one small kernel is compiled for Hopper.
"""

import functools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tools.gpu_check import Options
from tools.gpu_check_part import Figures, run

PROCESSES_MAX = 16
SMALL = "join_pages_kernel"
HOPPER = 90
DTYPES = {"*bf16": "bfloat16", "*fp32": "float32", "*i32": "int32", "*i64": "int64"}
INTEGERS = {"i32": 16, "i64": 1 << 40}  # a multiple of 16 of each type
REAL = 0.5


@functools.cache
def specs() -> list[Any]:
    """The `KernelSpec`s of all kernels, in the order in which every process has them."""
    from gpu.kernels.triton_spec import collect_specs

    return collect_specs()


def names() -> list[str]:
    """What the variants are called, for a process that does not want to import Triton."""
    return [spec.name for spec in specs()]


def prepare(place: int, device: str) -> float:
    """Compile the variant at `place` of `specs`; returns seconds."""
    spec = specs()[place]
    begin_s = time.monotonic()
    if device == "cuda":
        warm(spec)
    else:
        from gpu.kernels.triton_compile import compile_spec

        compile_spec(spec, HOPPER)
    return time.monotonic() - begin_s


def warm(spec: Any) -> None:
    """Compile a variant for the GPU of Triton's active driver, as a launch of it would."""
    arguments = {name: argument(kind, name in spec.aligned) for name, kind in spec.signature.items()}
    spec.kernel.warmup(**arguments, **spec.constants, **spec.options, grid=(1,))


def argument(kind: str, is_aligned: bool) -> Any:
    """Some argument that Triton takes for one of type `kind`, and for a multiple of 16 only if it is to be."""
    import torch

    if kind in DTYPES:
        memory = torch.empty(8, dtype=getattr(torch, DTYPES[kind]))  # the launch alone would ask where it lies
        return memory if is_aligned else memory[1:]
    return INTEGERS[kind] + (not is_aligned) if kind in INTEGERS else REAL


def compile_all(options: Options, figures: Figures) -> None:
    """All variants at once, so that one that does not compile hides no other."""
    on_gpu = options.device == "cuda"
    processes = min(os.cpu_count() or 1, PROCESSES_MAX) if on_gpu else 1
    took: dict[str, float] = {}
    failed: list[str] = []
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        known = pool.submit(names).result()
        places = [place for place, name in enumerate(known) if on_gpu or name.startswith(SMALL)]
        jobs = {place: pool.submit(prepare, place, options.device) for place in places}
        for place, job in jobs.items():
            try:
                took[known[place]] = job.result()
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises
                failed.append(known[place])
                figures.add(f"failed: {known[place]}", repr(error)[-500:])
    figures.add("variants", len(took))
    figures.add("seconds of all processes", round(sum(took.values()), 1))
    if took:
        slowest = max(took, key=took.__getitem__)
        figures.add("slowest", f"{slowest}: {took[slowest]:.1f} s")
    assert not failed, f"do not compile: {', '.join(failed)}"


if __name__ == "__main__":
    run({"compile": compile_all})
