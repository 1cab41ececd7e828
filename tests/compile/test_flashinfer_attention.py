"""How FlashInfer is called, and when: on a stand-in that records, and against the real signatures where it is there."""

import importlib
import inspect
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from gpu.kernels import flashinfer_attention as fi
from gpu.kernels import plain
from gpu.kernels.step_kernels import Extents
from gpu.kernels.triton_pages import join_pages_kernel
from tests.compile import flashinfer_standin
from tests.compile.fake_driver import active

SHAPE = fi.Shape(16, 8, 128, 16, 4, torch.bfloat16, torch.device("cpu"))


class Own:
    """The project's own attention; remembers what it was asked for."""

    needs_host_lengths = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def plan(self, lengths, rows) -> None:
        self.calls.append("plan")

    def warm(self, *arrays) -> None:
        self.calls.append("warm")

    def begin(self, page_rows, extents) -> None:
        self.calls.append("begin")

    def run(self, q, k_layer, v_layer, page_rows, seqs, positions, extents, out) -> None:
        self.calls.append("run")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> flashinfer_standin.Library:
    """FlashInfer as this process sees it."""
    found = flashinfer_standin.Library()
    monkeypatch.setattr(fi, "load", lambda: (found, ""))
    monkeypatch.setattr(fi, "WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr(fi, "PLAN_BYTES", 1 << 10)
    monkeypatch.setattr(fi, "difference", lambda *_: 0.0)  # the stand-in computes nothing
    return found


def a_pass(rows: int, longest: int = 1) -> dict:
    ints = {"dtype": torch.int32}
    tokens = rows * longest
    q = torch.zeros(tokens, SHAPE.heads, SHAPE.dim, dtype=SHAPE.dtype)
    layer = torch.zeros(9, SHAPE.page_size, SHAPE.kv_heads, SHAPE.dim, dtype=SHAPE.dtype)
    return {
        "q": q,
        "k_layer": layer,
        "v_layer": layer.clone(),
        "page_rows": torch.zeros(rows, SHAPE.pages_per_row, **ints),
        "seqs": torch.zeros(tokens, **ints),
        "positions": torch.zeros(tokens, **ints),
        "extents": Extents(torch.arange(rows + 1, **ints) * longest, torch.ones(rows, **ints), longest),
        "out": torch.empty_like(q),
    }


def test_lengths_stay_on_the_device_where_they_can(library: flashinfer_standin.Library) -> None:
    own = Own()
    attention, reason = fi.choose(own, SHAPE, (9, 0), host_lengths=True)
    assert reason == "FlashInfer 0.6.13, device lengths"
    assert not attention.needs_host_lengths
    given = a_pass(3)
    attention.plan(None, 3)
    attention.begin(given["page_rows"], given["extents"])
    attention.run(**given)
    (call,) = library.decodes
    assert call["seq_lens"] is given["extents"].ends and call["block_tables"] is given["page_rows"]
    assert call["kv_cache"] == (given["k_layer"], given["v_layer"]) and call["out"] is given["out"]
    assert call["max_seq_len"] == 64 and call["bmm1_scale"] == pytest.approx(128**-0.5)
    assert (call["kv_layout"], call["backend"]) == ("NHD", "xqa")
    assert not call["workspace_buffer"].any(), "its semaphores have to start at zero"
    assert own.calls == []


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_passes_of_more_tokens_go_to_the_own_kernels(library: flashinfer_standin.Library, capability) -> None:
    own = Own()
    attention, _ = fi.choose(own, SHAPE, capability, host_lengths=True)
    given = a_pass(2, longest=3)
    attention.plan(None, 2)
    attention.begin(given["page_rows"], given["extents"])
    attention.run(**given)
    attention.warm(*given.values())
    assert own.calls == ["begin", "run", "warm"]
    assert not library.decodes and not library.wrappers


def planned(library: flashinfer_standin.Library) -> fi.PlannedDecode:
    attention, reason = fi.choose(Own(), SHAPE, (8, 0), host_lengths=True)
    assert reason == "FlashInfer 0.6.13, planned (device lengths: no kernel for compute capability 8.0)"
    assert isinstance(attention, fi.PlannedDecode) and attention.needs_host_lengths
    return attention


def test_a_plan_says_the_lengths(library: flashinfer_standin.Library) -> None:
    attention = planned(library)
    attention.plan(np.array([1, 16, 17, 64], np.int32), 6)
    plan = next(plan for wrapper in library.wrappers for plan in wrapper.plans)
    assert plan["lengths"] == [1, 16, 17, 64, 1, 1], "rows of padding have one key"
    assert plan["shape"] == (16, 8, 128, 16, torch.bfloat16, torch.bfloat16)


def test_plans_alternate_in_pinned_memory_and_share_the_device(library: flashinfer_standin.Library) -> None:
    """What a plan is copied from may not be written before it has been copied; what it is copied to is captured."""
    attention = planned(library)
    planners = []
    for step in range(6):
        attention.plan(np.array([step + 1], np.int32), 1)
        planners += [wrapper for wrapper in library.wrappers if len(wrapper.plans) > planners.count(wrapper)]
    assert len(library.wrappers) == fi.PLANS
    assert all(now is not then for then, now in itertools.pairwise(planners))
    first, *others = library.wrappers
    for other in others:
        assert first.workspaces[0] is other.workspaces[0] and first.workspaces[1] is other.workspaces[1] is not None
        for name in ("starts", "pages", "last"):
            assert getattr(first, name) is getattr(other, name)
    for key in ("indptr", "last"):
        places = {plan[key].data_ptr() for wrapper in library.wrappers for plan in wrapper.plans}
        assert len(places) == fi.PLANS


def test_pages_are_laid_out_on_the_device_by_the_plan(library: flashinfer_standin.Library) -> None:
    attention = planned(library)
    given = a_pass(2)
    with active(80) as driver:
        attention.plan(np.array([20], np.int32), 2)
        attention.begin(given["page_rows"], given["extents"])
        attention.run(**given)
    (launch,) = driver.launches
    assert launch.kernel is join_pages_kernel and launch.grid == (2, 1, 1)
    (wrapper,) = (wrapper for wrapper in library.wrappers if wrapper.runs)
    assert wrapper.plans, "the one that planned runs"
    ((q, cache, out),) = wrapper.runs
    assert q is given["q"] and cache == (given["k_layer"], given["v_layer"]) and out is given["out"]
    assert wrapper.starts.tolist() == [0, 2, 3]


def test_numbers_of_rows_have_plans_of_their_own(library: flashinfer_standin.Library) -> None:
    attention = planned(library)
    for rows in (1, 8, 1, 8):
        attention.plan(np.array([5], np.int32), rows)
    assert sorted(len(wrapper.last) for wrapper in library.wrappers) == [1] * fi.PLANS + [8] * fi.PLANS


@pytest.mark.parametrize("lengths", [[1, 1, 1], [0], [65]])
def test_impossible_lengths_are_refused(library: flashinfer_standin.Library, lengths) -> None:
    with pytest.raises(ValueError, match="lengths"):
        planned(library).plan(np.array(lengths, np.int32), 2)


def test_a_pass_that_is_not_planned_is_done_by_the_own_kernels(library: flashinfer_standin.Library) -> None:
    """A step with chunks may have one token a row as well, in numbers of rows that nobody has planned for."""
    attention = planned(library)
    given = a_pass(2)
    attention.plan(np.array([5, 6], np.int32), 2)
    attention.plan(None, 2)
    attention.begin(given["page_rows"], given["extents"])
    attention.run(**given)
    assert attention._own.calls == ["begin", "run"]  # type: ignore[attr-defined]
    assert not any(wrapper.runs for wrapper in library.wrappers)


@pytest.mark.parametrize(
    ("found", "says"), [(0.2, "differs from the own kernels by 0.2"), (float("nan"), "by nan"), (None, "no compiler")]
)
def test_what_fails_or_differs_is_not_taken(
    library: flashinfer_standin.Library, monkeypatch: pytest.MonkeyPatch, found, says: str
) -> None:
    def difference(attention, own, shape) -> float:
        if not isinstance(attention, fi.DeviceLengths):
            return 0.0
        if found is None:
            raise RuntimeError("no compiler")
        return found

    monkeypatch.setattr(fi, "difference", difference)
    attention, reason = fi.choose(Own(), SHAPE, (9, 0), host_lengths=True)
    assert isinstance(attention, fi.PlannedDecode) and says in reason
    monkeypatch.setattr(fi, "difference", lambda *_: 1.0)
    own = Own()
    assert fi.choose(own, SHAPE, (9, 0), host_lengths=True).attention is own


class Torch(Own):
    """Attention in a few lines of torch, wrong by `off` for rows of more than a page."""

    def __init__(self, off: float = 0.0) -> None:
        super().__init__()
        self.off = off

    def run(self, q, k_layer, v_layer, page_rows, seqs, positions, extents, out) -> None:
        plain.attention(q, k_layer, v_layer, page_rows, seqs, positions, extents, out)
        out[positions >= SHAPE.page_size] += self.off


def test_the_difference_is_that_of_every_row() -> None:
    assert fi.difference(Torch(), Torch(), SHAPE) == 0
    assert fi.difference(Torch(0.25), Torch(), SHAPE) == pytest.approx(0.25, abs=0.01)
    assert fi.difference(Torch(float("nan")), Torch(), SHAPE) != 0


@pytest.mark.parametrize(
    ("shape", "capability", "host_lengths", "says"),
    [
        (replace(SHAPE, dtype=torch.float32), (9, 0), True, "float32 is not supported"),
        (replace(SHAPE, dim=96), (9, 0), True, "heads of 96 dims"),
        (SHAPE, (7, 5), True, "compute capability 7.5"),
        (SHAPE, (8, 0), False, "lengths do not reach the CPU"),
        (replace(SHAPE, heads=56), (8, 0), True, "56 query heads over 8"),
    ],
)
def test_own_kernels_where_flashinfer_cannot(library, shape, capability, host_lengths, says) -> None:
    own = Own()
    attention, reason = fi.choose(own, shape, capability, host_lengths=host_lengths)
    assert attention is own
    assert reason.startswith("own Triton kernels") and says in reason


def test_pages_of_another_size_are_planned(library: flashinfer_standin.Library) -> None:
    attention, reason = fi.choose(Own(), replace(SHAPE, page_size=8), (9, 0), host_lengths=True)
    assert isinstance(attention, fi.PlannedDecode)
    assert "pages of 8 tokens" in reason


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    there: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in there else None)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fi.choose(Own(), SHAPE, (9, 0), host_lengths=True).reason == (
        "own Triton kernels: FlashInfer is not installed (extra [cuda])"
    )
    there.add("flashinfer")
    assert "no nvcc" in fi.load()[1]
    there.add("flashinfer_jit_cache")
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(OSError("libcuda")))
    assert fi.load() == (None, "FlashInfer cannot be imported: libcuda")


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_the_stand_in_takes_what_flashinfer_takes() -> None:
    real = importlib.import_module("flashinfer.decode")
    wrapper, mine = real.BatchDecodeWithPagedKVCacheWrapper, flashinfer_standin.Wrapper
    pairs = [
        (getattr(wrapper, name), getattr(mine, name)) for name in ("__init__", "plan", "run", "reset_workspace_buffer")
    ]
    pairs.append((real.trtllm_batch_decode_with_kv_cache, flashinfer_standin.Library._decode))
    for theirs, ours in pairs:
        known = inspect.signature(theirs).parameters
        for name, parameter in inspect.signature(ours).parameters.items():
            if name == "self":
                continue
            assert name in known
            assert parameter.default in {inspect.Parameter.empty, known[name].default}
