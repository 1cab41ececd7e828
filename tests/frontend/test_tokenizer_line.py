"""Tokenizers that die: what they left unanswered is told again, and the request that kills them is given up."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.errors import ApiError
from frontend.metrics import Meter
from frontend.tokenizer_line import DEATHS_MAX, TokenizerLine
from shm.control import Control
from shm.segment import Segment
from shm.stats import Stats
from tests.frontend.loose_engine import LooseEngine
from tests.frontend.test_rows import work


class Wire:
    """The channel, and tokenizers at the other end of it."""

    def __init__(self) -> None:
        self.control = Control(Segment.create("control", Control.size()))
        self.stats = Stats(Segment.create("stats", Stats.size()))
        self.inbox: list[dict[str, Any]] = []
        self.given_up: list[int] = []
        self.line = TokenizerLine(self.control, self, Meter(self.stats.writer("frontend")))
        self.start()
        self.serve()

    def send(self, message: dict[str, Any]) -> None:
        assert self.to == self.control.epoch("tokenizer"), "who is dead takes nothing"
        self.inbox.append(message)

    def turn_to(self, epoch: int) -> None:
        self.to = epoch

    def start(self) -> None:
        """The one before, if any, is dead."""
        self.inbox.clear()
        self.control.set_epoch("tokenizer", self.control.epoch("tokenizer") + 1)
        self.line.look_around()

    def serve(self) -> None:
        self.control.set_serves("tokenizer", self.control.epoch("tokenizer"))
        self.line.look_around()

    def ask(self, key: int) -> None:
        def give_up(_deaths: int) -> bool:
            self.given_up.append(key)
            return True

        self.line.ask(key, {"id": key}, give_up)

    def take(self) -> list[int]:
        """The messages that the tokenizer reads now."""
        taken = [message["id"] for message in self.inbox]
        self.inbox.clear()
        return taken


def test_what_is_unanswered_is_told_again_in_its_order() -> None:
    wire = Wire()
    for key in range(4):
        wire.ask(key)
    assert wire.take() == [0, 1, 2, 3]
    wire.line.answered(2)
    wire.start()
    wire.ask(9)
    assert wire.take() == [], "nobody is there to be told"
    wire.serve()
    assert wire.take() == [0, 1, 3, 9]
    assert wire.stats.read_stage("frontend")["resent_total"] == 3
    wire.line.look_around()
    assert wire.take() == []


def test_a_death_during_the_start_is_nobody_s_fault() -> None:
    wire = Wire()
    wire.start()
    wire.ask(0)
    for _ in range(5):
        wire.start()
    wire.serve()
    assert wire.take() == [0]
    wire.start()
    wire.serve()
    assert wire.given_up == [] and wire.take() == [0]


def test_the_only_one_at_two_deaths_is_given_up_while_nobody_lives() -> None:
    wire = Wire()
    wire.ask(7)
    for _ in range(DEATHS_MAX):
        assert wire.given_up == []
        wire.serve()
        wire.start()
    assert wire.given_up == [7] and wire.stats.read_stage("frontend")["poison_total"] == 1
    wire.ask(8)
    wire.serve()
    assert wire.take() == [8]


def test_a_suspect_is_told_alone_and_new_ones_wait_for_it() -> None:
    wire = Wire()
    wire.ask(1)
    wire.ask(2)
    for _ in range(DEATHS_MAX):
        wire.start()
        wire.ask(3) if wire.control.epoch("tokenizer") == DEATHS_MAX + 1 else None
        wire.serve()
    assert wire.take() == [1]
    wire.ask(4)
    assert wire.take() == []
    wire.line.answered(1)
    assert wire.take() == [2]
    wire.line.answered(2)
    assert wire.take() == [3, 4] and wire.given_up == []


def test_a_message_that_is_cancelled_holds_up_nobody() -> None:
    wire = Wire()
    wire.ask(1)
    wire.ask(2)
    for _ in range(DEATHS_MAX):
        wire.start()
        wire.serve()
    assert wire.take() == [1]
    wire.line.cancel(1, {"id": -1})
    assert wire.take() == [-1, 2]
    wire.line.cancel(5, {"id": -5})
    assert wire.take() == [], "it is not known"


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sets(st.integers(0, 11), max_size=3))
def test_killers_are_found_and_nobody_else(seed: int, killers: set[int]) -> None:
    """Tokenizers that read some of what is there in one go, and die of any of it that kills."""
    chance, wire = random.Random(seed), Wire()
    keys, answered, dead, deaths = list(range(12)), set[int](), False, 0
    for _ in range(600):
        if keys and chance.random() < 0.3:
            wire.ask(keys.pop(0))
        if dead:
            wire.start()
            dead = False
        elif wire.control.serves("tokenizer") != wire.control.epoch("tokenizer"):
            wire.serve()
        else:
            taken = [m["id"] for m in wire.inbox]
            some, wire.inbox[:] = taken[:4], wire.inbox[4:]
            dead = bool(killers & set(some))
            deaths += dead
            for key in [] if dead else some:
                wire.line.answered(key)
                answered.add(key)
    assert set(wire.given_up) == killers
    assert answered == set(range(12)) - killers
    assert deaths <= (DEATHS_MAX + 1) * len(killers)


class Mortal:
    """An engine whose tokenizer is a list, and dies."""

    def __init__(self, engine: LooseEngine | None = None) -> None:
        self.engine = engine or LooseEngine()
        self.control = self.engine.state

    def die(self) -> None:
        epoch = self.control.epoch("tokenizer") + 1
        self.engine.sent.clear()
        for word in (self.control.set_epoch, self.control.set_serves):
            word("tokenizer", epoch)
            self.engine.look_around()


def test_a_request_that_kills_tokenizers_is_an_error_and_its_row_is_free() -> None:
    mortal = Mortal()
    engine = mortal.engine
    exchange = engine.open(work())
    for _ in range(DEATHS_MAX):
        assert exchange.error is None
        mortal.die()
    error = exchange.error
    assert isinstance(error, ApiError) and (error.status, error.code) == (500, "poison")
    assert "tokenizer" in error.message and engine.idle and engine.sent == []
    row = exchange.rows[0]
    assert engine.ledger.freed[row.number] == row.generation


def test_a_request_that_is_ready_is_handed_on_however_many_die() -> None:
    mortal = Mortal()
    engine = mortal.engine
    exchange = engine.open(work())
    row = exchange.rows[0]
    engine.ledger.ready[row.number] = row.generation
    for _ in range(DEATHS_MAX + 2):
        mortal.die()
        assert [m["op"] for m in engine.sent] == ["generate"] and exchange.error is None
    engine.receive([{"ev": "accepted", "epoch": engine.state.epoch("tokenizer"), "row": row.number, "gen": 1,
                     "prompt_tokens": 3}])  # fmt: skip
    assert exchange.accepted


def test_a_row_that_ends_before_the_tokenizer_has_answered_holds_up_nobody() -> None:
    """A new frontend tells the tokenizer of a row that it finds; the row ends first, and then nobody answers."""
    dead = LooseEngine()
    dead.open(work())
    row, gen = dead.accept()
    mortal = Mortal(LooseEngine(before=dead))
    mortal.engine.receive([{"ev": "text", "items": [[row, gen, 0, 1, "x", "abort", True]]}])
    for _ in range(DEATHS_MAX + 1):
        mortal.die()
        assert mortal.engine.sent == []
    mortal.engine.open(work())
    assert [message["op"] for message in mortal.engine.sent] == ["generate"]


def test_what_a_dead_tokenizer_said_does_not_count() -> None:
    mortal = Mortal()
    engine = mortal.engine
    row = engine.open(work()).rows[0]
    mortal.die()
    engine.receive([{"ev": "rejected", "epoch": 0, "row": row.number, "gen": 1, "status": 400, "message": "no"}])
    assert not row.released


@pytest.mark.parametrize("mark", [{"epoch": 1}, {"to": 1}])
def test_text_of_another_detokenizer_or_for_another_frontend_does_not_count(mark: dict[str, int]) -> None:
    engine = LooseEngine()
    row = engine.open(work()).rows[0]
    engine.accept()
    engine.receive([{"ev": "text", "items": [[row.number, 1, 5, 6, "x", None, False]], **mark}])
    assert row.count == 0
