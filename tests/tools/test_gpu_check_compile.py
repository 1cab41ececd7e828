"""What the GPU check compiles ahead is what a launch looks for; on a fake driver, as there is no GPU here."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled", allow_module_level=True)

import triton

from gpu.kernels import triton_pages
from gpu.kernels.triton_compile import source_of
from tests.compile.fake_driver import active
from tools.gpu_check_compile import specs, warm


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def test_a_launch_finds_what_was_compiled_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **also: found.append(cache_hit))
    with active(90) as driver:
        warm(triton_pages.SPECS[0])
        assert found == [False] and not driver.launches
    with active(90):  # another process, as far as Triton can tell
        triton_pages.join_pages(ints(1, 8), ints(2), ints(8))
        assert found == [False, True]
        triton_pages.join_pages_kernel[(1,)](ints(1, 8), ints(2), ints(8)[1:], 8, BLOCK=triton_pages.BLOCK, num_warps=1)
    assert found == [False, True, False], "another variant is compiled anew"


def test_every_variant_is_compiled_as_specified(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def note(*, compile, **also) -> bool:
        attributes = {path: marks for path, marks in compile["configs"][0].items() if marks}
        seen.append((compile["signature"], compile["constants"], attributes))
        return True  # and nothing is compiled

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", note)
    with active(90):
        for spec in specs():
            warm(spec)
    assert len(seen) == len(specs())
    for spec, variant in zip(specs(), seen, strict=True):
        source = source_of(spec)
        wanted = {path: marks for path, marks in source.attrs.items() if marks}
        assert variant == (source.signature, source.constants, wanted), spec.name
