"""Detokenizers and tokenizers that die: nothing is lost, nothing counts twice, who kills them is given up."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from procs import detokenizer as module
from procs.detokenizer import agree_on_text, open_row
from shm.ledger import FINISH_LENGTH, FINISH_NAMES, FINISH_NONE, FINISH_STOP
from shm.limits import DEATHS_IN_A_ROW
from tests.model_factory import TinyLlama
from tests.procs.test_detokenizer import Stage, ids
from tests.procs.test_tokenizer import Stage as TokenizerStage
from tests.procs.test_tokenizer import generate
from tests.procs.text_rig import TextRig


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama().write_hf(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def stage(path: Path) -> Iterator[Stage]:
    stage = Stage(path)
    yield stage
    stage.rig.close()


def begin(stage: Stage, row: int, stops: list[str] | None = None) -> int:
    """A row that the scheduler has begun."""
    gen = stage.start(row, stops)
    stage.ledger.begun[row] = gen
    stage.ledger.done[row] = 0
    return gen


def finish(stage: Stage, row: int, gen: int, reason: int) -> None:
    stage.ledger.finish[row] = reason
    stage.ledger.done[row] = gen


def said(stage: Stage) -> list[list[Any]]:
    """What a new detokenizer says of the ledger alone."""
    stage.restart()
    stage.consumer.release(stage.consumer.available())
    stage.frontend.take()
    stage.stage.rebuild()
    return stage.frontend.take()


def test_what_the_frontend_has_not_taken_is_said_again(stage: Stage) -> None:
    gen = begin(stage, 0)
    stage.advance(0, gen, ids("ab"))
    stage.advance(0, gen, ids("cd"))
    stage.turn()
    assert said(stage) == [[0, gen, 0, 4, "abcd", None, False]]
    stage.ledger.delivered[0] = 2
    assert said(stage) == [[0, gen, 2, 4, "cd", None, False]]
    stage.ledger.delivered[0] = 4
    assert said(stage) == []
    finish(stage, 0, gen, FINISH_LENGTH)
    assert said(stage) == [[0, gen, 4, 4, "", "length", True]]
    stage.ledger.freed[0] = gen
    assert said(stage) == []


def test_a_stop_string_is_found_again_and_not_told_twice(stage: Stage) -> None:
    gen = begin(stage, 0, ["END"])
    stage.advance(0, gen, ids("so ENDless"))
    assert said(stage) == [[0, gen, 0, 6, "so ", "stop", False]]
    assert stage.ledger.text_stop[0] == gen
    stage.ledger.delivered[0] = 6
    assert said(stage) == [], "the scheduler has not ended it yet"
    finish(stage, 0, gen, FINISH_STOP)
    assert said(stage) == [[0, gen, 6, 6, "", None, True]]


def test_records_of_rows_that_are_over_are_nobody_s(stage: Stage) -> None:
    """A new scheduler tells once more what it finds; a row may have been freed, and given out again, since."""
    gen = begin(stage, 0)
    stage.advance(0, gen, ids("ab"))
    finish(stage, 0, gen, FINISH_LENGTH)
    assert said(stage) == [[0, gen, 0, 2, "ab", "length", True]]
    stage.progress.push(stage.rig.record((0, gen, 2, FINISH_NONE)), source_seq=1)
    assert stage.turn() == [[0, gen, 0, 2, "ab", None, False]], "which the frontend does not take: it has the end"
    stage.ledger.freed[0] = gen
    stage.progress.push(stage.rig.record((0, gen, 2, FINISH_LENGTH)), source_seq=1)
    assert stage.turn() == []
    again = begin(stage, 0)
    stage.advance(0, again, ids("x"), FINISH_LENGTH)
    assert stage.turn() == [[0, again, 0, 1, "x", "length", True]]
    assert stage.stage.open_rows == 0


def test_two_holders_of_a_row_are_a_bug(stage: Stage) -> None:
    gen = begin(stage, 0)
    stage.advance(0, gen, ids("ab"))
    stage.turn()
    again = begin(stage, 0)
    stage.advance(0, again, ids("x"))
    with pytest.raises(AssertionError, match="two holders"):
        stage.stage.turn()


class Died(Exception):
    pass


def dies_of(row: int) -> Any:
    def point(name: str, _values: Any = None) -> None:
        if name == "detokenizer.row_in_hand" and dies_of.stage.ledger.in_hand[row]:  # type: ignore[attr-defined]
            raise Died

    return point


def test_a_row_that_kills_detokenizers_ends_and_the_others_go_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = begin(stage, 0), begin(stage, 1)
    stage.ledger.delivered[0] = 1
    stage.advance(0, bad, ids("abc"))
    stage.advance(1, good, ids("xyz"))
    dies_of.stage = stage  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "fault", dies_of(0))
    for _ in range(module.DEATHS_MAX):
        with pytest.raises(Died):
            said(stage)
    assert said(stage) == [[0, bad, 1, 1, "", "error", False], [1, good, 0, 3, "xyz", None, False]]
    assert stage.ledger.text_stop[0] == bad, "the scheduler is to end it"
    assert (stage.ledger.text_deaths[0], stage.ledger.text_deaths_of[0]) == (2, bad)
    assert said(stage)[0] == [0, bad, 1, 1, "", "error", False], "and once more, if it has to be"
    finish(stage, 0, bad, FINISH_STOP)
    assert [0, bad, 1, 1, "", None, True] in said(stage)
    stage.ledger.freed[0] = bad
    monkeypatch.undo()
    again = begin(stage, 0)
    stage.ledger.delivered[1] = 3
    stage.advance(0, again, ids("ok"))
    assert said(stage) == [[0, again, 0, 2, "ok", None, False]]


def test_a_row_that_gets_on_is_forgiven(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    gen = begin(stage, 0)
    stage.advance(0, gen, ids("abc"))
    dies_of.stage = stage  # type: ignore[attr-defined]
    for _ in range(2 * DEATHS_IN_A_ROW):
        stage.streak += 1  # it served for long enough between any two
        with monkeypatch.context() as patch:
            patch.setattr(module, "fault", dies_of(0))
            with pytest.raises(Died):
                said(stage)
        assert said(stage) == [[0, gen, 0, 3, "abc", None, False]]


def test_a_row_that_gets_on_between_deaths_in_a_row_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = begin(stage, 0), begin(stage, 1)
    stage.advance(0, bad, ids("abc"))
    stage.advance(1, good, ids("xyz"))
    dies_of.stage = stage  # type: ignore[attr-defined]
    for _ in range(DEATHS_IN_A_ROW):
        assert said(stage) == [[0, bad, 0, 3, "abc", None, False], [1, good, 0, 3, "xyz", None, False]]
        with monkeypatch.context() as patch:
            patch.setattr(module, "fault", dies_of(0))
            with pytest.raises(Died):
                said(stage)
    for _ in range(2):
        assert said(stage) == [[0, bad, 0, 0, "", "error", False], [1, good, 0, 3, "xyz", None, False]]
        stage.streak += 1  # once is for good
    assert stage.ledger.text_in_a_row[0] == DEATHS_IN_A_ROW and stage.ledger.text_in_a_row[1] == 0
    stage.ledger.freed[0] = bad
    again = begin(stage, 0)
    stage.advance(0, again, ids("ok"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "fault", dies_of(0))
        with pytest.raises(Died):
            said(stage)
    assert said(stage)[0] == [0, again, 0, 2, "ok", None, False]
    assert stage.ledger.text_in_a_row[0] == 1, "another request"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), crashes=st.integers(0, 8))
def test_a_death_at_any_store_neither_loses_nor_doubles(path: Path, seed: int, crashes: int) -> None:
    """With and without stop strings; the stage dies at its n-th fault point; the frontend takes what is its own."""
    chance, stage = random.Random(seed), Stage(path)
    try:
        run_with_crashes(stage, chance, crashes)
    finally:
        stage.rig.close()


def run_with_crashes(stage: Stage, chance: random.Random, crashes: int) -> None:
    texts = {0: "so it ENDs", 1: "abc€def", 2: "nothing"}
    gens = {row: begin(stage, row, ["END"] if row == 0 else None) for row in texts}
    tokens = {row: ids(text) for row, text in texts.items()}
    at = dict.fromkeys(texts, 0)
    got, ends, released = dict.fromkeys(texts, ""), dict[int, str](), set[int]()
    left = [chance.randint(1, 12) for _ in range(crashes)]

    def take() -> None:
        for row, gen, first, count, text, reason, release in stage.frontend.take():
            if row in released:
                continue
            if row not in ends and (count > stage.ledger.delivered[row] or reason is not None):
                assert first == stage.ledger.delivered[row] or not text
                got[row] += text
                stage.ledger.delivered[row] = count
                if reason is not None:
                    ends[row] = reason
            if release:
                assert row in ends
                released.add(row)
                stage.ledger.freed[row] = gen

    def point(_name: str, _values: Any = None) -> None:
        if left:
            left[0] -= 1
            if not left[0]:
                left.pop(0)
                raise Died

    def mortal(call: Any) -> None:
        try:
            call()
            take()
        except Died:
            take() if chance.random() < 0.5 else stage.frontend.take()  # what was under way may be lost
            stage.restart()
            mortal(stage.stage.rebuild)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "fault", point)
        patch.setattr(module, "DEATHS_MAX", 99)
        for _ in range(60):
            for row, gen in gens.items():
                live = stage.ledger.done[row] != gen
                if live and (stage.ledger.text_stop[row] == gen or at[row] == len(tokens[row])):
                    finish(stage, row, gen, FINISH_STOP if stage.ledger.text_stop[row] == gen else FINISH_LENGTH)
                    record = (row, gen, int(stage.ledger.count[row]), int(stage.ledger.finish[row]))
                    stage.progress.push(stage.rig.record(record), source_seq=1)
                elif live and chance.random() < 0.5:
                    some = tokens[row][at[row] : at[row] + chance.randint(1, 4)]
                    at[row] += len(some)
                    stage.advance(row, gen, some)
            mortal(stage.stage.turn)
    assert got == {0: "so it ", 1: "abc€def", 2: "nothing"}
    assert ends == {0: "stop", 1: FINISH_NAMES[FINISH_LENGTH], 2: FINISH_NAMES[FINISH_LENGTH]}
    assert released == set(texts)


def forgets_what_is_delivered(*args: Any) -> Any:
    """A planted fault: whoever takes over says everything from the beginning."""
    ledger, row = args[0], args[3]
    delivered, ledger.delivered[row] = int(ledger.delivered[row]), 0
    state = open_row(*args)
    ledger.delivered[row] = delivered
    return state


def believes_what_was_under_way(*args: Any) -> Any:
    """A planted fault: whoever takes over goes on behind all tokens, as if everything said had been taken."""
    ledger, row = args[0], args[3]
    delivered, ledger.delivered[row] = int(ledger.delivered[row]), int(ledger.count[row])
    state = open_row(*args)
    ledger.delivered[row] = delivered
    return state


@pytest.mark.parametrize("fault", [forgets_what_is_delivered, believes_what_was_under_way])
def test_planted_faults_are_found(path: Path, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_row", fault)
    for seed in range(20):
        stage = Stage(path)
        try:
            run_with_crashes(stage, random.Random(seed), 6)
        except AssertionError:
            return
        finally:
            stage.rig.close()
    raise AssertionError("nobody noticed")


class Mark:
    """A channel that only has a mark, and an end."""

    def __init__(self) -> None:
        self.mark: dict[str, int] = {}
        self.to = 0

    def turn_to(self, epoch: int) -> None:
        self.to = epoch


def test_nothing_is_said_before_it_is_heard(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    control, channel, rebuilt = stage.child.control, Mark(), []
    monkeypatch.setattr(stage.stage, "rebuild", lambda: rebuilt.append({**channel.mark, "turned": channel.to}))
    monkeypatch.setattr(stage.child, "epoch", 2)
    control.set_serves("frontend", 1)
    control.set_hears("frontend", 1)
    agree = lambda: agree_on_text(stage.child, channel, stage.stage)  # type: ignore[arg-type]  # noqa: E731
    assert not agree() and not rebuilt, "the frontend may still be taking what the one before has said"
    control.set_hears("frontend", 2)
    assert agree() and agree()
    assert rebuilt == [{"epoch": 2, "to": 1, "turned": 1}], "once"
    control.set_serves("frontend", 2)
    assert agree() and rebuilt[1:] == [{"epoch": 2, "to": 2, "turned": 2}], (
        "a frontend that took over has heard nothing"
    )


# ------------------------------------------------------------------ the tokenizer


@pytest.fixture
def rig(path: Path) -> Iterator[TextRig]:
    rig = TextRig(path)
    yield rig
    rig.close()


def test_a_row_that_is_ready_is_handed_on_and_not_written_again(rig: TextRig) -> None:
    stage = TokenizerStage(rig)
    gen = rig.open(0)
    stage.stage.take([generate(0, gen)])
    rig.ledger.seed[0] = 5  # it runs with it: whatever another writing would change, changes an answer
    rig.receive()
    stage.stage.take([generate(0, gen), generate(0, gen)])
    assert rig.ledger.seed[0] == 5
    assert [rig.take_intake(stage.intake), rig.take_intake(stage.intake)] == [[(0, gen)], [(0, gen), (0, gen)]]
    assert [m["ev"] for m in rig.receive(2)] == ["accepted", "accepted"]


def test_a_row_that_is_freed_is_not_touched(rig: TextRig) -> None:
    stage = TokenizerStage(rig)
    gen = rig.open(0)
    rig.ledger.abort[0] = rig.ledger.freed[0] = gen
    stage.stage.take([generate(0, gen), {"op": "leave", "row": 0, "gen": gen}])
    assert rig.ledger.ready[0] == 0 and stage.intake.available() == 0
    rig.open(0)
    stage.stage.take([generate(0, gen)])
    assert rig.ledger.ready[0] == 0, "nor one that has another holder"


@pytest.mark.parametrize("ready", [False, True])
def test_a_row_whose_frontend_died_is_handed_on_to_be_ended(rig: TextRig, ready: bool) -> None:
    stage = TokenizerStage(rig)
    gen = rig.open(0)
    if ready:
        stage.stage.take([generate(0, gen)])
        rig.take_intake(stage.intake)
        rig.receive()
    rig.ledger.abort[0] = gen
    stage.stage.take([{"op": "leave", "row": 0, "gen": gen}])
    assert rig.take_intake(stage.intake) == [(0, gen)]
    assert rig.ledger.ready[0] == gen and (rig.ledger.prompt_len[0] > 0) == ready
    assert rig.receive()[0]["ev"] == "accepted"


def test_a_long_text_that_is_sent_twice_is_written_once(rig: TextRig) -> None:
    stage = TokenizerStage(rig)
    gen = rig.open(0)
    works: list[Any] = []
    stage.stage._encoder.encode_later = lambda work: works.append(work) or True  # type: ignore[method-assign,func-returns-value]
    stage.stage.take([generate(0, gen), generate(0, gen)])
    works[0].then([5, 6])
    rig.ledger.seed[0] = 5
    works[1].then([5, 6])
    assert rig.ledger.seed[0] == 5
