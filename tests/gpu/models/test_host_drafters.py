"""The passes of trained drafters on the host against the same in torch, as they were trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu.models.host_drafters import HostDflash, HostMtp
from gpu.models.llama import HostLlama
from gpu.models.weights import open_weights
from procs.model_info import read_model_info
from shm.drafter_file import DrafterFile
from shm.tensor_map import ModelError
from tests.gpu.models.small_drafters import Trained, answers_of, trained
from tests.model_factory import TinyLlama

PAGE, PER_ROW, LENGTH, DRAFTS = 16, 2, 20, 3
TAPS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    TinyLlama().write_hf(made)
    return made


@pytest.fixture(scope="module")
def mtp(folder: Path) -> Trained:
    return trained(folder, "mtp", TAPS)


@pytest.fixture(scope="module")
def dflash(folder: Path) -> Trained:
    return trained(folder, "dflash", TAPS)


def target_of(folder: Path, dtype: str = "float32", taps: tuple[int, ...] = TAPS) -> HostLlama:
    info = read_model_info(folder)
    return HostLlama(
        info, open_weights(info), dtype, page_size=PAGE, pages=8, pages_per_row=PER_ROW, max_tokens=LENGTH, max_seqs=4,
        threads=2, taps=taps,
    )  # fmt: skip


def opened(kind: Any, folder: Path, file: Path, dtype: str = "float32") -> Any:
    target = target_of(folder, dtype)
    return kind(target, open_weights(target.info), DrafterFile(file))


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


PAGES = np.array([[3, 5]], np.int32)
TOLERANCES = [("float32", 1e-4), ("bfloat16", 0.1), ("int8", 0.2)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_mtp_goes_on_as_in_torch(folder: Path, mtp: Trained, dtype: str, tolerance: float) -> None:
    """All places at once, then from the last one on by its own state."""
    drafter = opened(HostMtp, folder, mtp.file, dtype)
    begin = LENGTH - 2 - DRAFTS
    answers = answers_of(mtp.info.hidden_size, len(TAPS), LENGTH, begin)
    with torch.no_grad():
        states = [state[0, 0] for state in mtp.model.states(answers, DRAFTS)]
        wanted = [mtp.model.logits(state) for state in states]
    logits = np.zeros((1, len(drafter.vocabulary)), np.float32)
    behind = answers.tokens[0, 1:].numpy().astype(np.int32)
    count = begin + 1
    given = np.ascontiguousarray(answers.states[0, :count].numpy())
    at, seqs = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    nothing = ints(), np.zeros((0, len(drafter.vocabulary)), np.float32)
    drafter.learn(given, behind[:count].copy(), at, seqs, PAGES, *nothing)
    joined = drafter.residual[count - 1][None, None].copy()
    drafter.begin(joined, ints(0), ints(count - 1), ints(0), PAGES, ints(0), logits)
    near(drafter.residual[0], states[0], tolerance)
    near(logits[0], wanted[0], tolerance)
    state = drafter.residual[0].copy()
    for number in range(1, DRAFTS):
        place = begin + number
        drafter.draft(state[None, None], behind[place : place + 1].copy(), ints(place), ints(0), PAGES, ints(0), logits)
        state = drafter.residual[0].copy()
        near(state, states[number], tolerance)
        near(logits[0], wanted[number], tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_dflash_fills_a_block_as_in_torch(folder: Path, dflash: Trained, dtype: str, tolerance: float) -> None:
    """States of a text in two pieces, then a block behind it."""
    drafter = opened(HostDflash, folder, dflash.file, dtype)
    begin = LENGTH - 2 - DRAFTS
    answers = answers_of(dflash.info.hidden_size, len(TAPS), LENGTH, begin)
    with torch.no_grad():
        states = [state[0, 0] for state in dflash.model.states(answers, DRAFTS)]
        wanted = [dflash.model.logits(state) for state in states]
    none = np.zeros((0, len(drafter.vocabulary)), np.float32)
    for first, end in ((0, 6), (6, begin + 1)):
        given = np.ascontiguousarray(answers.states[0, first:end].numpy())
        at, seqs = np.arange(first, end, dtype=np.int32), np.zeros(end - first, np.int32)
        drafter.know(given, seqs, at, seqs, PAGES, ints(), none)
    window = 1 + DRAFTS
    before = np.repeat(drafter.residual[begin - 6][None, None], window, axis=0)
    blocks = ints(int(answers.tokens[0, begin + 1]), *range(drafter.mask, drafter.mask + DRAFTS))
    at = np.arange(begin + 1, begin + 1 + window, dtype=np.int32)
    logits = np.zeros((DRAFTS, len(drafter.vocabulary)), np.float32)
    last = np.full(window, begin + window, np.int32)
    wanted_rows = np.arange(1, window, dtype=np.int32)
    drafter.draft(before, last, blocks, at, np.zeros(window, np.int32), PAGES, wanted_rows, logits)
    for number in range(DRAFTS):
        near(drafter.residual[1 + number], states[number], tolerance)
        near(logits[number], wanted[number], tolerance)


def near(found: Any, wanted: Any, tolerance: float) -> None:
    wanted = wanted.detach().numpy()
    assert np.abs(found - wanted).max() <= tolerance * max(1.0, np.abs(wanted).max())


def test_the_target_keeps_the_states_of_its_layers(folder: Path) -> None:
    """The last layer's state is the residual stream; an earlier one is that of a model that ends there."""
    target, pages = target_of(folder), PAGES
    tokens, at = np.arange(9, dtype=np.int32), np.arange(9, dtype=np.int32)
    logits = np.zeros((1, target.info.vocab_size), np.float32)
    target.forward(tokens, at, np.zeros(9, np.int32), pages, ints(8), logits)
    np.testing.assert_array_equal(target.tapped[:9, 1], target.residual[:9])
    both = target.tapped[:9].copy()
    other = target_of(folder, taps=(1, 0))
    other.forward(tokens, at, np.zeros(9, np.int32), pages, ints(8), logits)
    np.testing.assert_array_equal(other.tapped[:9, ::-1], both)
    assert np.abs(both[:, 0] - both[:, 1]).max() > 0.01


def test_a_drafter_of_another_model_is_refused(folder: Path, mtp: Trained, tmp_path: Path) -> None:
    other = tmp_path / "other"
    TinyLlama(hidden=128).write_hf(other)
    with pytest.raises(ModelError, match=r"drafter of another model.*token_in"):
        DrafterFile(mtp.file).check(read_model_info(other))
    with pytest.raises(ModelError, match="no trained drafter"):
        DrafterFile(folder / "model.safetensors")
    with pytest.raises(ValueError, match="other layers"):
        HostMtp(target_of(folder, taps=(1,)), open_weights(read_model_info(folder)), DrafterFile(mtp.file))


BROKEN = {
    "its vocabulary is not a list of int32": {"vocabulary": torch.ones(3)},
    "its vocabulary is not a list of ids": {"vocabulary": torch.tensor([5, 4], dtype=torch.int32)},
    "its taps are not layers": {"taps": torch.tensor([1, 1], dtype=torch.int32)},
    "which no mtp drafter has": {"layers.1.q.weight": torch.ones(3)},
    "reads layer 9": {"taps": torch.tensor([0, 9], dtype=torch.int32)},
    "knows ids up to 70000": {"vocabulary": torch.tensor([5, 70000], dtype=torch.int32)},
    "its layers.0.q.weight is": {"layers.0.q.weight": torch.ones((64, 8))},
    "scales do not fit": {"layers.0.q.scale": torch.ones(3)},
    "no tensor layers.0.q.scale": {"layers.0.q.scale": None},
    "not a list of ids, each larger": {"vocabulary": torch.tensor([0, 2**31 - 1, -(2**31), -1], dtype=torch.int32)},
    "scales that are not float32": {"layers.0.q.scale": torch.ones(64, dtype=torch.int8)},
    "layers.0.q.weight has values that are no numbers": {"layers.0.q.scale": torch.full((64,), float("nan"))},
    "layers.0.k.weight has values that are no numbers": {"layers.0.k.scale": torch.full((32,), 3e38)},
    "norm.weight has values that are no numbers": {"norm.weight": torch.full((64,), float("inf"))},
    "its mask is not the id of one token": {"mask": torch.tensor([-1], dtype=torch.int32)},
    "its mask is not the id": {"mask": torch.tensor([1, 2], dtype=torch.int32)},
    "tokens is not a list of int32": {"tokens": torch.ones(8)},
    "no tensor layers.0.q.weight": {f"layers.{'9' * 5000}.q.weight": torch.ones(3), "layers.0.q.weight": None},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_file_is_refused(folder: Path, mtp: Trained, tmp_path: Path, reason: str) -> None:
    arrays = {**load_file(mtp.file), **BROKEN[reason]}
    broken = tmp_path / "drafter.safetensors"
    save_file({name: value for name, value in arrays.items() if value is not None}, broken)
    with pytest.raises(ModelError, match=reason):
        file = DrafterFile(broken)
        file.check(mtp.info)
        opened(HostMtp, folder, broken)


def test_states_of_another_form_are_refused(folder: Path, mtp: Trained) -> None:
    drafter = opened(HostMtp, folder, mtp.file)
    logits = np.zeros((0, len(drafter.vocabulary)), np.float32)
    with pytest.raises(ValueError, match="states"):
        drafter.learn(np.zeros((2, 3, 64), np.float32), ints(0, 0), ints(0, 1), ints(0, 0), PAGES, ints(), logits)


def test_a_token_that_sees_beyond_its_row_is_refused(folder: Path, dflash: Trained) -> None:
    drafter = opened(HostDflash, folder, dflash.file)
    logits = np.zeros((0, len(drafter.vocabulary)), np.float32)
    for last in (PAGE * PER_ROW, 3):  # beyond the pages, and behind itself
        with pytest.raises(ValueError, match="position"):
            drafter.draft(
                np.zeros((1, 1, 64), np.float32), ints(last), ints(1), ints(4), ints(0), PAGES, ints(), logits
            )
