"""The tokenizer stage between a frontend and a scheduler that the test plays, over real rings and channels."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from procs import prompt_encoder
from procs.prompt_encoder import PromptEncoder
from procs.tokenizer import TokenizerStage, load_template
from procs.tokenizer_files import load_tokenizer
from shm.limits import INTAKE_RING_SLOTS, INTAKE_ROWS_MAX, MAX_STOP_TOKEN_IDS
from tests.model_factory import TinyLlama, vocabulary
from tests.procs.text_rig import TextRig

PARAMS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_k": 7,
    "seed": 2**63 + 5,
    "max_tokens": None,
    "stop": ["stop", "é😀"],
    "stop_token_ids": [7, 9],
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(layers=1).write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def rig(path: Path) -> Iterator[TextRig]:
    rig = TextRig(path)
    yield rig
    rig.close()


class Stage:
    """The stage without its process: `kicked` counts long texts, `wait` is what it does when the ring is full."""

    def __init__(self, rig: TextRig) -> None:
        self.child = rig.child("tokenizer")
        self.tokenizer = load_tokenizer(rig.config.model.path)
        self.intake = rig.scheduler.ring_consumer("intake")
        self.kicked = 0
        self.wait: Callable[[Callable[[], bool]], bool] = lambda condition: condition()
        self.stage = TokenizerStage(
            rig.config,
            self.child.ledger,
            self.child.ring_producer("intake"),
            rig.sender("frontend"),
            PromptEncoder(self.tokenizer, self._kick),
            load_template(rig.config.model.path),
            self.child.stats_writer(),
            self.child.trace(),
            self._wait_for,
        )

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        return self.wait(condition)

    def _kick(self) -> None:
        self.kicked += 1


@pytest.fixture
def stage(rig: TextRig) -> Stage:
    return Stage(rig)


def generate(row: int, gen: int, prompt: Any = "the answer", kind: str = "text", **changes: Any) -> dict[str, Any]:
    params = {**PARAMS, **{name: value for name, value in changes.items() if name in PARAMS}}
    message = {"op": "generate", "row": row, "gen": gen, "kind": kind, "params": params, "default_max_tokens": 16}
    message["messages" if kind == "chat" else "prompt"] = prompt
    return {**message, **{name: value for name, value in changes.items() if name not in PARAMS}}


def test_a_row_is_written_whole(rig: TextRig, stage: Stage) -> None:
    gen = rig.open(3)
    stage.stage.take([generate(3, gen)])
    ids = stage.tokenizer.encode("the answer").ids
    assert rig.take_intake(stage.intake) == [(3, gen)]
    assert rig.receive() == [{"ev": "accepted", "row": 3, "gen": gen, "prompt_tokens": len(ids)}]
    ledger = rig.ledger
    assert ledger.ready[3] == gen
    assert ledger.tokens[3, : ledger.prompt_len[3]].tolist() == ids
    assert ledger.stop_strings(3) == PARAMS["stop"]
    assert ledger.stop_ids[3].tolist() == [7, 9] + [-1] * (MAX_STOP_TOKEN_IDS - 2)
    assert (ledger.top_k[3], ledger.seed[3], ledger.max_new[3], ledger.ignore_eos[3]) == (7, 2**63 + 5, 16, 1)
    assert np.allclose((ledger.temperature[3], ledger.top_p[3], ledger.min_p[3]), (0.5, 0.9, 0.1))


def test_nothing_of_an_earlier_request_is_left(rig: TextRig, stage: Stage) -> None:
    stage.stage.take([generate(0, rig.open(0), "a long prompt, longer than the next")])
    gen = rig.open(0)
    stage.stage.take([generate(0, gen, [5, 6], "ids", stop=[], stop_token_ids=[], max_tokens=1)])
    assert rig.ledger.stop_strings(0) == []
    assert rig.ledger.stop_ids[0].tolist() == [-1] * MAX_STOP_TOKEN_IDS
    assert (rig.ledger.prompt_len[0], rig.ledger.max_new[0], rig.ledger.ready[0]) == (2, 1, gen)


def test_chat_is_rendered_and_encoded_once(rig: TextRig, stage: Stage) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    stage.stage.take([generate(1, rig.open(1), messages, "chat", default_max_tokens=None)])
    expected = stage.tokenizer.encode(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    ).ids
    assert rig.ledger.tokens[1, : len(expected)].tolist() == expected
    assert expected[0] == 1, "a special token, not its letters"
    assert rig.ledger.max_new[1] == rig.config.max_len - len(expected)


def test_a_bos_token_is_added_to_text_but_not_to_a_rendered_chat(rig: TextRig, stage: Stage) -> None:
    bos = "<|endoftext|>"
    stage.tokenizer.post_processor = TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, 0)])
    messages = [{"role": "user", "content": "hi"}]
    stage.stage.take(
        [
            generate(0, rig.open(0), "hi"),
            generate(1, rig.open(1), messages, "chat"),
            generate(2, rig.open(2), [5, 6], "ids"),
            {"op": "tokenize", "id": 1, "prompt": "hi"},
            {"op": "tokenize", "id": 2, "prompt": "hi", "add_special_tokens": False},
            {"op": "tokenize", "id": 3, "messages": messages},
        ]
    )
    assert rig.ledger.tokens[:3, 0].tolist() == [0, 1, 5]
    counts = {answer["id"]: answer["count"] for answer in rig.receive(6) if answer["ev"] == "tokenized"}
    assert counts[1] == counts[2] + 1 == rig.ledger.prompt_len[0]
    assert counts[3] == rig.ledger.prompt_len[1]


MAX_LEN = 128
VOCAB = len(vocabulary())
FITS = [5] * (MAX_LEN - 1)


@pytest.mark.parametrize(
    ("kind", "prompt", "changes", "param"),
    [
        ("text", "", {}, "prompt"),
        ("ids", [], {}, "prompt"),
        ("ids", [-1], {}, "prompt"),
        ("ids", [VOCAB], {}, "prompt"),
        ("ids", [*FITS, 5], {}, "prompt"),
        ("ids", [*FITS, 5, 5], {}, "prompt"),
        ("ids", "text", {}, "prompt"),
        ("ids", FITS, {"max_tokens": 2}, "max_tokens"),
        ("text", "word " * 1000, {}, "prompt"),
        ("text", "x" * 200_000, {}, "prompt"),
        ("text", "a\ud800", {}, "prompt"),
        ("text", 5, {}, "prompt"),
        ("text", "a", {"max_tokens": 0}, "max_tokens"),
        ("text", "a", {"max_tokens": 2**40}, "max_tokens"),
        ("text", "a", {"stop": [""]}, "stop"),
        ("text", "a", {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ("text", "a", {"temperature": -1}, "temperature"),
        ("chat", [{"role": "user"}], {}, "messages"),
        ("chat", [], {}, "messages"),
        ("chat", [{"role": "user", "content": "y" * 200_000}], {}, "messages"),
        ("chat", [{"role": "user", "content": "\udfff"}], {}, "messages"),
    ],
)
def test_bad_requests_are_refused(
    rig: TextRig, stage: Stage, kind: str, prompt: object, changes: dict[str, Any], param: str
) -> None:
    gen = rig.open(0)
    stage.stage.take([generate(0, gen, prompt, kind, **changes)])
    (answer,) = rig.receive()
    assert (answer["ev"], answer["row"], answer["gen"]) == ("rejected", 0, gen)
    assert (answer["status"], answer["param"]) == (400, param)
    assert answer["message"] and answer["code"]
    assert rig.ledger.ready[0] != gen
    assert stage.intake.available() == 0


def test_the_longest_prompt_that_fits(rig: TextRig, stage: Stage) -> None:
    gen = rig.open(0)
    stage.stage.take([generate(0, gen, FITS, "ids")])
    assert rig.receive()[0]["prompt_tokens"] == MAX_LEN - 1
    assert rig.ledger.max_new[0] == 1


def test_good_and_bad_requests_side_by_side(rig: TextRig, stage: Stage) -> None:
    gens = {row: rig.open(row) for row in range(20)}
    stage.stage.take([generate(row, gen, "" if row % 3 == 0 else f"prompt {row}") for row, gen in gens.items()])
    answers = {answer["row"]: answer["ev"] for answer in rig.receive(20)}
    assert answers == {row: "rejected" if row % 3 == 0 else "accepted" for row in gens}
    assert rig.take_intake(stage.intake) == [(row, gens[row]) for row in gens if row % 3]


def test_an_abandoned_row_goes_on_without_a_prompt(rig: TextRig, stage: Stage) -> None:
    gen = rig.open(2)
    rig.ledger.abort[2] = gen
    stage.stage.take([generate(2, gen, "")])
    assert (rig.ledger.prompt_len[2], rig.ledger.ready[2]) == (0, gen)
    assert rig.take_intake(stage.intake) == [(2, gen)]
    assert rig.receive()[0]["ev"] == "accepted"


def test_an_abort_of_an_earlier_generation_does_not_count(rig: TextRig, stage: Stage) -> None:
    rig.ledger.abort[2] = rig.open(2)
    gen = rig.open(2)
    stage.stage.take([generate(2, gen)])
    assert rig.receive()[0]["prompt_tokens"] > 0


def test_long_texts_do_not_hold_up_short_ones(rig: TextRig, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_encoder, "LONG_TEXT_CHARS", 50)
    gens = [rig.open(0), rig.open(1)]
    text = "the end " * 10
    stage.stage.take([generate(0, gens[0], text), generate(1, gens[1], "a")])
    assert rig.receive()[0]["row"] == 1
    deadline_s = time.monotonic() + 5
    while not stage.kicked:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    stage.stage.take_long()
    assert rig.receive() == [
        {"ev": "accepted", "row": 0, "gen": gens[0], "prompt_tokens": len(stage.tokenizer.encode(text).ids)}
    ]
    assert [rig.take_intake(stage.intake) for _ in range(2)] == [[(1, gens[1])], [(0, gens[0])]]


def test_a_long_text_whose_client_left_meanwhile(rig: TextRig, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_encoder, "LONG_TEXT_CHARS", 50)
    gen = rig.open(0)
    stage.stage.take([generate(0, gen, "the end " * 10)])
    rig.ledger.abort[0] = gen
    while not stage.kicked:
        time.sleep(0.001)
    stage.stage.take_long()
    assert rig.ledger.prompt_len[0] == 0
    assert rig.take_intake(stage.intake) == [(0, gen)]


def test_questions_come_behind_generations_and_can_be_cancelled(
    rig: TextRig, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_encoder, "LONG_TEXT_CHARS", 50)
    monkeypatch.setattr(prompt_encoder, "LONG_IDS", 50)
    started, go = threading.Event(), threading.Event()
    encode = PromptEncoder._ids
    order: list[str] = []

    def held(self: PromptEncoder, texts: list[str], special: bool) -> list[list[int]]:
        started.set()
        assert go.wait(5)
        order.extend(texts)
        return encode(self, texts, special)

    monkeypatch.setattr(PromptEncoder, "_ids", held)
    text, gen = "the end " * 10, rig.open(0)
    questions = {i: {"op": "tokenize", "id": i, "prompt": f"{i} {text}"} for i in (1, 2, 3)}
    stage.stage.take([questions[1]])
    assert started.wait(5)
    long_ids = [5] * 60
    stage.stage.take([questions[2], questions[3], {"op": "detokenize", "id": 4, "tokens": long_ids}])
    stage.stage.take([generate(0, gen, text)])
    # The first is under way and ends in any case; one that is done or unknown has nothing to cancel.
    stage.stage.take([{"op": "cancel", "id": i} for i in (1, 2, 4, 99)])
    go.set()
    deadline_s = time.monotonic() + 5
    while stage.kicked < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    stage.stage.take_long()
    assert order == ["1 " + text, text, "3 " + text]
    assert [answer.get("id", answer.get("row")) for answer in rig.receive(3)] == [1, 3, 0]
    assert rig.take_intake(stage.intake) == [(0, gen)]


def test_a_full_ring_is_waited_for(rig: TextRig, stage: Stage) -> None:
    taken = []
    waits = 0

    def wait(condition: Callable[[], bool]) -> bool:
        nonlocal waits
        while not condition():
            waits += 1
            taken.extend(rig.take_intake(stage.intake))
        return True

    stage.wait = wait
    expected = []
    for _ in range(INTAKE_RING_SLOTS + 10):
        gen = rig.open(0)
        expected.append((0, gen))
        stage.stage.take([generate(0, gen, [5], "ids")])
    while stage.intake.available():
        taken += rig.take_intake(stage.intake)
    assert waits == 10
    assert taken == expected


def test_many_at_once_go_on_in_groups(path: Path) -> None:
    rig = TextRig(path, max_queued=600)
    stage = Stage(rig)
    gens = [rig.open(row) for row in range(600)]
    stage.stage.take([generate(row, gen, f"number {row} " * 5) for row, gen in enumerate(gens)])
    records = []
    while stage.intake.available():
        records.append(rig.take_intake(stage.intake))
    assert [pair for record in records for pair in record] == list(enumerate(gens))
    assert max(map(len, records)) <= INTAKE_ROWS_MAX
    assert {answer["ev"] for answer in rig.receive(600)} == {"accepted"}
    rig.close()


def test_tokenize_and_detokenize(rig: TextRig, stage: Stage) -> None:
    messages = [{"role": "user", "content": "hi"}]
    stage.stage.take(
        [
            {"op": "tokenize", "id": 1, "prompt": "the <|im_end|>", "add_special_tokens": True},
            {"op": "tokenize", "id": 2, "messages": messages, "add_generation_prompt": False},
            {"op": "detokenize", "id": 3, "tokens": [1, *stage.tokenizer.encode("the é").ids]},
            {"op": "detokenize", "id": 4, "tokens": [VOCAB]},
            {"op": "tokenize", "id": 5, "messages": []},
            {"op": "tokenize", "id": 6, "prompt": ""},
        ]
    )
    answers = {answer["id"]: answer for answer in rig.receive(6)}
    ids = stage.tokenizer.encode("the <|im_end|>").ids
    assert answers[1] == {"ev": "tokenized", "id": 1, "tokens": ids, "count": len(ids)}
    chat = stage.tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n").ids
    assert answers[2]["tokens"] == chat
    assert answers[3] == {"ev": "detokenized", "id": 3, "text": "<|im_start|>the é"}
    assert (answers[4]["ev"], answers[4]["status"], answers[4]["param"]) == ("failed", 400, "tokens")
    assert (answers[5]["ev"], answers[5]["status"], answers[5]["param"]) == ("failed", 400, "messages")
    assert answers[6]["tokens"] == []


def test_a_bug_is_not_a_refusal(stage: Stage) -> None:
    with pytest.raises(KeyError):
        stage.stage.take([{"op": "generate", "row": 0}])


def with_a_token_beyond(folder: Path) -> Path:
    """A model whose tokenizer has one token more than the model has embeddings: "<pad>", id VOCAB."""
    TinyLlama(layers=1).write_hf(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": VOCAB, "content": "<pad>"})
    file.write_text(json.dumps(content))
    assert load_tokenizer(folder).encode("<pad>").ids == [VOCAB]
    return folder


def test_text_with_a_token_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    rig = TextRig(with_a_token_beyond(tmp_path / "hf"), max_len=512)
    try:
        intake = rig.scheduler.ring_consumer("intake")
        with rig.process("tokenizer"):
            sender = rig.sender("tokenizer")
            for row, (kind, prompt) in enumerate(
                [
                    ("text", "a<pad>b"),
                    ("chat", [{"role": "user", "content": "<pad>"}]),
                    ("text", "a"),
                    ("ids", [VOCAB]),
                ]
            ):
                sender.send(generate(row, rig.open(row), prompt, kind))
            sender.send({"op": "tokenize", "id": 1, "prompt": "a<pad>"})
            answers = rig.receive(5)
            assert [answer["tokens"][-1] for answer in answers if answer["ev"] == "tokenized"] == [VOCAB]
            refusals = {answer["row"]: answer for answer in answers if answer["ev"] == "rejected"}
            assert {row: (answer["status"], answer["param"]) for row, answer in refusals.items()} == {
                0: (400, "prompt"),
                1: (400, "messages"),
                3: (400, "prompt"),
            }
            assert all("<pad>" in refusals[row]["message"] and str(VOCAB) in refusals[row]["message"] for row in (0, 1))
            assert rig.take_intake(intake) == [(2, 1)]
            assert intake.available() == 0
    finally:
        rig.close()


def test_the_process(rig: TextRig) -> None:
    intake = rig.scheduler.ring_consumer("intake")
    with rig.process("tokenizer"):
        sender = rig.sender("tokenizer")
        gens = [rig.open(row) for row in range(30)]
        for row, gen in enumerate(gens):
            sender.send(generate(row, gen, f"prompt {row}"))
        sender.send(generate(30, rig.open(30), ""))
        sender.send(generate(31, rig.open(31), "long " * 10_000))
        sender.send({"op": "tokenize", "id": 1, "prompt": "long " * 10_000})
        sender.send({"op": "detokenize", "id": 2, "tokens": [5] * 50_000})
        ids = load_tokenizer(rig.config.model.path).encode("long " * 10_000).ids
        answers = rig.receive(34)
        assert [answer["ev"] for answer in answers].count("accepted") == 30
        assert {answer["row"] for answer in answers if answer["ev"] == "rejected"} == {30, 31}
        assert [answer["count"] for answer in answers if answer["ev"] == "tokenized"] == [len(ids)]
        assert [len(answer["text"]) for answer in answers if answer["ev"] == "detokenized"] == [50_000]
        pairs = []
        while intake.available():
            pairs += rig.take_intake(intake)
        assert pairs == list(enumerate(gens))
        heartbeat_ns = rig.scheduler.control.heartbeat_ns("tokenizer")
        time.sleep(0.2)
        assert rig.scheduler.control.heartbeat_ns("tokenizer") > heartbeat_ns, "it lives while it has nothing to do"


def test_the_process_waits_for_the_scheduler(path: Path) -> None:
    rig = TextRig(path, max_queued=200)
    try:
        intake = rig.scheduler.ring_consumer("intake")
        with rig.process("tokenizer"):
            sender = rig.sender("tokenizer")
            gens = [rig.open(row) for row in range(200)]
            for row, gen in enumerate(gens):  # one by one: one record each
                sender.send(generate(row, gen, [5], "ids"))
                if row < INTAKE_RING_SLOTS:
                    rig.receive()
            pairs = []
            while len(pairs) < 200:
                rig.wait_for(lambda: intake.available() > 0)
                pairs += rig.take_intake(intake)
            assert pairs == list(enumerate(gens))
            assert len(rig.receive(200 - INTAKE_RING_SLOTS)) == 200 - INTAKE_RING_SLOTS
    finally:
        rig.close()
