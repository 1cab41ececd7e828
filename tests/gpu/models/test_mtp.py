"""The mtp drafter's pass on the host against the same in torch, as it was trained."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from gpu.models.host_mtp import HostMtp, MtpWeights
from gpu.models.llama import HostLlama
from gpu.models.weights import open_weights
from procs.model_info import read_model_info
from shm.tensor_map import ModelError
from tests.model_factory import TinyLlama
from tools.drafter_model import Mtp, unroll

PAGE, PER_ROW, LENGTH = 16, 2, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    TinyLlama().write_hf(made)
    return made


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[Mtp, Path]:
    """A drafter that is not its beginning any more, and its file."""
    info = read_model_info(folder)
    torch.manual_seed(5)
    mtp = Mtp(info, open_weights(info), torch.arange(3, info.vocab_size, 2))
    with torch.no_grad():
        for parameter in mtp.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter)).copy_(parameter.bfloat16().float())
    file = folder / "drafter.safetensors"
    weights = {name: value.bfloat16() for name, value in mtp.state_dict().items()}
    save_file({**weights, "vocabulary": mtp.vocabulary.to(torch.int32)}, file, {"format": "stepahead-mtp"})
    return mtp, file


def target_of(folder: Path, dtype: str = "float32") -> HostLlama:
    info = read_model_info(folder)
    return HostLlama(
        info, open_weights(info), dtype, page_size=PAGE, pages=8, pages_per_row=PER_ROW, max_tokens=LENGTH, max_seqs=4,
        threads=2,
    )  # fmt: skip


def open_drafter(folder: Path, file: Path, dtype: str = "float32") -> HostMtp:
    target = target_of(folder, dtype)
    return HostMtp(target, open_weights(target.info).tensor("lm_head.weight"), MtpWeights(file))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1), ("int8", 0.2)])
def test_a_pass_and_the_drafts_behind_it_are_those_of_torch(
    folder: Path, trained: tuple[Mtp, Path], dtype: str, tolerance: float
) -> None:
    """All places at once, then from the last one on by its own state."""
    mtp, file = trained
    drafter = open_drafter(folder, file, dtype)
    tokens, hidden = torch.randint(0, 300, (1, LENGTH)), torch.randn(1, LENGTH - 1, mtp.info.hidden_size)
    with torch.no_grad():
        states = unroll(mtp, tokens, hidden, 3)
    pages = np.array([[3, 5]], np.int32)
    first = LENGTH - 3  # places 0..first - 1 in the first pass
    logits = np.zeros((1, len(mtp.vocabulary)), np.float32)
    behind = tokens[0, 1:].numpy().astype(np.int32)

    def run(places: range, state: Any) -> Any:
        count = len(places)
        at, seqs = np.arange(places.start, places.stop, dtype=np.int32), np.zeros(count, np.int32)
        given = np.ascontiguousarray(behind[places.start : places.stop])
        drafter.draft(given, state, at, seqs, pages, np.array([count - 1], np.int32), logits)
        return drafter.residual[:count].copy()

    made = run(range(first), np.ascontiguousarray(hidden[0, :first].numpy()))
    near(made, states[0][0, :first], tolerance)
    near(logits[0], mtp.logits(states[0][0, first - 1]).detach(), tolerance)
    for number in (1, 2):
        made = run(range(first - 1 + number, first + number), made[-1:])
        near(made[0], states[number][0, first - 1 + number], tolerance)
        near(logits[0], mtp.logits(states[number][0, first - 1 + number]).detach(), tolerance)


def near(found: Any, wanted: Any, tolerance: float) -> None:
    wanted = wanted.detach().numpy()
    assert np.abs(found - wanted).max() <= tolerance * max(1.0, np.abs(wanted).max())


def test_a_drafter_of_another_model_is_refused(folder: Path, trained: tuple[Mtp, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    TinyLlama(hidden=128).write_hf(other)
    with pytest.raises(ModelError, match="not one of"):
        open_drafter(other, trained[1])
    with pytest.raises(ModelError, match="no mtp drafter"):
        MtpWeights(folder / "model.safetensors")


def test_a_state_of_another_form_is_refused(folder: Path, trained: tuple[Mtp, Path]) -> None:
    drafter = open_drafter(folder, trained[1])
    ints, logits = np.zeros(2, np.int32), np.zeros((0, len(trained[0].vocabulary)), np.float32)
    with pytest.raises(ValueError, match="state"):
        drafter.draft(ints, np.zeros((2, 3), np.float32), ints, ints, np.zeros((1, 2), np.int32), ints[:0], logits)
