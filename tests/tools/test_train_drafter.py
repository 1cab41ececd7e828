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

from gpu.models.weights import open_weights
from procs.model_info import read_model_info
from tests.model_factory import TinyLlama
from tools import train_drafter
from tools.drafter_data import SPLITS, Example, Writer, conversations, load_shard, save_shard, split_of
from tools.drafter_model import Keys, Mtp, unroll
from tools.train_drafter import (
    IGNORED,
    Settings,
    Trainer,
    accept_length,
    loss_of,
    places_of,
    read_metadata,
    runs_of,
    targets,
    write_data,
)

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
        shard_batches=1, held_out_batches=1, train_tokens=200, epochs=6.0, rate=3e-3, threads=1,
    )  # fmt: skip
    return replace(small, **changes)


def test_conversations_are_read_up_to_where_the_file_is_cut_off(source: Path) -> None:
    found = list(conversations(source))
    assert found[:2] == [("talk0", "say 0 "), ("talk1", "say 1 la ")]
    assert len(found) in (398, 399)


def test_a_conversation_has_its_split_for_ever() -> None:
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
        np.testing.assert_array_equal(one.hidden, other.hidden)
        state = torch.from_numpy(one.hidden.astype(np.float32))
        normed = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + info.rms_eps) * norm
        best = functional.linear(normed, head).argmax(-1)
        assert best[one.prompt - 1 :].tolist() == one.tokens[one.prompt :].tolist()


def test_shards_come_back_as_they_were(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = [Example(np.arange(n, dtype=np.int32), 2, rng.random((n - 1, 4)).astype(np.float16)) for n in (3, 7, 4)]
    save_shard(tmp_path / "s.safetensors", made)
    for a, b in zip(made, load_shard(tmp_path / "s.safetensors"), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.prompt == b.prompt
        np.testing.assert_array_equal(a.hidden, b.hidden)


def tiny(model: Path) -> Mtp:
    info = read_model_info(model)
    torch.manual_seed(3)
    made = Mtp(info, open_weights(info), torch.arange(info.vocab_size))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made


def test_the_unrolled_passes_are_those_of_drafting_one_by_one(model: Path) -> None:
    """From place i on: the first pass over all places so far, then one place at a time, each with what came before."""
    mtp = tiny(model)
    tokens, hidden = torch.randint(0, 300, (1, 9)), torch.randn(1, 8, mtp.info.hidden_size)
    states = unroll(mtp, tokens, hidden, 3)
    for i in range(6):
        first, keys = mtp(tokens[:, 1 : i + 2], hidden[:, : i + 1], [])
        torch.testing.assert_close(first[:, i], states[0][:, i])
        state = first[:, i]
        for number in (1, 2):
            place = i + number
            state, keys = one_more(mtp, tokens[:, place + 1], state, place, keys)
            torch.testing.assert_close(state, states[number][:, place])


def one_more(mtp: Mtp, token: Any, state: Any, place: int, keys: Keys) -> tuple[Any, Keys]:
    """A pass over one place, which sees all keys so far and its own: an ordinary decoder with a cache."""
    with torch.no_grad():
        x = mtp.token_in(mtp.token_norm(functional.embedding(token, mtp.embedding)))
        x = (x + mtp.state_in(mtp.state_norm(state)))[:, None]
        normed = mtp.input_norm(x)
        alone = functional.pad(normed, (0, 0, place, 0))  # so that it is rotated as its place is
        q, k = (mtp._heads(part(alone))[:, :, -1:] for part in (mtp.q, mtp.k))
        keys = Keys(torch.cat((keys.k, k), 2), torch.cat((keys.v, mtp._values(mtp.v(normed))), 2))
        group = mtp.info.num_heads // mtp.info.num_kv_heads
        k, v = (part.repeat_interleave(group, dim=1) for part in (keys.k, keys.v))
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + mtp.o(mixed)
        normed = mtp.post_norm(x)
        return (x + mtp.down(functional.silu(mtp.gate(normed)) * mtp.up(normed)))[:, 0], keys


def test_what_a_draft_is_compared_with() -> None:
    """Two tokens of prompt, four of the answer: drafts begin behind the answer's first token."""
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    answer = torch.tensor([[False, False, True, True, True, True]])
    known = places_of(torch.tensor([11, 13, 14, 15]), 20)
    assert known.tolist() == [IGNORED] * 11 + [0, IGNORED, 1, 2, 3] + [IGNORED] * 4
    assert targets(tokens, answer, known, 0).tolist() == [[IGNORED, 1, 2, 3, IGNORED]]
    assert targets(tokens, answer, known, 1).tolist() == [[IGNORED, IGNORED, 2, 3, IGNORED]]


def test_runs_are_counted_from_every_place_at_which_drafts_begin(model: Path) -> None:
    """Against drafting itself: from each place, token by token, until one is wrong."""
    mtp = tiny(model)
    rng = np.random.default_rng(1)
    hidden = mtp.info.hidden_size
    examples = [
        Example(rng.integers(0, 300, n).astype(np.int32), 3, rng.standard_normal((n - 1, hidden)).astype(np.float16))
        for n in (9, 12)
    ]
    spied: list[list[int]] = []
    for example in examples:  # make what it says right, now and then
        tokens, state = torch.from_numpy(example.tokens.astype(np.int64))[None], torch.from_numpy(example.hidden)[None]
        for _ in range(6):
            for number, made in enumerate(unroll(mtp, tokens, state.float(), 2)):
                best = mtp.logits(made).argmax(-1)[0]
                for i in range(2 + number, len(example.tokens) - 2, 3):
                    tokens[0, i + 2] = best[i]
        example.tokens[:] = tokens[0].numpy()
        example.tokens[5] += len(example.tokens) == 9  # and one is wrong again
    for example in examples:
        tokens, state = torch.from_numpy(example.tokens.astype(np.int64))[None], torch.from_numpy(example.hidden)[None]
        text = example.tokens.tolist()
        for i in range(example.prompt - 1, len(text) - 2):
            first, keys = mtp(tokens[:, 1 : i + 2], state[:, : i + 1].float(), [])
            now, run = first[:, i], 0
            for number in range(2):
                draft = int(mtp.logits(now).argmax(-1))
                if i + number + 2 >= len(text) or draft != text[i + number + 2]:
                    break
                run += 1
                now, keys = one_more(mtp, torch.tensor([draft]), now, i + number + 1, keys)
            spied.append([run])
    wanted = Counter(run for (run,) in spied)
    assert runs_of(mtp, examples, settings(model)) == wanted
    assert len(wanted) == 3, "none, one and two drafts in a row"
    assert accept_length(Counter({0: 2, 1: 1, 3: 1})) == 2.0


def test_it_learns_goes_on_where_it_stopped_and_ships(model: Path, source: Path, tmp_path: Path) -> None:
    wanted = settings(model)
    examples = write_data(wanted, source, tmp_path / "data")
    before = sorted((tmp_path / "data").rglob("*.safetensors"))
    assert len(before) == 5 and all(examples[split] for split in SPLITS)
    whole = Trainer(wanted, tmp_path / "whole", examples)
    (tmp_path / "whole").mkdir()
    first = loss_of(whole.model, examples["train"], whole.known, 2).item()
    whole.run()
    assert loss_of(whole.model, examples["train"], whole.known, 2).item() < 0.7 * first

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
    assert told["command"] == "a command" and told["test_accept_length"] >= 1  # type: ignore[operator]
    assert read_metadata(tmp_path / "parts" / "drafter.safetensors") == {"format": "stepahead-mtp"}
    assert json.loads((tmp_path / "parts" / "drafter.json").read_text()) == told
    assert (tmp_path / "parts" / "loss.svg").read_text().startswith("<svg")
    with pytest.raises(ValueError, match="other settings"):
        Trainer(replace(wanted, rate=1.0), tmp_path / "parts", examples).run()


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
