"""Trains the mtp drafter of a model: `python -m tools.train_drafter --sharegpt FILE.json --out FOLDER`.

Three stages, each of which goes on where it was interrupted: the target's own greedy answers are written and kept
(`tools.drafter_data`), the drafter learns from them, and what it is worth is measured on conversations that it has
never seen. The folder then holds drafter.safetensors (weights as bfloat16, and the draft vocabulary), drafter.json
(command, data, seed, figures) and loss.svg.

Owns the schedule, the checkpoints and the report. A checkpoint is a safetensors file beside a JSON file.
"""

import argparse
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
from torch.nn import functional

from gpu.models.weights import open_weights
from procs.model_files import resolve_model
from procs.model_info import read_model_info
from tools.drafter_data import SPLITS, Example, Writer, load_shard, prompts_of, write_shards
from tools.drafter_model import Mtp, unroll

IGNORED = -100  # of the loss
DISCOUNT = 0.8  # of each later draft: it counts only where those before it are right


@dataclass(frozen=True)
class Settings:
    """Everything that decides what comes out."""

    model: str = "smollm2-135m-instruct"
    drafts: int = 3
    draft_vocabulary: int = 8192
    prompt_tokens: int = 320  # prompts that are longer are left out
    answer_tokens: int = 160
    batch: int = 48  # answers that are written together
    shards: int = 40
    shard_batches: int = 2
    held_out_batches: int = 2  # for validation, and for the test
    train_tokens: int = 4096  # of a step
    epochs: float = 3.0
    rate: float = 8e-4
    warm_up: float = 0.03
    decay: float = 0.01
    seed: int = 1
    threads: int = 2


def batches(examples: Sequence[Example], tokens: int, order: random.Random | None) -> Iterator[list[Example]]:
    """Examples of about one length together, up to so many tokens with padding, in an order of their own."""
    made: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: len(e.tokens)):
        if not made or len(example.tokens) * (len(made[-1]) + 1) > tokens:
            made.append([])
        made[-1].append(example)
    if order is not None:
        order.shuffle(made)
    return iter(made)


def padded(batch: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """tokens i64[B, T + 1], hidden f32[B, T, hidden], and where answers are: bool[B, T + 1]."""
    longest = max(len(example.tokens) for example in batch)
    tokens = torch.zeros((len(batch), longest), dtype=torch.int64)
    hidden = torch.zeros((len(batch), longest - 1, batch[0].hidden.shape[1]))
    answer = torch.zeros((len(batch), longest), dtype=torch.bool)
    for i, example in enumerate(batch):
        count = len(example.tokens)
        tokens[i, :count] = torch.from_numpy(example.tokens.astype(np.int64))
        hidden[i, : count - 1] = torch.from_numpy(example.hidden.astype(np.float32))
        answer[i, example.prompt : count] = True
    return tokens, hidden, answer


def targets(tokens: Tensor, answer: Tensor, known: Tensor, number: int) -> Tensor:
    """Draft `number` of place i is the token at i + 2: its place in the draft vocabulary, i64[B, T], or IGNORED.

    Where tokens come from: drafts begin behind a token of the answer, so the state that pass 0 had must be of a place
    at which the answer's first token, or a later one, is what follows.
    """
    wanted = functional.pad(known[tokens], (0, 1), value=IGNORED)[:, 2:]
    inside = functional.pad(answer, (0, 1), value=False)[:, 2:]
    begins = functional.pad(answer, (number, 0), value=False)[:, 1 : tokens.shape[1]]
    return torch.where(inside & begins, wanted, IGNORED)


def places_of(vocabulary: Tensor, size: int) -> Tensor:
    """i64[size]: the place of each of the target's ids in the draft vocabulary, IGNORED where it has none."""
    known = torch.full((size,), IGNORED, dtype=torch.int64)
    known[vocabulary] = torch.arange(len(vocabulary))
    return known


def loss_of(model: Mtp, batch: Sequence[Example], known: Tensor, drafts: int) -> Tensor:
    """Cross entropy of all drafts, the later ones discounted."""
    tokens, hidden, answer = padded(batch)
    total, weight = torch.zeros(()), 0.0
    for number, state in enumerate(unroll(model, tokens, hidden, drafts)):
        wanted = targets(tokens, answer, known, number)
        there = wanted != IGNORED
        if there.any():
            total = total + DISCOUNT**number * functional.cross_entropy(model.logits(state[there]), wanted[there])
            weight += DISCOUNT**number
    return total / max(weight, 1e-9)


@torch.no_grad()  # type: ignore[untyped-decorator]
def runs_of(model: Mtp, examples: Sequence[Example], settings: Settings) -> Counter[int]:
    """How many drafts are accepted in a row, from every place of the answers at which drafts begin."""
    found: Counter[int] = Counter()
    model.eval()
    for batch in batches(examples, settings.train_tokens, None):
        tokens, hidden, answer = padded(batch)
        starts = answer[:, 1:]  # the token behind place i is one of the answer
        right = starts
        run = torch.zeros(starts.shape, dtype=torch.int64)
        # Pass n stands at the place to which n drafts have led, i + n, and has to say the token at i + n + 2.
        for number, state in enumerate(unroll(model, tokens, hidden, settings.drafts)):
            best = model.vocabulary[model.logits(state).argmax(-1)]
            wanted = functional.pad(tokens, (0, 1), value=-1)[:, 2:]
            inside = functional.pad(answer, (0, 1), value=False)[:, 2:]
            hit = functional.pad((best == wanted) & inside, (0, number), value=False)[:, number:]
            right = right & hit
            run += right
        # A place behind which the text ends has nothing to draft.
        counted = starts & functional.pad(answer, (0, 1), value=False)[:, 2:]
        found.update(run[counted].tolist())
    model.train()
    return found


def accept_length(runs: Counter[int]) -> float:
    """Tokens that a window brings: the accepted drafts and one more."""
    return 1 + sum(run * times for run, times in runs.items()) / max(1, sum(runs.values()))


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
        self.model = Mtp(info, open_weights(info), torch.tensor(chosen))
        self.known = places_of(self.model.vocabulary, info.vocab_size)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=settings.decay
        )
        epoch = len(list(batches(examples["train"], settings.train_tokens, None)))
        self.steps = max(1, round(settings.epochs * epoch))
        self.step, self.seconds = 0, 0.0
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
            for place, batch in enumerate(batches(self.examples["train"], self.settings.train_tokens, order)):
                if place >= done and self.step < self.steps:
                    yield batch

    def _learn(self, batch: Sequence[Example]) -> None:
        rising = (self.step + 1) / max(1.0, self.settings.warm_up * self.steps)
        falling = 0.5 * (1 + math.cos(math.pi * self.step / self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * min(1.0, rising) * max(0.02, falling)
        loss = loss_of(self.model, batch, self.known, self.settings.drafts)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        self.step += 1

    # --- checkpoints

    def save(self) -> None:
        """Write all that `restore` needs; whole or not at all."""
        arrays = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            arrays |= {f"adam.{number}.{name}": torch.as_tensor(value) for name, value in state.items()}
        told = {"step": self.step, "losses": self.losses, "seconds": self.seconds, "settings": asdict(self.settings)}
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
        arrays = load_file(file)
        self.model.load_state_dict({name[6:]: value for name, value in arrays.items() if name.startswith("model.")})
        states: dict[int, dict[str, Tensor]] = {}
        for name, value in arrays.items():
            if name.startswith("adam."):
                _, number, part = name.split(".", 2)
                states.setdefault(int(number), {})[part] = value
        whole = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": states, "param_groups": whole["param_groups"]})
        self.step, self.losses, self.seconds = told["step"], told["losses"], told["seconds"]

    # --- what is shipped

    def ship(self, command: str) -> dict[str, object]:
        """Write drafter.safetensors, drafter.json and loss.svg; returns what drafter.json says."""
        weights = {name: value.to(torch.bfloat16) for name, value in self.model.state_dict().items()}
        weights["vocabulary"] = self.model.vocabulary.to(torch.int32)
        runs = {split: runs_of(self.model, self.examples[split], self.settings) for split in SPLITS[1:]}
        told: dict[str, object] = {
            "kind": "mtp",
            "command": command,
            "settings": asdict(self.settings),
            "train_tokens": sum(len(e.tokens) for e in self.examples["train"]),
            "train_seconds": round(self.seconds),
            "last_loss": round(sum(self.losses[-50:]) / max(1, len(self.losses[-50:])), 4),
            **{f"{split}_accept_length": round(accept_length(found), 4) for split, found in runs.items()},
            **{f"{split}_runs": [found[n] for n in range(self.settings.drafts + 1)] for split, found in runs.items()},
        }
        save_file(weights, self.folder / "drafter.safetensors", {"format": "stepahead-mtp"})
        (self.folder / "drafter.json").write_text(json.dumps(told, indent=1) + "\n")
        (self.folder / "loss.svg").write_text(picture(self.losses))
        return told


def read_metadata(file: Path) -> dict[str, str]:
    """The strings in the header of a safetensors file."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        metadata: dict[str, str] = json.loads(opened.read(size)).get("__metadata__", {})
    return metadata


def picture(losses: Sequence[float], width: int = 640, height: int = 320) -> str:
    """The loss, step by step, as a mean over a hundredth of the steps each."""
    size = max(1, len(losses) // 100)
    means = [sum(losses[i : i + size]) / len(losses[i : i + size]) for i in range(0, len(losses), size)]
    top = max(means, default=1.0) * 1.05
    points = " ".join(
        f"{50 + i * (width - 70) / max(1, len(means) - 1):.1f},{height - 40 - mean / top * (height - 60):.1f}"
        for i, mean in enumerate(means)
    )
    ticks = "".join(
        f'<text x="44" y="{height - 36 - share * (height - 60):.0f}" text-anchor="end">{share * top:.2f}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    return (
        f'{head} font-family="sans-serif" font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
        f'<polyline points="{points}" fill="none" stroke="#1f6feb"/>'
        f'{ticks}<text x="{width // 2}" y="{height - 10}" text-anchor="middle">loss, {len(losses)} steps</text></svg>\n'
    )


def write_data(settings: Settings, source: Path, folder: Path) -> dict[str, list[Example]]:
    """The first stage. Returns the examples of each split."""
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
        found[split] = [e for file in sorted(place.glob("*.safetensors")) for e in load_shard(file)]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the stages that are not done."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_drafter", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sharegpt", type=Path, required=True, help="ShareGPT's conversations, JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for data, checkpoint and result")
    for name, default in asdict(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    given = parser.parse_args(argv)
    settings = Settings(**{name: getattr(given, name) for name in asdict(Settings())})
    given.out.mkdir(parents=True, exist_ok=True)
    examples = write_data(settings, given.sharegpt, given.out / "data")
    trainer = Trainer(settings, given.out, examples)
    trainer.run()
    told = trainer.ship(" ".join(["python -m tools.train_drafter", *(sys.argv[1:] if argv is None else argv)]))
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
