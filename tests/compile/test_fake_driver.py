"""The fake driver: the real launch path runs on it, and what a GPU would refuse or get wrong is refused."""

import pytest
import torch
import triton

from gpu.kernels.triton_compile import TARGETS
from tests.compile.fake_driver import LaunchError, active
from tests.compile.small_kernels import product, product_kernel, shift, shift_kernel

X = torch.zeros(256, dtype=torch.bfloat16)


def run_shift(x=X, out=X, count=32, offset=7, grid=(2,), **options) -> None:
    shift_kernel[grid](x, out, count, offset, 0.5, BLOCK=128, **options)


@pytest.mark.parametrize("capability", TARGETS)
def test_a_launch_is_recorded_as_it_was_specialised(capability: int) -> None:
    with active(capability, shift_kernel) as driver:
        driver.stream = 5
        run_shift()
        run_shift(x=X[1:], count=33, num_warps=2)
        run_shift(count=1)
    plain, unaligned, one = driver.launches
    assert (plain.grid, plain.stream) == ((2, 1, 1), 5)
    assert plain.is_variant_of(shift())
    assert unaligned.is_variant_of(shift(aligned=("out",), num_warps=2))
    assert not unaligned.is_variant_of(shift(num_warps=2)), "alignment tells variants apart"
    assert not unaligned.is_variant_of(shift(aligned=("out",))), "warps tell variants apart"
    assert not plain.is_variant_of(shift(types=("*bf16", "*fp32"))), "types tell variants apart"
    assert one.constants == {"count": 1, "BLOCK": 128}, "Triton makes a constant of an integer 1"


def test_a_second_launch_compiles_nothing() -> None:
    with active(90, shift_kernel) as driver:
        run_shift()
        run_shift(offset=9)
        assert len(shift_kernel.device_caches[0][0]) == 1
        assert len(driver.launches) == 2


def test_a_grid_without_programs_compiles_and_launches_nothing() -> None:
    with active(90, shift_kernel) as driver:
        run_shift(grid=(0,))
        assert len(shift_kernel.device_caches[0][0]) == 1
    assert not driver.launches


def test_targets_do_not_share_compiled_code() -> None:
    targets = []
    for capability in (80, 90):
        with active(capability, shift_kernel):
            run_shift()
            targets += [compiled.metadata.target.arch for compiled in shift_kernel.device_caches[0][0].values()]
    assert targets == [80, 90]


@pytest.mark.parametrize("grid", [(-1,), (1, 65536), (1, 1, 65536), (2**31,), (1.0,)])
def test_a_grid_that_cuda_refuses(grid) -> None:
    with active(90, shift_kernel), pytest.raises(LaunchError, match="grid"):
        run_shift(grid=grid)


def test_alignment_is_checked_at_every_launch() -> None:
    """Triton itself looks at it only to choose the variant: so a wrong variant has to be put in its place."""
    with active(90, shift_kernel):
        run_shift()
        (compiled,) = shift_kernel.device_caches[0][0].values()
        for arguments in ((X[1:], X, 32), (X, X, 33)):
            with pytest.raises(LaunchError, match="multiple of 16"):
                compiled[(1, 1, 1)](*arguments, 7, 0.5, 128)


@pytest.mark.parametrize(
    "arguments",
    [
        (X.float(), X, 32, 7, 0.5, 128),
        (X, 3, 32, 7, 0.5, 128),
        (X, X, 2**31, 7, 0.5, 128),
        (X, X, 32, -(2**31) - 1, 0.5, 128),
        (X, X, 32, 7, "0.5", 128),
        (X, X, 32, 7, 0.5),
    ],
)
def test_an_argument_that_the_code_was_not_compiled_for(arguments) -> None:
    with active(90, shift_kernel):
        run_shift()
        (compiled,) = shift_kernel.device_caches[0][0].values()
        with pytest.raises(LaunchError):
            compiled[(1, 1, 1)](*arguments)


def launch_product(m: int, n: int, k: int, **options) -> None:
    a, b, out = torch.zeros(m, k), torch.zeros(k, n), torch.zeros(m, n)
    product_kernel[(1,)](a.bfloat16(), b.bfloat16(), out.bfloat16(), 16, M=m, N=n, K=k, **options)


@pytest.mark.parametrize("capability", TARGETS)
def test_a_tile_that_does_not_fit_is_refused(capability: int) -> None:
    with active(capability, product_kernel), pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        launch_product(128, 128, 256, num_stages=4, num_warps=8)


def test_code_that_spills_is_refused() -> None:
    with active(90, product_kernel), pytest.raises(LaunchError, match="spills"):
        launch_product(32, 128, 32, maxnreg=48)


def test_a_kernel_that_is_not_given_cannot_keep_code_of_another_gpu() -> None:
    with active(90, product_kernel) as driver:
        launch_product(64, 64, 64)
        assert driver.launches[0].constants == dict(product(64, 64, 64).constants)
    assert not product_kernel.device_caches
