"""Trained drafters in the step program, with the real scheduler: the answers of plain decoding, and a right state.

Each is trained on the tiny target's own answers, so that some of what it says is taken.
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
from gpu.drafters.dflash import DflashDrafter
from gpu.drafters.mtp import MtpDrafter
from gpu.kernels.host_step import HostStepKernels
from gpu.kernels.sampling import sample
from gpu.kernels.trained import HostTrainedKernels
from gpu.models.host_drafters import HostDflash, HostMtp
from gpu.models.llama import HostLlama
from gpu.models.weights import open_weights
from gpu.step import StepProgram
from procs.model_info import read_model_info
from shm.config import ServerConfig
from shm.drafter_file import DrafterFile
from shm.records import ResultLayout
from tests.gpu.order.served_mill import Asked, ServedMill
from tests.gpu.test_declarations import AuditDevice, forgetful
from tests.model_factory import TinyLlama
from tools.drafter_data import Writer, prompts_of
from tools.drafter_dflash import Dflash
from tools.drafter_model import Answers, side_by_side
from tools.drafter_mtp import Mtp
from tools.train_drafter import Settings, Trainer, write_data

PAGE, DIM = 16, TinyLlama().head_dim
RETRACTED = [("", "some"), ("", "all")]
TALK = [{"id": f"t{i}_0", "conversations": [{"from": "human", "value": f"tell {i}"}]} for i in range(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TinyLlama().write_hf(folder)
    return folder


def trained(model: Path, folder: Path, kind: str) -> Trainer:
    (folder / "talk.json").write_text(json.dumps(TALK))
    settings = Settings(
        kind=kind, model=str(model), drafts=2, draft_vocabulary=300, prompt_tokens=60, answer_tokens=24, batch=8,
        shards=2, shard_batches=1, held_out_batches=1, step_tokens=200, epochs=25.0, rate=4e-3, threads=1, mask=5,
    )  # fmt: skip
    made = Trainer(settings, folder, write_data(settings, folder / "talk.json", folder / "data"))
    made.run()
    made.ship("a test")
    return made


@pytest.fixture(scope="module")
def mtp(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return trained(model, tmp_path_factory.mktemp("mtp"), "mtp")


@pytest.fixture(scope="module")
def dflash(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return trained(model, tmp_path_factory.mktemp("dflash"), "dflash")


@pytest.fixture(params=["mtp", "dflash"])
def trainer(request: pytest.FixtureRequest) -> Trainer:
    made: Trainer = request.getfixturevalue(request.param)
    return made


@pytest.fixture(scope="module")
def prompts(model: Path, mtp: Trainer) -> list[list[int]]:
    """Those that they were trained on."""
    chosen = prompts_of(mtp.folder / "talk.json", model, "train", 60)
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
        self.drafter: Any = None
        super().__init__(device or HostDevice(), config, asked)

    def make_program(self, device: Any, config: ServerConfig, drafting: str, options: dict[str, Any]) -> StepProgram:
        weights = open_weights(config.model)
        file = None if config.drafter_file is None else DrafterFile(Path(config.drafter_file))
        target = HostLlama(
            config.model, weights, "float32", page_size=config.page_size, pages=config.pages,
            pages_per_row=config.pages_per_row, max_tokens=config.pass_tokens,
            max_seqs=ResultLayout(config).max_rows * config.window, threads=1, taps=file.taps if file else (),
        )  # fmt: skip
        if file is not None and file.kind == "dflash":
            dflash = HostDflash(target, weights, file)
            self.drafter = DflashDrafter(device, config, dflash, target.tapped, HostTrainedKernels())
        elif file is not None:
            mtp = HostMtp(target, weights, file)
            self.drafter = MtpDrafter(device, config, mtp, target.tapped, HostTrainedKernels())
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
    return replace(config, speculate=trainer.settings.kind, window=1 + drafts, drafter_file=file)


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_the_answers_are_those_of_plain_decoding(
    model: Path, trainer: Trainer, prompts: list[list[int]], drafts: int
) -> None:
    """In chunks of a part of a prompt, with prefixes that are found, and with rows that are retracted."""
    config = config_of(model)
    wanted, _ = serve(config, prompts, 24)
    got, served = serve(with_drafter(config, trainer, drafts), prompts, 24)
    assert got == wanted
    assert accepted(served) > 10, "it was trained for this"
    retractions = 0
    for kv_tokens in (96, 112, 128):  # which of them is too small for what runs at once depends on what is drafted
        got, served = serve(with_drafter(config_of(model, kv_tokens=kv_tokens), trainer, drafts), prompts, 24)
        assert got == wanted
        retractions += int(served.total("retractions_total"))
    assert retractions > 0
    assert (
        serve(with_drafter(config, trainer, drafts), prompts, 24, temperature=0.9)[0]
        == (serve(config, prompts, 24, temperature=0.9)[0])
    )


def watched(
    model: Path, trainer: Trainer, prompt: list[int], look: Any, before: list[int], retract: str = "nothing"
) -> tuple[list[int], Answers]:
    """Serve one request with windows and steps without drafts in turn; look(length, drafter, pages) sees each step's
    end. before: a prompt that is served first, if any. retract: take the request's pages away amid, of which it finds
    "some" again or, with "all", none. Returns the answer, and what the target alone makes of the whole text.
    """
    config = with_drafter(config_of(model, max_running=1), trainer, 2)
    asked = [Asked(prompt=before, max_new=4)] if before else []
    served = Served(config, [*asked, Asked(prompt=prompt, max_new=23)])
    turns = iter([2, 2, 0, 2, 0, 0, 2] + [2] * 40)
    served.steps.drafting.drafts = lambda rows, mixed: next(turns) if rows else 2  # type: ignore[method-assign]
    apply = served.steps.apply

    def look_and_apply(view: Any) -> Any:
        served.device.synchronize()
        complete = served.rows.state.cursor[1] == served.rows.state.fill[1]  # or else the length is of another life
        if served.total("finished_total") == len(asked) and complete:
            pages = served.rows.state.pages[1].copy()
            look(int(served.program.relay.length.array[1]), served.drafter, pages)
        flight = apply(view)
        rows = served.rows
        if retract != "nothing" and rows.state.outputs[1] > 7 and not served.total("retractions_total"):
            rows._retract(1)
            rows.pool.give(rows.cache.evict(rows.cache.evictable if retract == "all" else 0))
        return flight

    served.steps.apply = look_and_apply  # type: ignore[method-assign]
    got = served.run()[-1]
    assert served.total("retractions_total") == (retract != "nothing")
    assert bool(before or retract == "some") == (served.total("prefix_hit_tokens_total") > 0)
    served.device.close()
    example = Writer(config.model, 1, 80, 1, "float32").answer([prompt], 40)[0]
    assert example.tokens[example.prompt :][: len(got)].tolist() == got
    return got, side_by_side([replace(example, prompt=1)])  # windows may begin anywhere


def met_before(prompt: list[int], other: int) -> list[int]:
    """A prompt whose first page is that of `prompt`, or (other) all of it but for the token behind the page."""
    return [*prompt[:PAGE], *([other] if other else prompt[PAGE : PAGE + 1]), 9, 9, 9]


@pytest.mark.parametrize(("before", "retract"), [("", "nothing"), ("a prompt that begins so", "nothing"), *RETRACTED])
def test_the_state_of_mtp_is_what_torch_makes_of_the_whole_text(
    model: Path, mtp: Trainer, prompts: list[list[int]], before: str, retract: str
) -> None:
    """After chunks, windows and steps without drafts: what the row's last place joins, and all
    keys and values.
    """
    seen: list[tuple[Any, ...]] = []

    def look(length: int, drafter: MtpDrafter, pages: Any) -> None:
        places = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        made = keys_of(drafter._model.k_cache), values_of(drafter._model.v_cache)
        seen.append((length, drafter._state.array[1].copy(), *(part[0, places] for part in made)))

    first = met_before(prompts[0], 0) if before else []
    got, answers = watched(model, mtp, prompts[0], look, first, retract)
    drafter = mtp.model
    assert isinstance(drafter, Mtp)
    with torch.no_grad():
        behind = drafter.token_in(drafter.token_norm(drafter.target.embed(answers.tokens[:, 1:]))).float()
        joined = behind + drafter.target_in(answers.states)[:, : behind.shape[1]].float()
        (layer,) = drafter.layers
        normed, everywhere = layer.input_norm(joined), torch.arange(joined.shape[1])
        keys, values = drafter.heads.rotate(layer.k(normed), everywhere)[0], drafter.heads.split(layer.v(normed))[0]
    checked = 0
    for length, state, *caches in seen:
        if len(prompts[0]) <= length < min(len(prompts[0]) + len(got), joined.shape[1]):
            wanted = joined[0, length - 1].numpy()
            assert np.abs(state - wanted).max() < 0.02 * np.abs(wanted).max()
            for found, one in zip(caches, (keys, values), strict=True):
                exact = one[:, :length].numpy().swapaxes(0, 1)
                assert np.abs(found[:length] - exact).max() < 0.02 * np.abs(exact).max()
            checked += 1
    assert checked > 5


def test_mtp_shares_no_page_whose_next_token_is_another(model: Path, mtp: Trainer, prompts: list[list[int]]) -> None:
    """What it keeps of a page's last place follows from the token behind it."""
    with pytest.raises(AssertionError, match="assert True == "):
        watched(model, mtp, prompts[0], lambda *_: None, met_before(prompts[0], 9))


@pytest.mark.parametrize(("before", "retract"), [("", "nothing"), ("a prompt that begins so", "nothing"), *RETRACTED])
def test_the_cache_of_dflash_is_what_torch_makes_of_the_whole_text(
    model: Path, dflash: Trainer, prompts: list[list[int]], before: str, retract: str
) -> None:
    """The keys and values of every place that counts, in every layer, where the row's pages say; and what the next
    block begins with.
    """
    seen: list[tuple[Any, ...]] = []

    def look(length: int, drafter: DflashDrafter, pages: Any) -> None:
        places = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
        made = keys_of(drafter._model.k_cache), values_of(drafter._model.v_cache)
        seen.append((length, drafter._state.array[1].copy(), *(part[:, places] for part in made)))

    first = met_before(prompts[0], 9) if before else []
    got, answers = watched(model, dflash, prompts[0], look, first, retract)
    drafter = dflash.model
    assert isinstance(drafter, Dflash)
    with torch.no_grad():
        known = drafter.target_in(answers.states)
        everywhere = torch.arange(known.shape[1])
        keys = [drafter.heads.rotate(layer.k(layer.input_norm(known)), everywhere)[0] for layer in drafter.layers]
        values = [drafter.heads.split(layer.v(layer.input_norm(known)))[0] for layer in drafter.layers]
    checked = 0
    for length, state, *caches in seen:
        if len(prompts[0]) <= length < min(len(prompts[0]) + len(got), known.shape[1]):
            joined = known[0, length - 1].numpy()
            assert np.abs(state - joined).max() < 0.02 * np.abs(joined).max()
            for found, wanted in zip(caches, (keys, values), strict=True):
                for layer, one in enumerate(wanted):
                    last = min(length, one.shape[1])
                    exact = one[:, :last].numpy().swapaxes(0, 1)
                    assert np.abs(found[layer][:last] - exact).max() < 0.02 * np.abs(exact).max()
            checked += 1
    assert checked > 5


def keys_of(cache: Any) -> Any:
    """f32[layers, slots, kv_heads, dim] of keys [layers, pages, kv_heads, dim * page]."""
    layers, pages, heads, _ = cache.shape
    return cache.reshape(layers, pages, heads, -1, PAGE).transpose(0, 1, 4, 2, 3).reshape(layers, -1, heads, DIM)


def values_of(cache: Any) -> Any:
    """f32[layers, slots, kv_heads, dim] of values [layers, pages, kv_heads, page * dim]."""
    layers, pages, heads, _ = cache.shape
    return cache.reshape(layers, pages, heads, PAGE, -1).transpose(0, 1, 3, 2, 4).reshape(layers, -1, heads, DIM)


def audited(model: Path, trainer: Trainer, prompt: list[int], device: AuditDevice) -> AuditDevice:
    """Each step ends before the scheduler goes on: what it writes meanwhile is not the step's. Nor does any run while
    it is queued: an audit changes for a moment what the queueing reads.
    """
    config = with_drafter(config_of(model, max_running=1), trainer, 3)
    served = Served(config, [Asked(prompt=prompt, max_new=5)], device)
    push = served._push

    def push_and_wait() -> bool:
        with device.one_at_a_time:
            pushed = push()
        device.synchronize()
        return pushed

    served._push = push_and_wait  # type: ignore[method-assign]
    served.run()
    return device


def test_it_touches_what_it_declares(model: Path, trainer: Trainer, prompts: list[list[int]]) -> None:
    device = audited(model, trainer, prompts[0], AuditDevice())
    assert {"draft", "draft extend", "model"} <= device.audited
    device.close()


DECLARED = [
    ("mtp", "draft", "reads", "mtp.state"),
    ("mtp", "draft", "writes", "batch.tokens"),
    ("mtp", "draft extend", "reads", "target.states"),
    ("mtp", "draft extend", "reads", "batch.targets"),
    ("mtp", "draft extend", "writes", "mtp.state"),
    ("mtp", "note tails", "writes", "mtp.tails"),
    ("mtp", "model", "writes", "target.states"),
    ("dflash", "draft", "reads", "batch.positions"),
    ("dflash", "draft", "writes", "batch.tokens"),
    ("dflash", "draft", "writes", "dflash.blocks"),
    ("dflash", "draft", "reads", "dflash.state"),
    ("dflash", "draft extend", "writes", "dflash.state"),
    ("dflash", "draft extend", "reads", "target.states"),
    ("dflash", "draft extend", "writes", "dflash.k_cache"),
    ("dflash", "model", "writes", "target.states"),
]


@pytest.mark.parametrize(("trainer", "name", "kind", "buffer"), DECLARED, indirect=["trainer"])
def test_what_it_does_not_declare_is_seen(
    model: Path, trainer: Trainer, prompts: list[list[int]], name: str, kind: str, buffer: str
) -> None:
    device = forgetful(name, kind, buffer)
    with pytest.raises(Exception, match=name):
        audited(model, trainer, prompts[0], device)
