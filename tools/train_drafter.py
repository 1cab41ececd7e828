"""Trains a drafter for a model: `python -m tools.train_drafter --kind mtp --sharegpt FILE.json --out FOLDER`.

Three stages, each of which goes on where it was interrupted: the target's own greedy answers are written and kept
(`tools.drafter_data`), the drafter learns from them, and what it is worth is measured on conversations that it has
never seen. The folder then holds drafter.safetensors (int8, and the draft vocabulary), drafter.json (command, data,
seed, figures) and loss.svg.

Owns the schedule and the checkpoints. A checkpoint is one safetensors file, its settings and losses in the header.
"""

import argparse
import hashlib
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpu.models.weights import open_weights
from procs.model_files import resolve_model
from procs.model_info import read_model_info
from procs.tokenizer_files import digest_of, load_tokenizer
from shm.config import ModelInfo
from shm.drafter_file import DFLASH, FILE_NAME, MASKS_MAX, MTP
from tools.drafter_data import SPLITS, Example, Writer, default_taps, load_shard, prompts_of, write_shards
from tools.drafter_dflash import Dflash
from tools.drafter_loss import accept_length, batches, loss_of, places_of, runs_of
from tools.drafter_model import side_by_side
from tools.drafter_mtp import Mtp
from tools.drafter_report import as_rounded, picture, read_metadata, write_drafter


@dataclass(frozen=True)
class Settings:
    """Everything that decides what comes out."""

    kind: str = MTP
    model: str = "smollm2-135m-instruct"
    layers: int = 1  # of dflash
    mask: int = 20000  # of dflash, the id that stands for the first unknown token; any with vectors of their own do
    drafts: int = 3
    draft_vocabulary: int = 8192
    prompt_tokens: int = 320  # prompts that are longer are left out
    answer_tokens: int = 160
    batch: int = 48  # answers that are written together
    shards: int = 50
    shard_batches: int = 2
    held_out_batches: int = 2  # for validation, and for the test
    step_tokens: int = 2048  # of answers, in a step
    epochs: float = 4.0
    rate: float = 1e-2  # of matrices
    rate_of_rest: float = 4e-3
    hard: float = 0.0  # share of the target's own choice in what is learnt, beside how probable it finds each token
    warm_up: float = 0.03
    decay: float = 0.01
    seed: int = 1
    threads: int = 2


# What the answers depend on, beside their number
OF_THE_DATA = ("model", "prompt_tokens", "answer_tokens", "batch", "shard_batches", "held_out_batches")


def make_drafter(settings: Settings, info: ModelInfo, vocabulary: Tensor, size: float) -> Mtp | Dflash:
    """A drafter at its beginning. size: of the target's last states, see `Layer`."""
    weights, taps = open_weights(info), len(default_taps(info.num_layers))
    if settings.kind == MTP:
        return Mtp(info, weights, vocabulary, taps, size)
    if not 0 <= settings.mask <= info.vocab_size - MASKS_MAX:
        raise ValueError(f"--mask: must be 0 to {info.vocab_size - MASKS_MAX}, got {settings.mask}")
    return Dflash(info, weights, vocabulary, taps, size, settings.layers, settings.mask)


def make_optimizers(model: torch.nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for matrices: it learns in half the steps that Adam needs. AdamW for what has no two sides."""
    matrices = [value for name, value in model.named_parameters() if value.dim() == 2 and "norm" not in name]
    rest = [value for name, value in model.named_parameters() if value.dim() != 2 or "norm" in name]
    rate, rate_of_rest = rates_of(settings)
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=settings.decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate_of_rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rates_of(settings: Settings) -> tuple[float, float]:
    """Of matrices, and of the rest, before the schedule."""
    return settings.rate, settings.rate_of_rest


class Trainer:
    """The second stage."""

    def __init__(self, settings: Settings, folder: Path, examples: dict[str, list[Example]]) -> None:
        self.settings, self.folder, self.examples = settings, folder, examples
        torch.manual_seed(settings.seed)
        torch.set_num_threads(settings.threads)
        info = read_model_info(resolve_model(settings.model))
        counts = Counter(int(t) for e in examples["train"] for t in e.tokens[e.prompt :])
        often = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        chosen = sorted(often[: settings.draft_vocabulary])
        size = float(np.median(np.concatenate([e.sizes[1:, -1] for e in examples["train"]])))
        self.model = make_drafter(settings, info, torch.tensor(chosen), size)
        self.known = places_of(self.model.target.vocabulary, info.vocab_size)
        self.optimizers = make_optimizers(self.model, settings)
        epoch = len(list(batches(examples["train"], settings.step_tokens, None)))
        self.steps = max(1, round(settings.epochs * epoch))
        self.step, self.seconds = 0, 0.0
        # Order, schedule and vocabulary follow from what is learnt from.
        self._learns = hashlib.sha256(b"".join(e.tokens.tobytes() for e in examples["train"])).hexdigest()
        self.losses: list[float] = []
        self._epoch = epoch

    def run(self, save_every_s: float = 300.0) -> None:
        """Train to the end, from the checkpoint if there is one."""
        self.restore()
        began_s = saved_s = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("training", total=self.steps, completed=self.step)
            for batch in self._order():
                self._learn(batch)
                mean = sum(self.losses[-50:]) / len(self.losses[-50:])
                bar.update(task, advance=1, description=f"training, loss {mean:.3f}")
                if self.step % 100 == 0:
                    print(f"step {self.step} of {self.steps}, loss {mean:.3f}", flush=True)
                if time.monotonic() - saved_s > save_every_s:
                    self.seconds += time.monotonic() - began_s
                    began_s = saved_s = time.monotonic()
                    self.save()
        self.seconds += time.monotonic() - began_s
        self.save()

    def _order(self) -> Iterator[list[Example]]:
        """The batches that are left: each epoch has its own order, which follows from the seed."""
        while self.step < self.steps:
            number, done = divmod(self.step, self._epoch)
            order = random.Random(f"{self.settings.seed} {number}")
            for place, batch in enumerate(batches(self.examples["train"], self.settings.step_tokens, order)):
                if place >= done and self.step < self.steps:
                    yield batch

    def _learn(self, batch: Sequence[Example]) -> None:
        rising = (self.step + 1) / max(1.0, self.settings.warm_up * self.steps)
        falling = 0.5 * (1 + math.cos(math.pi * self.step / self.steps))
        for optimizer, rate in zip(self.optimizers, rates_of(self.settings), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, rising) * max(0.02, falling)
        with torch.autocast("cpu", torch.bfloat16):  # of matrix products: twice as fast where the CPU has them
            loss = loss_of(self.model, side_by_side(batch), self.known, self.settings.drafts, self.settings.hard)
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.losses.append(loss.item())
        self.step += 1

    # --- checkpoints

    def save(self) -> None:
        """Write all that `restore` needs; whole or not at all."""
        arrays = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for place, optimizer in enumerate(self.optimizers):
            for number, state in optimizer.state_dict()["state"].items():
                arrays |= {f"{place}.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        told = {"step": self.step, "losses": self.losses, "seconds": self.seconds, "settings": asdict(self.settings)}
        told["learns"] = self._learns
        work = self.folder / "checkpoint.part"
        save_file(
            {name: value.contiguous().clone() for name, value in arrays.items()}, work, {"told": json.dumps(told)}
        )
        work.replace(self.folder / "checkpoint.safetensors")

    def restore(self) -> None:
        """Go on where a run with the same settings stopped. Raises ValueError for one with others."""
        file = self.folder / "checkpoint.safetensors"
        if not file.exists():
            return
        told = json.loads(read_metadata(file)["told"])
        if told["settings"] != asdict(self.settings):
            raise ValueError(f"{file} was made with other settings; take another --out, or remove it")
        if told["learns"] != self._learns:
            raise ValueError(f"{file} has learnt from other answers; take another --out, or remove it")
        arrays = load_file(file)
        self.model.load_state_dict({name[6:]: value for name, value in arrays.items() if name.startswith("model.")})
        for place, optimizer in enumerate(self.optimizers):
            states: dict[int, dict[str, Tensor]] = {}
            for name, value in arrays.items():
                if name.startswith(f"{place}."):
                    _, number, part = name.split(".", 2)
                    states.setdefault(int(number), {})[part] = value
            optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
        self.step, self.losses, self.seconds = told["step"], told["losses"], told["seconds"]

    # --- what is shipped

    def ship(self, command: str) -> dict[str, object]:
        """Write drafter.safetensors, drafter.json and loss.svg; returns what drafter.json says. The model ends up with
        the rounded weights, of which the figures are.
        """
        settings, target = self.settings, self.model.target
        taps = default_taps(self.model.info.num_layers)
        mask = settings.mask if settings.kind == DFLASH else None
        tokens = digest_of(load_tokenizer(resolve_model(settings.model)))
        write_drafter(self.model, target.vocabulary, taps, mask, tokens, self.folder / FILE_NAME)
        as_rounded(self.model)
        held = {split: self.examples[split] for split in SPLITS[1:]}
        runs = {
            split: runs_of(self.model, found, settings.drafts, settings.step_tokens) for split, found in held.items()
        }
        told: dict[str, object] = {
            "command": command,
            "settings": asdict(settings),
            "train_answers_sha256": self._learns,
            "train_tokens": sum(len(e.tokens) for e in self.examples["train"]),
            "train_answer_tokens": sum(len(e.tokens) - e.prompt for e in self.examples["train"]),
            "train_seconds": round(self.seconds),
            "last_loss": round(sum(self.losses[-50:]) / max(1, len(self.losses[-50:])), 4),
            **{f"{split}_accept_length": round(accept_length(found), 4) for split, found in runs.items()},
            **{f"{split}_runs": [found[n] for n in range(settings.drafts + 1)] for split, found in runs.items()},
        }
        (self.folder / "drafter.json").write_text(json.dumps(told, indent=1) + "\n")
        (self.folder / "loss.svg").write_text(picture(self.losses))
        return told


def write_data(settings: Settings, source: Path, folder: Path) -> dict[str, list[Example]]:
    """The first stage. Returns the examples of each split. Raises ValueError for a folder that was made otherwise."""
    _check_folder(settings, source, folder)
    model = resolve_model(settings.model)
    longest = settings.prompt_tokens + settings.answer_tokens
    writer: Writer | None = None
    sizes = {"train": (settings.shards, settings.shard_batches)}
    found: dict[str, list[Example]] = {}
    for split in SPLITS:
        shards, count = sizes.get(split, (1, settings.held_out_batches))
        place = folder / split
        if len(list(place.glob("*.safetensors"))) < shards:
            writer = writer or Writer(read_model_info(model), settings.batch, longest, settings.threads)
            prompts = prompts_of(source, model, split, settings.prompt_tokens)
            told = lambda text, split=split: print(f"{split}: {text}", flush=True)  # noqa: E731
            write_shards(place, writer, prompts, shards, count, settings.answer_tokens, told)
        found[split] = [e for file in sorted(place.glob("*.safetensors"))[:shards] for e in load_shard(file)]
    return found


def _check_folder(settings: Settings, source: Path, folder: Path) -> None:
    """Note in a new folder what its answers are made of; refuse an old one that was made of something else."""
    with source.open("rb") as opened:
        made: dict[str, object] = {"source_sha256": hashlib.file_digest(opened, "sha256").hexdigest()}
    made |= {name: getattr(settings, name) for name in OF_THE_DATA}
    file = folder / "made.json"
    if file.exists():
        if json.loads(file.read_text()) != made:
            raise ValueError(f"{file}: these answers were made with other settings; take another --data")
        return
    if folder.exists() and any(folder.rglob("*.safetensors")):
        raise ValueError(f"{folder} has no made.json, so nobody knows what its answers were made of")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages that are not done."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_drafter", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sharegpt", type=Path, required=True, help="ShareGPT's conversations, JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint and result")
    parser.add_argument(
        "--data", type=Path, help="folder for the answers, which all kinds of drafters share (OUT/data)"
    )
    for name, default in asdict(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    given = parser.parse_args(argv)
    settings = Settings(**{name: getattr(given, name) for name in asdict(Settings())})
    try:
        if settings.kind not in (MTP, DFLASH):
            raise ValueError(f"--kind: must be {MTP} or {DFLASH}, got {settings.kind!r}")
        given.out.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(settings, given.out, write_data(settings, given.sharegpt, given.data or given.out / "data"))
        trainer.run()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    told = trainer.ship(" ".join(["python -m tools.train_drafter", *(sys.argv[1:] if argv is None else argv)]))
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
