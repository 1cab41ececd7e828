"""Training of a drafter, on a tiny model: its data, its arithmetic, its checkpoints, and what is shipped."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from gpu.models.drafter_weights import DrafterWeights
from gpu.models.weights import open_weights
from procs.model_info import read_model_info
from shm.drafter_file import DrafterFile
from tests.model_factory import TinyLlama
from tools import train_drafter
from tools.drafter_data import (
    SPLITS,
    Example,
    Writer,
    conversations,
    default_taps,
    load_shard,
    questions_of,
    save_shard,
    split_of,
)
from tools.drafter_loss import UNKNOWN, accept_length, loss_of, places_of, runs_of, wanted_of
from tools.drafter_model import TargetParts, side_by_side
from tools.train_drafter import Settings, Trainer, make_drafter, write_data

TALK = [
    {"id": f"talk{i}_0", "conversations": [{"from": "human", "value": f"say {i} {'la ' * (i % 5)}"}]}
    for i in range(400)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    TinyLlama().write_hf(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("talk") / "talk.json"
    file.write_text(json.dumps(TALK)[:-30])  # cut off, as the real one is
    return file


def settings(model: Path, **changes: Any) -> Settings:
    small = Settings(
        model=str(model), drafts=2, draft_vocabulary=200, prompt_tokens=60, answer_tokens=12, batch=4, shards=3,
        shard_batches=1, held_out_batches=1, step_tokens=60, epochs=6.0, rate=1e-2, threads=1, mask=5,
    )  # fmt: skip
    return replace(small, **changes)


def test_conversations_are_read_up_to_where_the_file_is_cut_off(source: Path) -> None:
    found = list(conversations(source))
    assert found[:2] == [("talk0", "say 0 "), ("talk1", "say 1 la ")]
    assert len(found) in (398, 399)


def test_what_is_asked_in_training_is_asked_in_no_test(tmp_path: Path) -> None:
    """In other letters and blanks as well."""
    talk = [{"id": f"talk{i}_0", "conversations": [{"from": "human", "value": f"say  {i // 2}\n"}]} for i in range(800)]
    for i in range(0, 800, 2):
        talk[i]["conversations"][0]["value"] = f"Say {i // 2}"
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(talk))
    asked = {split: {" ".join(q.lower().split()) for q in questions_of(file, split)} for split in SPLITS}
    assert not asked["train"] & (asked["validation"] | asked["test"])
    alone = {i // 2 for i in range(800) if split_of(f"talk{i}") == "test"}
    alone -= {i // 2 for i in range(800) if split_of(f"talk{i}") == "train"}
    assert asked["test"] == {f"say {number}" for number in alone}


def test_a_conversation_has_its_split_for_ever() -> None:
    assert [split_of(f"talk{i}") for i in (0, 15, 1)] == ["test", "validation", "train"]
    found = Counter(split_of(f"talk{i}") for i in range(8000))
    assert set(found) == set(SPLITS) and 150 < found["validation"] < 250 and 150 < found["test"] < 250
    assert [split_of(name) for name in ("a", "b", "c")] == [split_of(name) for name in ("a", "b", "c")]


def test_answers_are_greedy_and_states_those_of_the_target(model: Path) -> None:
    """Alone or in a batch, and each state gives the logits of the token behind it."""
    info = read_model_info(model)
    prompts = [[5, 9, 20], [7, 7, 8, 30, 11], [100]]
    together = Writer(info, 3, 24, 1, "float32").answer(prompts, 8)
    alone = [Writer(info, 1, 24, 1, "float32").answer([prompt], 8)[0] for prompt in prompts]
    weights = open_weights(info)
    norm = torch.from_numpy(weights.tensor("model.norm.weight"))
    head = torch.from_numpy(weights.tensor("lm_head.weight"))
    for one, other in zip(together, alone, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_array_equal(one.states, other.states)
        np.testing.assert_array_equal(one.sizes, other.sizes)
        state = torch.from_numpy(one.states[:, -1].astype(np.float32))
        best = functional.linear(state * norm, head).argmax(-1)
        assert best[one.prompt - 1 :].tolist() == one.tokens[one.prompt :].tolist()


def test_shards_come_back_as_they_were(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = [
        Example(
            np.arange(n, dtype=np.int32), 2, rng.random((n - 1, 2, 4)).astype(np.float16),
            rng.random((n - 1, 2)).astype(np.float32),
        )
        for n in (3, 7, 4)
    ]  # fmt: skip
    save_shard(tmp_path / "s.safetensors", made)
    for a, b in zip(made, load_shard(tmp_path / "s.safetensors"), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.prompt == b.prompt
        np.testing.assert_array_equal(a.states, b.states)
        np.testing.assert_array_equal(a.sizes, b.sizes)


def tiny(model: Path, kind: str = "mtp") -> Any:
    info = read_model_info(model)
    torch.manual_seed(3)
    made = make_drafter(settings(model, kind=kind), info, torch.arange(info.vocab_size), 2.0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def example_of(info: Any, count: int, prompt: int, seed: int = 1) -> Example:
    rng = np.random.default_rng(seed)
    shape = (count - 1, len(default_taps(info.num_layers)), info.hidden_size)
    states = rng.standard_normal(shape)
    states /= np.sqrt(np.square(states).mean(axis=2, keepdims=True))
    sizes = np.ones(shape[:2], np.float32)
    return Example(rng.integers(0, 300, count).astype(np.int32), prompt, states.astype(np.float16), sizes)


def drafted_one_by_one(drafter: Any, example: Example, place: int, drafts: int) -> list[int]:
    """From the token behind `place` on, each draft put into the text before the next one is asked for: the window that
    begins there is the only one, and nothing behind it is known.
    """
    text, made = example.tokens[: place + 2].copy(), []
    for number in range(drafts):
        longer = np.concatenate([text, np.zeros(1, np.int32)])
        states = np.zeros((len(longer) - 1, *example.states.shape[1:]), np.float16)
        states[: place + 1] = example.states[: place + 1]
        # At least two places from which windows begin: the one that counts is the first.
        one = side_by_side([Example(longer, place + 1, states, np.ones(states.shape[:2], np.float32))])
        state = drafter.states(one, drafts)[number][0, 0]
        made.append(int(drafter.target.vocabulary[drafter.logits(state).argmax(-1)]))
        text = np.concatenate([text, np.array(made[-1:], np.int32)])
    return made


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_drafts_come_from_what_is_known_where_their_window_begins(model: Path, kind: str) -> None:
    """All windows of a text at once say what each says alone, with its right drafts in the text and no state behind."""
    drafter = tiny(model, kind)
    example = example_of(drafter.info, 14, 4)
    whole = side_by_side([example, example_of(drafter.info, 9, 2, seed=2)])
    states = drafter.states(whole, 3)
    checked = 0
    for place in range(3, 9):
        text = example.tokens.copy()
        for number in range(3):
            # what was drafted before is right: only so do windows of a training text go on
            alone = Example(text[: place + number + 3], place + 1, example.states[: place + number + 2].copy(),
                            example.sizes[: place + number + 2])  # fmt: skip
            alone.states[place + 1 :] = 0
            lone = drafter.states(side_by_side([alone]), 3)[number][0, 0]
            torch.testing.assert_close(lone, states[number][0, place - 3], rtol=1e-4, atol=1e-4)
            checked += 1
    assert checked == 18


def test_runs_are_those_of_the_windows_that_follow_on_each_other(model: Path) -> None:
    """Against drafting itself, token by token, until one is wrong; the next window begins there."""
    for kind in ("mtp", "dflash"):
        drafter = tiny(model, kind)
        examples = [example_of(drafter.info, count, 3, seed=count) for count in (9, 12)]
        for example in examples:  # make what it says right, now and then
            for place in range(2, len(example.tokens) - 4, 3):
                drafts = drafted_one_by_one(drafter, example, place, 2)
                example.tokens[place + 2 : place + 4] = drafts
        examples[0].tokens[5] += 1  # and one is wrong again
        found: list[int] = []
        for example in examples:
            text = example.tokens.tolist()
            place = example.prompt - 1
            while place < len(text) - 2:
                drafts, run = drafted_one_by_one(drafter, example, place, 2), 0
                while run < 2 and place + run + 2 < len(text) and drafts[run] == text[place + run + 2]:
                    run += 1
                found.append(run)
                place += run + 1
        assert runs_of(drafter, examples, 2, 200) == Counter(found)
        assert set(found) == {0, 1, 2}, "none, one and two drafts in a row"
        short = [example_of(drafter.info, 5, 4)]  # an answer of one token: there is nothing to draft
        assert not runs_of(drafter, short, 3, 200)
    assert accept_length(Counter({0: 2, 1: 1, 3: 1})) == 2.0


def test_what_a_draft_should_be(model: Path) -> None:
    """The target's own probabilities, and the token that it chose; that one alone where `hard` is 1."""
    drafter = tiny(model)
    size = drafter.info.vocab_size
    known = places_of(torch.arange(0, size, 2), size)
    assert known[:5].tolist() == [0, UNKNOWN, 1, UNKNOWN, 2]
    drafter.target = TargetParts(drafter.info, open_weights(drafter.info), torch.arange(0, size, 2))
    example = example_of(drafter.info, 10, 4)
    example.tokens[5:] = [8, 9, 10, 11, 12]
    answers = side_by_side([example])
    wanted, rows = wanted_of(drafter, answers, known, 1.0)
    assert rows.tolist() == [[0, 1, 2, 3, 4, UNKNOWN]]
    assert wanted.argmax(-1)[[0, 2, 4]].tolist() == [4, 5, 6] and wanted[[0, 2, 4]].sum(-1).tolist() == [1, 1, 1]
    assert 0 < wanted[1].max() < 1, "a token that cannot be drafted: what the target finds probable is all there is"
    soft, _ = wanted_of(drafter, answers, known, 0.0)
    logits = drafter.target.teacher(answers.states[0, 4:9])
    torch.testing.assert_close(soft, logits.softmax(-1))


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_it_learns_goes_on_where_it_stopped_and_ships(model: Path, source: Path, tmp_path: Path, kind: str) -> None:
    wanted = settings(model, kind=kind)
    examples = write_data(wanted, source, tmp_path / "data")
    before = sorted((tmp_path / "data").rglob("*.safetensors"))
    assert len(before) == 5 and all(examples[split] for split in SPLITS)
    whole = Trainer(wanted, tmp_path / "whole", examples)
    (tmp_path / "whole").mkdir()
    first = loss_of(whole.model, side_by_side(examples["train"]), whole.known, 2, 1.0).item()
    whole.run()
    assert loss_of(whole.model, side_by_side(examples["train"]), whole.known, 2, 1.0).item() < 0.7 * first

    (tmp_path / "parts").mkdir()
    part = Trainer(wanted, tmp_path / "parts", examples)
    steps, part.steps = part.steps, 7
    schedule, part.steps = part.steps, steps
    for batch in part._order():
        part._learn(batch)
        if part.step == schedule:
            break
    part.save()
    again = Trainer(wanted, tmp_path / "parts", write_data(wanted, source, tmp_path / "data"))
    again.run()
    assert again.losses == whole.losses
    told = again.ship("a command")
    whole.ship("a command")
    files = [tmp_path / name / "drafter.safetensors" for name in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes(), "bit for bit"
    assert told["command"] == "a command" and told["test_accept_length"] >= 1  # type: ignore[operator]
    file = DrafterFile(tmp_path / "parts" / "drafter.safetensors")
    file.check(whole.model.info)
    assert file.kind == kind and file.taps == default_taps(whole.model.info.num_layers)
    for name, value in again.model.state_dict().items():  # which has the weights of the file now
        np.testing.assert_allclose(DrafterWeights(file).tensor(name), value.numpy(), rtol=1e-6, atol=1e-9)
    assert json.loads((tmp_path / "parts" / "drafter.json").read_text()) == told
    assert (tmp_path / "parts" / "loss.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match="other settings"):
        Trainer(replace(wanted, rate=1.0), tmp_path / "parts", examples).run()
    less = {**examples, "train": examples["train"][1:]}
    with pytest.raises(ValueError, match="other answers"):
        Trainer(wanted, tmp_path / "parts", less).run()
    for changed in ({"answer_tokens": 11}, {"batch": 2}):
        with pytest.raises(ValueError, match="other settings"):
            write_data(replace(wanted, **changed), source, tmp_path / "data")
    fewer = write_data(replace(wanted, shards=2), source, tmp_path / "data")
    assert len(fewer["train"]) < len(examples["train"]), "so many shards as are asked for"
    (tmp_path / "data" / "made.json").unlink()
    with pytest.raises(ValueError, match=r"has no made.json"):
        write_data(wanted, source, tmp_path / "data")


def test_masks_have_to_be_tokens_of_the_model(model: Path) -> None:
    info = read_model_info(model)
    with pytest.raises(ValueError, match="--mask: must be 0 to"):
        make_drafter(settings(model, kind="dflash", mask=info.vocab_size - 14), info, torch.arange(9), 1.0)


def test_what_cannot_be_is_one_clear_line(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, says in (
        (["--kind", "mpt"], "--kind: must be mtp or dflash, got 'mpt'"),
        (["--sharegpt", str(tmp_path / "none.json")], "none.json"),
    ):
        with pytest.raises(SystemExit):
            train_drafter.main(["--sharegpt", str(source), "--out", str(tmp_path / "out"), *given])
        assert says in capsys.readouterr().err


def test_what_is_there_is_not_made_again(model: Path, source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    wanted = settings(model, shards=2)
    write_data(wanted, source, tmp_path)
    (tmp_path / "train" / "shard000.safetensors").unlink()
    kept = (tmp_path / "train" / "shard001.safetensors").read_bytes()
    write_data(wanted, source, tmp_path)
    assert (tmp_path / "train" / "shard001.safetensors").read_bytes() == kept
    monkeypatch.setattr(train_drafter, "Writer", None)  # nothing is left to be written
    assert len(write_data(wanted, source, tmp_path)["train"]) == 8
    assert random.Random("1 0").random() == random.Random("1 0").random()
