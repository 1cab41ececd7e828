"""The mtp drafter in the step program, with the real scheduler: the answers of plain decoding, and a right state.

A drafter is trained on the tiny target's own answers, so that some of what it says is taken.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu.device.host import HostDevice
from gpu.drafters.mtp import MtpDrafter
from gpu.kernels.host_step import HostStepKernels
from gpu.kernels.sampling import sample
from gpu.models.host_mtp import HostMtp, MtpWeights
from gpu.models.llama import HostLlama
from gpu.models.weights import open_weights
from gpu.step import StepProgram
from procs.model_info import read_model_info
from shm.config import ServerConfig
from shm.records import ResultLayout
from tests.gpu.order.served_mill import Asked, ServedMill
from tests.gpu.test_declarations import AuditDevice, forgetful
from tests.model_factory import TinyLlama
from tools.drafter_data import Writer, prompts_of
from tools.drafter_model import unroll
from tools.train_drafter import Settings, Trainer, write_data

TALK = [{"id": f"t{i}_0", "conversations": [{"from": "human", "value": f"tell {i}"}]} for i in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TinyLlama().write_hf(folder)
    return folder


@pytest.fixture(scope="module")
def trainer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("drafter")
    (folder / "talk.json").write_text(json.dumps(TALK))
    settings = Settings(
        model=str(model), drafts=2, draft_vocabulary=300, prompt_tokens=60, answer_tokens=24, batch=8, shards=2,
        shard_batches=1, held_out_batches=1, train_tokens=400, epochs=25.0, rate=4e-3, threads=1,
    )  # fmt: skip
    made = Trainer(settings, folder, write_data(settings, folder / "talk.json", folder / "data"))
    made.run()
    made.ship("a test")
    return made


@pytest.fixture(scope="module")
def prompts(model: Path, trainer: Trainer) -> list[list[int]]:
    """Those that it was trained on."""
    chosen = prompts_of(trainer.folder / "talk.json", model, "train", 60)
    return [prompt for _, prompt in zip(range(6), chosen, strict=False)]


def config_of(model: Path, **changes: Any) -> ServerConfig:
    given: dict[str, Any] = {
        "model": read_model_info(model), "served_model_name": "tiny", "host": "127.0.0.1", "port": 0,
        "dtype": "float32", "max_running": 3, "max_queued": 9, "kv_tokens": 320, "max_len": 80, "prefill_chunk": 16,
        "threads": 1, "draft_when": "always",
    }  # fmt: skip
    return ServerConfig(**(given | changes))


class Served(ServedMill):
    """The scheduler, a tiny Llama, and its drafter."""

    def __init__(self, config: ServerConfig, asked: list[Asked], device: HostDevice | None = None) -> None:
        self.drafter: MtpDrafter | None = None
        super().__init__(device or HostDevice(), config, asked)

    def make_program(self, device: Any, config: ServerConfig, drafting: str, options: dict[str, Any]) -> StepProgram:
        weights = open_weights(config.model)
        target = HostLlama(
            config.model, weights, "float32", page_size=config.page_size, pages=config.pages,
            pages_per_row=config.pages_per_row, max_tokens=config.pass_tokens,
            max_seqs=ResultLayout(config).max_rows * config.window, threads=1,
        )  # fmt: skip
        if config.drafter_file is not None:
            mtp = HostMtp(target, weights.tensor("lm_head.weight"), MtpWeights(Path(config.drafter_file)))
            self.drafter = MtpDrafter(device, config, mtp, target.residual)
        kernels, sampler = HostStepKernels.of(config), partial(sample, team=target.team)
        return StepProgram(device, config, target, kernels, sampler, self.ledger.tokens, drafter=self.drafter)


def serve(config: ServerConfig, prompts: list[list[int]], limit: int, **more: Any) -> tuple[list[list[int]], Served]:
    asked = [Asked(prompt=prompt, max_new=limit, arrival=3 * i, **more) for i, prompt in enumerate(prompts)]
    served = Served(config, asked)
    got = served.run()
    served.device.close()
    return got, served


def accepted(served: Served) -> int:
    return int(served.ledger.accepted.sum())


def with_drafter(config: ServerConfig, trainer: Trainer, drafts: int) -> ServerConfig:
    file = str(trainer.folder / "drafter.safetensors")
    return replace(config, speculate="mtp", window=1 + drafts, drafter_file=file)


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_the_answers_are_those_of_plain_decoding(
    model: Path, trainer: Trainer, prompts: list[list[int]], drafts: int
) -> None:
    """In chunks of a part of a prompt, with prefixes that are found, and with rows that are retracted."""
    config = config_of(model)
    wanted, _ = serve(config, prompts, 24)
    got, served = serve(with_drafter(config, trainer, drafts), prompts, 24)
    assert got == wanted
    assert accepted(served) > 20, "it was trained for this"
    tight = with_drafter(config_of(model, kv_tokens=128), trainer, drafts)
    got, served = serve(tight, prompts, 24)
    assert got == wanted and served.total("retractions_total") > 0
    assert accepted(served) > 20
    assert (
        serve(with_drafter(config, trainer, drafts), prompts, 24, temperature=0.9)[0]
        == (serve(config, prompts, 24, temperature=0.9)[0])
    )


def test_its_state_is_what_torch_makes_of_the_whole_text(
    model: Path, trainer: Trainer, prompts: list[list[int]]
) -> None:
    """After chunks, windows and steps without drafts: the first draft and the state at the row's last place."""
    config = with_drafter(config_of(model, max_running=1), trainer, 2)
    asked = [Asked(prompt=prompts[0], max_new=23)]
    served = Served(config, asked)
    turns = iter([2, 2, 0, 2, 0, 0, 2] + [2] * 40)
    served.steps.drafting.drafts = lambda rows: next(turns) if rows else 2  # type: ignore[method-assign]
    seen: list[tuple[int, int, Any]] = []
    relay, drafter = served.program.relay, served.drafter
    assert drafter is not None
    apply = served.steps.apply

    def look(view: Any) -> Any:
        served.device.synchronize()
        seen.append((int(relay.length.array[1]), int(drafter._first.array[1]), drafter._state.array[1].copy()))
        return apply(view)

    served.steps.apply = look  # type: ignore[method-assign]
    (got,) = served.run()
    served.device.close()
    example = Writer(config.model, 1, 80, 1, "float32").answer([prompts[0]], 40)[0]
    assert example.tokens[example.prompt :][: len(got)].tolist() == got
    tokens, hidden = torch.from_numpy(example.tokens.astype(np.int64))[None], torch.from_numpy(example.hidden)[None]
    weights = {name: value.bfloat16().float() for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(weights)
    with torch.no_grad():
        (states,) = unroll(trainer.model, tokens, hidden.float(), 1)
        firsts = trainer.model.vocabulary[trainer.model.logits(states).argmax(-1)][0]
    checked = 0
    for length, first, state in seen:
        if len(prompts[0]) <= length < min(len(prompts[0]) + len(got), states.shape[1]):
            wanted = states[0, length - 1].numpy()
            assert np.abs(state - wanted).max() < 0.02 * np.abs(wanted).max()
            assert first == int(firsts[length - 1])
            checked += 1
    assert checked > 5


def audited(model: Path, trainer: Trainer, prompt: list[int], device: AuditDevice) -> AuditDevice:
    """Each step ends before the scheduler goes on: what it writes meanwhile is not the step's."""
    config = with_drafter(config_of(model, max_running=1), trainer, 3)
    served = Served(config, [Asked(prompt=prompt, max_new=5)], device)
    push = served._push

    def push_and_wait() -> bool:
        pushed = push()
        device.synchronize()
        return pushed

    served._push = push_and_wait  # type: ignore[method-assign]
    served.run()
    return device


def test_it_touches_what_it_declares(model: Path, trainer: Trainer, prompts: list[list[int]]) -> None:
    device = audited(model, trainer, prompts[0], AuditDevice())
    assert {"draft", "draft extend", "note tails", "model"} <= device.audited
    device.close()


@pytest.mark.parametrize(
    ("name", "kind", "buffer"),
    [
        ("draft", "reads", "mtp.state"),
        ("draft", "writes", "batch.tokens"),
        ("draft extend", "reads", "target.state"),
        ("draft extend", "reads", "batch.targets"),
        ("draft extend", "writes", "mtp.first"),
        ("note tails", "writes", "mtp.tails"),
        ("model", "writes", "target.state"),
    ],
)
def test_what_it_does_not_declare_is_seen(
    model: Path, trainer: Trainer, prompts: list[list[int]], name: str, kind: str, buffer: str
) -> None:
    device = forgetful(name, kind, buffer)
    with pytest.raises(Exception, match=name):
        audited(model, trainer, prompts[0], device)
