"""The passes of trained drafters on CUDA, in Triton's interpreter: against the same in torch, as they were trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.kernels.step_kernels import Extents
from gpu.models.cuda_drafters import CudaDflash, CudaMtp
from gpu.models.cuda_llama import CudaLlama
from gpu.models.llama import HostLlama
from gpu.models.weights import open_weights
from procs.model_info import read_model_info
from shm.drafter_file import DrafterFile
from shm.tensor_map import ModelError
from tests.gpu.models.small_drafters import Trained, answers_of, trained
from tests.interpret.access import trace
from tests.interpret.quick import quick_calls  # noqa: F401 - for all tests here
from tests.model_factory import TinyLlama, TinyQwen3

LENGTH, DRAFTS = 20, 3
TAPS = (1, 0)
SIZES = {"page_size": 16, "pages": 8, "pages_per_row": 2, "max_tokens": LENGTH, "max_seqs": 4}
# Largest difference, relative to the largest number.
TOLERANCES = [("float32", 3e-5), ("bfloat16", 0.05)]


@pytest.fixture(scope="module", params=[TinyLlama, TinyQwen3], ids=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    request.param().write_hf(made)
    return made


@pytest.fixture(scope="module")
def mtp(folder: Path) -> Trained:
    return trained(folder, "mtp", TAPS)


@pytest.fixture(scope="module")
def dflash(folder: Path) -> Trained:
    return trained(folder, "dflash", TAPS)


def target_of(folder: Path, dtype: str = "float32", taps: tuple[int, ...] = TAPS) -> CudaLlama:
    info = read_model_info(folder)
    return CudaLlama(info, open_weights(info), dtype, **SIZES, device="cpu", taps=taps)


def opened(kind: Any, folder: Path, file: Path, dtype: str = "float32") -> Any:
    """A drafter whose cache holds NaN wherever no pass has written."""
    made = kind(target_of(folder, dtype), DrafterFile(file))
    made.k_cache.fill_(float("nan"))
    made.v_cache.fill_(float("nan"))
    return made


def ints(values: Any) -> Any:
    return torch.tensor(np.array(values), dtype=torch.int32)


PAGES = ints([[3, 5]])


def places(first: int, end: int) -> tuple[Any, Any]:
    """Positions of one row and its sequence, and what they extend to."""
    count = end - first
    return (ints(range(first, end)), ints([0] * count), PAGES), Extents(ints([0, count]), ints([end]), count)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_mtp_goes_on_as_in_torch(folder: Path, mtp: Trained, dtype: str, tolerance: float) -> None:
    """All places in two pieces, then from the last one on by its own state."""
    drafter = opened(CudaMtp, folder, mtp.file, dtype)
    begin = LENGTH - 2 - DRAFTS
    answers = answers_of(mtp.info.hidden_size, len(TAPS), LENGTH, begin)
    with torch.no_grad():
        states = [state[0, 0] for state in mtp.model.states(answers, DRAFTS)]
        wanted = [mtp.model.logits(state) for state in states]
    logits, none = torch.zeros(1, len(drafter.vocabulary)), torch.zeros(0, len(drafter.vocabulary))
    behind = answers.tokens[0, 1:].int()
    for first, end in ((0, 6), (6, begin + 1)):
        passed, extents = places(first, end)
        given = answers.states[0, first:end].contiguous()
        drafter.learn(given, behind[first:end], *passed, ints([]), none, extents)
    joined = drafter.residual[begin - 6].float()[None, None].clone()
    passed, extents = places(begin, begin + 1)
    drafter.begin(joined, ints([0]), *passed, ints([0]), logits, extents)
    near(drafter.residual[0], states[0], tolerance)
    near(logits[0], wanted[0], tolerance)
    state = drafter.residual[0].float().clone()
    for number in range(1, DRAFTS):
        place = begin + number
        passed, extents = places(place, place + 1)
        drafter.draft(state[None, None], behind[place : place + 1], *passed, ints([0]), logits, extents)
        state = drafter.residual[0].float().clone()
        near(state, states[number], tolerance)
        near(logits[0], wanted[number], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_dflash_fills_a_block_as_in_torch(folder: Path, dflash: Trained, dtype: str, tolerance: float) -> None:
    """States of a text in two pieces, then a block behind it, whose first token sees its last."""
    drafter = opened(CudaDflash, folder, dflash.file, dtype)
    begin, window = LENGTH - 2 - DRAFTS, 1 + DRAFTS
    answers = answers_of(dflash.info.hidden_size, len(TAPS), LENGTH, begin)
    with torch.no_grad():
        states = [state[0, 0] for state in dflash.model.states(answers, DRAFTS)]
        wanted = [dflash.model.logits(state) for state in states]
    none = torch.zeros(0, len(drafter.vocabulary))
    for first, end in ((0, 6), (6, begin + 1)):
        passed, extents = places(first, end)
        given = answers.states[0, first:end].contiguous()
        drafter.know(given, passed[0], *passed, ints([]), none, extents)
    before = drafter.residual[begin - 6].float().expand(window, 1, -1).contiguous()
    blocks = ints([int(answers.tokens[0, begin + 1]), *range(drafter.mask, drafter.mask + DRAFTS)])
    passed, extents = places(begin + 1, begin + 1 + window)
    logits, last = torch.zeros(DRAFTS, len(drafter.vocabulary)), ints([begin + window] * window)
    drafter.draft(before, last, blocks, *passed, ints(range(1, window)), logits, extents)
    for number in range(DRAFTS):
        near(drafter.residual[1 + number], states[number], tolerance)
        near(logits[number], wanted[number], tolerance)
    causal = torch.zeros_like(logits)
    drafter.draft(before, passed[0], blocks, *passed, ints(range(1, window)), causal, extents)
    if dtype == "float32":
        assert far(causal[0], wanted[0]) > 30 * tolerance, "what lies behind counts"


def near(found: Any, wanted: Any, tolerance: float) -> None:
    assert far(found, wanted) <= tolerance


def far(found: Any, wanted: Any) -> float:
    return float((found.float() - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


def test_states_alone_write_keys_and_values_and_nothing_else(folder: Path, dflash: Trained) -> None:
    drafter = opened(CudaDflash, folder, dflash.file)
    states, (passed, extents) = torch.randn(5, len(TAPS), dflash.info.hidden_size), places(14, 19)
    with trace() as seen:
        drafter.know(states, passed[0], *passed, ints([]), torch.zeros(0, len(drafter.vocabulary)), extents)
    written = np.zeros(drafter.k_cache.shape, np.bool_)
    written[:, 3, 14:], written[:, 5, :3] = True, True
    for cache in (drafter.k_cache, drafter.v_cache):
        np.testing.assert_array_equal(seen.written(cache), written)
        assert not seen.read(cache).any()
    assert "attention_kernel" not in seen.kernels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_target_keeps_the_states_of_its_layers(folder: Path, dtype: str) -> None:
    """In the order that was asked for, the same as on the host; those of the last layer are what `residual` has."""
    target, info = target_of(folder, dtype), read_model_info(folder)
    passed, extents = places(0, 9)
    tokens, logits = ints(range(20, 29)), torch.zeros(1, info.vocab_size)
    target.forward(tokens, *passed, ints([8]), logits, extents)
    assert target.tapped.dtype == torch.float32
    assert torch.equal(target.tapped[:9, 0], target._work.residual[:9].float())
    assert not target.tapped[9:].any()
    if dtype == "float32":
        host = HostLlama(info, open_weights(info), dtype, **SIZES, threads=1, taps=TAPS)
        arrays = [array.numpy() for array in (tokens, *passed, ints([8]))]
        host.forward(*arrays, np.zeros((1, info.vocab_size), np.float32))
        near(target.tapped[:9], torch.from_numpy(host.tapped[:9].copy()), 1e-5)
        host.close()
    without = target_of(folder, dtype, taps=())
    again = torch.zeros_like(logits)
    without.forward(tokens, *passed, ints([8]), again, extents)
    assert torch.equal(logits, again) and without.tapped.numel() == 0


def test_a_drafter_that_does_not_fit_is_refused(folder: Path, mtp: Trained, tmp_path: Path) -> None:
    other = tmp_path / "other"
    TinyLlama(hidden=128).write_hf(other)
    with pytest.raises(ModelError, match=r"drafter of another model.*token_in"):
        CudaMtp(target_of(other), DrafterFile(mtp.file))
    with pytest.raises(ValueError, match="other layers"):
        CudaMtp(target_of(folder, taps=(0, 1)), DrafterFile(mtp.file))
    drafter = opened(CudaMtp, folder, mtp.file)
    passed, extents = places(0, 2)
    with pytest.raises(ValueError, match="states"):
        states = torch.zeros(2, 3, mtp.info.hidden_size)
        drafter.learn(states, ints([0, 0]), *passed, ints([]), torch.zeros(0, len(drafter.vocabulary)), extents)
    passed, extents = places(0, LENGTH + 1)
    with pytest.raises(ValueError, match="exceeds the buffers"):
        states = torch.zeros(LENGTH + 1, len(TAPS), mtp.info.hidden_size)
        drafter.learn(states, passed[0], *passed, ints([]), torch.zeros(0, len(drafter.vocabulary)), extents)
