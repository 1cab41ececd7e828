"""Small drafters for tests: what a file of each kind has in torch, over a tiny target, and a text for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu.models.weights import open_weights
from procs.model_info import read_model_info
from shm.config import ModelInfo
from tools.drafter_dflash import Dflash
from tools.drafter_model import Answers
from tools.drafter_mtp import Mtp
from tools.drafter_report import as_rounded, write_drafter

MASK = 7


@dataclass
class Trained:
    """A drafter that is not its beginning any more, as its file has it."""

    model: Any
    file: Path
    info: ModelInfo


def trained(folder: Path, kind: str, taps: tuple[int, ...], layers: int = 2) -> Trained:
    """One for the model in `folder`, which is written below it. layers: of dflash."""
    info = read_model_info(folder)
    torch.manual_seed(5)
    vocabulary = torch.arange(3, info.vocab_size, 2)
    weights = open_weights(info)
    model: Any = Mtp(info, weights, vocabulary, len(taps), 2.0)
    if kind == "dflash":
        model = Dflash(info, weights, vocabulary, len(taps), 2.0, layers=layers, mask=MASK)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    file = folder / kind / "drafter.safetensors"
    file.parent.mkdir(exist_ok=True)
    write_drafter(model, vocabulary, taps, MASK if kind == "dflash" else None, bytes(32), file)
    as_rounded(model)
    return Trained(model, file, info)


def answers_of(hidden: int, taps: int, length: int, begin: int) -> Answers:
    """One text of `length` tokens, of which windows may begin from place `begin` on."""
    torch.manual_seed(2)
    states = torch.randn(1, length - 1, taps, hidden)
    states = states / states.square().mean(-1, keepdim=True).sqrt()
    places = torch.arange(begin, length - 1)[None]
    there = torch.ones(places.shape, dtype=torch.bool)
    return Answers(torch.randint(0, 300, (1, length)), states, places, there, torch.tensor([length]))
