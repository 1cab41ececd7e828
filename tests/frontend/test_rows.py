"""Rows: never two holders, free only by release or rejection, whatever order clients and processes act in."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from frontend.errors import ApiError
from frontend.metrics import Exposition
from frontend.rows import Exchange
from frontend.schema import Work
from frontend.shapes import usage_of
from shm.control import STAGES
from tests.frontend.loose_engine import LooseEngine


def work(prompts: int = 1, stream: bool = True, ids: bool = False) -> Work:
    one = {"kind": "text", "prompt": "x"}
    return Work("text", (one,) * prompts, {}, 16, stream, False, ids)


def test_a_full_table_takes_all_or_nothing() -> None:
    engine = LooseEngine(max_running=2, max_queued=1)
    engine.open(work(2))
    with pytest.raises(ApiError) as caught:
        engine.open(work(2))
    assert caught.value.status == 429 and caught.value.response().headers["retry-after"]
    assert len(engine.sent) == 2
    assert engine.open(work(1)).rows[0].number not in {m["row"] for m in engine.sent[:2]}


def test_the_ledger_is_told() -> None:
    engine = LooseEngine()
    exchange = engine.open(work(ids=True))
    row, gen = engine.accept(prompt_tokens=3)
    assert engine.ledger.generation[row] == gen == 1 and engine.ledger.arrival_ns[row] > 0
    engine.ledger.tokens[row, :5] = [7, 8, 9, 65, 66]
    engine.text((row, gen, 0, 2, "AB", None, False))
    assert engine.ledger.delivered[row] == 2
    assert (exchange.rows[0].ids, exchange.rows[0].text) == ([65, 66], ["AB"])
    engine.abandon(exchange)
    assert engine.ledger.abort[row] == gen and engine.rings == 1
    assert not engine.idle, "a row of a client that has left is still the scheduler's"
    engine.text((row, gen, 2, 2, "", "abort", True))
    assert engine.idle


def test_a_piece_that_comes_twice_counts_once() -> None:
    engine = LooseEngine()
    row_of = engine.open(work()).rows[0]
    row, gen = engine.accept()
    item = (row, gen, 0, 2, "AB", None, False)
    engine.text(item, item, (row, gen, 2, 3, "C", None, False), item)
    assert "".join(row_of.text) == "ABC" and row_of.count == 3


def test_usage_says_how_many_drafts_were_taken() -> None:
    """Over all choices; with plain steps between, which no figure here may count."""
    engine = LooseEngine()
    exchange = engine.open(work(2))
    for n, (count, numbers) in enumerate(((12, (3, 9, 5)), (8, (2, 6, 1)))):
        row, gen = engine.accept(n)
        ledger = engine.ledger
        ledger.draft_steps[row], ledger.drafted[row], ledger.accepted[row] = numbers
        engine.text((row, gen, 0, count, "x" * count, "length", True))
    assert usage_of(exchange)["completion_tokens_details"] == {
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 9,
        "accept_length": 2.2,
    }


def test_usage_says_nothing_of_drafts_where_there_were_none() -> None:
    engine = LooseEngine()
    exchange = engine.open(work())
    row, gen = engine.accept()
    engine.text((row, gen, 0, 2, "AB", "stop", True))
    assert "completion_tokens_details" not in usage_of(exchange)


def test_usage_claims_no_more_drafts_than_can_have_been_taken_before_a_stop_string() -> None:
    """The scheduler has counted steps that ran on behind it."""
    engine = LooseEngine()
    exchange = engine.open(work())
    row, gen = engine.accept()
    ledger = engine.ledger
    ledger.draft_steps[row], ledger.drafted[row], ledger.accepted[row] = 4, 12, 9
    engine.text((row, gen, 0, 6, "AB", "stop", True))  # the prompt's own token, and five of windows
    details = usage_of(exchange)["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 1 and details["accept_length"] == 1.25


def test_text_may_overtake_the_word_that_the_row_is_accepted() -> None:
    engine = LooseEngine(max_running=1, max_queued=0)
    exchange = engine.open(work(ids=True))
    row, gen = engine.sent[0]["row"], engine.sent[0]["gen"]
    engine.ledger.prompt_len[row] = 3
    engine.ledger.tokens[row, :4] = [7, 8, 9, 65]
    engine.text((row, gen, 0, 1, "A", "stop", True))
    first = exchange.rows[0]
    assert exchange.accepted and exchange.wake.is_set()
    assert (first.prompt_tokens, first.prompt_ids, first.ids) == (3, [7, 8, 9], [65])
    second = engine.open(work()).rows[0]
    engine.receive([{"ev": "accepted", "row": row, "gen": gen, "prompt_tokens": 3}])
    assert second.number == row and not second.accepted


def test_a_gap_in_the_text_is_a_bug() -> None:
    engine = LooseEngine()
    engine.open(work())
    row, gen = engine.accept()
    with pytest.raises(AssertionError):
        engine.text((row, gen, 1, 2, "B", None, False))


def test_release_before_finish_is_a_bug() -> None:
    engine = LooseEngine()
    engine.open(work())
    row, gen = engine.accept()
    with pytest.raises(AssertionError):
        engine.text((row, gen, 0, 1, "B", None, True))


def test_a_late_message_of_an_earlier_generation_is_dropped() -> None:
    engine = LooseEngine(max_running=1, max_queued=0)
    engine.open(work())
    row, gen = engine.accept()
    engine.text((row, gen, 0, 1, "x", "stop", True))
    second = engine.open(work()).rows[0]
    assert (second.number, second.generation) == (row, gen + 1)
    engine.text((row, gen, 1, 2, "late", None, False))
    engine.receive([{"ev": "rejected", "row": row, "gen": gen, "status": 400, "message": "late"}])
    assert second.text == [] and not second.released


def test_a_new_frontend_ends_and_frees_the_rows_of_the_dead_one() -> None:
    dead = LooseEngine(max_running=2, max_queued=2)
    for _ in range(3):
        dead.open(work())
    (ready, gen), waiting = dead.accept(0), dead.sent[1]["row"]
    dead.text((ready, gen, 0, 2, "AB", None, False))
    over = dead.accept(2)[0]
    dead.text((over, 1, 0, 1, "x", "stop", True))
    engine = LooseEngine(before=dead, max_running=2, max_queued=2)
    assert engine.figures()["open_rows"] == engine.figures()["adopted_total"] == 2 and engine.rings == 1
    assert engine.ledger.abort[[ready, waiting]].tolist() == [gen, 1] and engine.ledger.abort[over] == 0
    assert engine.sent == [{"op": "leave", "row": row, "gen": 1} for row in sorted((ready, waiting))]
    fresh = {engine.open(work()).rows[0].number for _ in range(2)}
    assert fresh.isdisjoint({ready, waiting})
    engine.text((ready, gen, 2, 3, "C", "abort", True))
    engine.text((waiting, 1, 0, 0, "", "abort", True))
    assert {engine.open(work()).rows[0].number for _ in range(2)} == {ready, waiting}


@pytest.mark.parametrize("taken", [False, True])
def test_a_row_whose_end_the_dead_frontend_had_heard_of_is_freed(taken: bool) -> None:
    """A stop string's end is told once: the item that frees the row, if it comes later, has none."""
    dead = LooseEngine()
    dead.open(work())
    row, gen = dead.accept()
    dead.ledger.text_stop_count[row], dead.ledger.text_stop[row] = 3, gen
    dead.text((row, gen, 0, 2, "AB", None, False), *([(row, gen, 2, 3, "", "stop", False)] if taken else []))
    engine = LooseEngine(before=dead)
    engine.text((row, gen, 3, 3, "", None, True) if taken else (row, gen, 2, 3, "", "stop", True))
    assert engine.ledger.freed[row] == gen and engine.idle


def test_every_process_is_named_with_what_it_does() -> None:
    engine = LooseEngine()
    for stage in STAGES:
        engine.state.set_epoch(stage, 1)
        engine.state.set_pid(stage, 9)
        engine.state.set_serves(stage, 1)
    assert engine.whole
    engine.state.died("gpu", "killed by SIGKILL")
    assert not engine.whole and engine.refusal is None, "requests are taken, and wait"
    assert engine.stages["gpu"] == {"state": "down", "epoch": 1, "restarts": 0, "last_reason": "killed by SIGKILL"}
    assert engine.stages["scheduler"] == {"state": "serving", "epoch": 1, "restarts": 0, "last_reason": None}
    lines = Exposition(engine.stats, engine.state).text().decode().splitlines()
    assert 'stepahead_stage_up{stage="gpu"} 0.0' in lines and 'stepahead_stage_up{stage="frontend"} 1.0' in lines
    assert 'stepahead_stage_last_death{reason="killed by SIGKILL",stage="gpu"} 1.0' in lines


class Rows(RuleBasedStateMachine):
    """Random life of a table of four rows against a plain model of it."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = LooseEngine(max_running=3, max_queued=1)
        self.generations: dict[int, int] = {}
        self.held: dict[tuple[int, int], str] = {}  # (row, generation) -> sent, accepted, finished
        self.exchanges: list[Exchange] = []
        self.expected: dict[tuple[int, int], str] = {}

    def held_as(self, *states: str) -> list[tuple[int, int]]:
        return [key for key, state in self.held.items() if state in states]

    @rule(choices=st.integers(1, 3))
    def open(self, choices: int) -> None:
        before = len(self.engine.sent)
        if 4 - len(self.held) < choices:
            with pytest.raises(ApiError):
                self.engine.open(work(choices))
            assert len(self.engine.sent) == before
            return
        self.exchanges.append(self.engine.open(work(choices)))
        for message in self.engine.sent[before:]:
            key = (message["row"], message["gen"])
            assert message["row"] not in {row for row, _ in self.held}, "a row with two holders"
            assert message["gen"] == self.generations.get(message["row"], 0) + 1
            self.generations[message["row"]] = message["gen"]
            self.held[key] = "sent"
            self.expected[key] = ""

    @precondition(lambda self: self.held_as("sent"))
    @rule(data=st.data(), accepted=st.booleans())
    def answer(self, data: Any, accepted: bool) -> None:
        row, gen = key = data.draw(st.sampled_from(self.held_as("sent")))
        if accepted:
            self.engine.receive([{"ev": "accepted", "row": row, "gen": gen, "prompt_tokens": 1}])
            self.held[key] = "accepted"
        else:
            self.engine.receive([{"ev": "rejected", "row": row, "gen": gen, "status": 400, "message": "no"}])
            del self.held[key]

    @precondition(lambda self: self.held_as("accepted"))
    @rule(data=st.data())
    def say_accepted_late(self, data: Any) -> None:
        row, gen = data.draw(st.sampled_from(self.held_as("accepted")))
        self.engine.receive([{"ev": "accepted", "row": row, "gen": gen, "prompt_tokens": 1}])

    @precondition(lambda self: self.held_as("sent", "accepted"))
    @rule(data=st.data(), text=st.text(max_size=3), finish=st.sampled_from([None, "stop", "length", "abort", "error"]))
    def produce(self, data: Any, text: str, finish: str | None) -> None:
        key = data.draw(st.sampled_from(self.held_as("sent", "accepted")))
        self.held[key] = "accepted"
        release = finish is not None and data.draw(st.booleans())
        row = self.row_of(key)
        self.engine.text((*key, row.count, row.count + 1, text, finish, release))
        if not row.exchange.gone:
            self.expected[key] += text
        if finish is not None:
            self.held[key] = "finished"
        if release:
            del self.held[key]

    @precondition(lambda self: self.held_as("finished"))
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        key = data.draw(st.sampled_from(self.held_as("finished")))
        count = self.row_of(key).count
        self.engine.text((*key, count, count, "", None, True))
        del self.held[key]

    @precondition(lambda self: self.exchanges)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        exchange = data.draw(st.sampled_from(self.exchanges))
        self.engine.abandon(exchange)
        for row in exchange.rows:
            self.expected[row.number, row.generation] = ""
            if row.finish is None and not row.released:
                assert self.engine.ledger.abort[row.number] == row.generation

    def row_of(self, key: tuple[int, int]) -> Any:
        return next(r for e in self.exchanges for r in e.rows if (r.number, r.generation) == key)

    @invariant()
    def as_many_open_as_held(self) -> None:
        assert self.engine.figures()["open_rows"] == len(self.held)
        assert self.engine.idle == (not self.held)

    @invariant()
    def no_text_is_lost_or_doubled(self) -> None:
        for exchange in self.exchanges:
            for row in exchange.rows:
                assert "".join(row.text) == self.expected[row.number, row.generation]


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
