"""Every Triton kernel compiles for every supported GPU, within its limits and without spills; no GPU is needed.

Here one variant of each kernel for each set of types and for Hopper; `make check-cuda` takes all variants for all
targets, which are minutes of work. What is launched at the call sites is measured for all targets in `test_launches`.
"""

import multiprocessing
import os
import re
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

from gpu.kernels import triton_compile, triton_spec
from gpu.kernels.triton_compile import SHARED_BYTES, TARGETS, Usage, compile_spec, cuda_tool, measure, usage_of
from gpu.kernels.triton_spec import KernelSpec
from tests.compile.small_kernels import product, shift, shift_kernel

SPECS = triton_spec.collect_specs()
MODULES = triton_spec.kernel_modules()
ALL_VARIANTS = os.environ.get("STEPAHEAD_ALL_VARIANTS") == "1"


def chosen() -> list[int]:
    """Places of the specs that are compiled."""
    if ALL_VARIANTS:
        return list(range(len(SPECS)))
    first: dict[tuple[str, tuple[str, ...]], int] = {}
    for place, spec in enumerate(SPECS):
        first.setdefault((spec.kernel.__name__, tuple(sorted(set(spec.signature.values())))), place)
    return list(first.values())


VARIANTS = [pytest.param(place, id=f"{place}-{SPECS[place].name}") for place in chosen()]


@pytest.fixture(scope="module")
def usages(request: pytest.FixtureRequest, shared_cache: None):
    """What every kernel takes that this run asks for, by place of its spec and target; two processes compile."""
    wanted = [
        item.callspec.params for item in request.session.items if item.fspath == __file__ and hasattr(item, "callspec")
    ]
    jobs = [(params["place"], params["capability"]) for params in wanted if "place" in params]
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found: dict[tuple[int, int], Future[Usage]] = {job: pool.submit(measure, *job) for job in jobs}
        yield found
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("capability", TARGETS if ALL_VARIANTS else (90,))
@pytest.mark.parametrize("place", VARIANTS)
def test_kernel_fits(usages, place: int, capability: int) -> None:
    assert usages[place, capability].result().excesses(capability) == []


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_has_a_spec(module: str) -> None:
    kernels = triton_spec.kernels_of(MODULES[module])
    assert kernels, "a module without kernels is no triton_* module"
    assert {spec.kernel.__name__ for spec in getattr(MODULES[module], "SPECS", ())} == set(kernels)


def test_a_kernel_without_a_spec_is_seen() -> None:
    from tests.compile import small_kernels

    assert set(triton_spec.kernels_of(small_kernels)) == {"shift_kernel", "product_kernel"}


def test_specs_differ() -> None:
    assert len(
        {(spec.kernel, *map(str, (spec.signature, spec.constants, spec.aligned, spec.options))) for spec in SPECS}
    ) == len(SPECS)


@pytest.mark.parametrize("capability", TARGETS)
def test_code_is_for_the_target(capability: int) -> None:
    compiled = compile_spec(shift(), capability)
    assert re.search(rf"\.target sm_{capability}a?\b", compiled.asm["ptx"])
    assert f"sm_{capability}" in cuda_tool("cuobjdump", compiled.asm["cubin"], "--dump-elf")
    assert usage_of(compiled).excesses(capability) == []


@pytest.mark.parametrize("capability", TARGETS)
def test_forced_spills_are_seen(capability: int) -> None:
    """Control; also holds the instructions that are counted against the disassembler."""
    compiled = compile_spec(product(32, 128, 32, maxnreg=48), capability)
    usage = usage_of(compiled)
    assert usage.stack > 0 and usage.spills > 0
    assert any("spills" in sentence for sentence in usage.excesses(capability))
    listing = cuda_tool("nvdisasm", compiled.asm["cubin"], "-c")
    assert usage.spills == len(re.findall(r"\b(?:LDL|STL)\b", listing))
    fitting = compile_spec(product(32, 64, 64), capability)
    assert usage_of(fitting).spills == 0
    assert not re.search(r"\b(?:LDL|STL)\b", cuda_tool("nvdisasm", fitting.asm["cubin"], "-c"))


@pytest.mark.parametrize("capability", TARGETS)
def test_an_over_large_tile_is_seen(capability: int) -> None:
    usage = usage_of(compile_spec(product(128, 128, 256, num_stages=4, num_warps=8), capability))
    assert usage.shared > SHARED_BYTES[capability]
    assert any("shared memory" in sentence for sentence in usage.excesses(capability))


def test_too_many_threads_and_registers_are_seen() -> None:
    assert Usage(128, 0, 0, 0, 0, 512).excesses(80) == []
    assert "registers" in Usage(129, 0, 0, 0, 0, 512).excesses(80)[0]
    assert "registers" in Usage(256, 0, 0, 0, 0, 32).excesses(80)[0]
    assert "threads" in Usage(16, 0, 0, 0, 0, 2048).excesses(80)[0]


def spec_with(**changes: object) -> KernelSpec:
    fields = {name: getattr(shift(), name) for name in ("kernel", "signature", "constants", "aligned", "options")}
    return KernelSpec(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (spec_with(constants={}), "the kernel takes"),
        (spec_with(constants={"BLOCK": 128, "x": 1}), "the kernel takes"),
        (spec_with(aligned=("y",)), "cannot be aligned|no arguments"),
        (spec_with(aligned=("offset",)), "never specialises"),
    ],
)
def test_a_spec_that_does_not_fit_its_kernel_is_refused(spec: KernelSpec, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        triton_compile.source_of(spec)


def test_specs_name_their_variant() -> None:
    assert shift().name == "shift_kernel-bf16-BLOCK=128"
    assert shift().kernel is shift_kernel
