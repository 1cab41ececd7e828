"""The checker finds every planted fault, and none where pieces are only cut in other places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.chaos_check import Fault, check, deviations, kinds_of
from tools.chaos_history import Event, History, read_stream, read_whole

WORDS = ["the ", "quick ", "brown ", "fox ", "jumps ", "over ", "a ", "lazy ", "dog", "."]
USAGE = {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}


def pieces(words: Sequence[str] = WORDS, finish: str = "length", choice: int = 0) -> list[Event]:
    """A stream with one token a piece; the ids are 0, 1, 2, ...."""
    events = [
        Event(at_ns=10 * i, choice=choice, answer="a", text=word, ids=(i,), prompt_ids=None)
        for i, word in enumerate(words)
    ]
    events[0] = replace(events[0], prompt_ids=(7, 8, 9))
    return [*events, Event(at_ns=10 * len(words), choice=choice, answer="a", finish=finish)]


def ended(events: Sequence[Event]) -> History:
    return History((*events, Event(at_ns=200, answer="a", usage=USAGE), Event(at_ns=201, done=True)), "done", 202)


CALM = ended(pieces())


def faults_of(events: Sequence[Event], **more: bool) -> list[Fault]:
    return check(CALM, ended(events), **more)


def said(faults: Sequence[Fault]) -> list[tuple[str, str, int]]:
    return [(fault.kind, fault.what, fault.count) for fault in faults]


def test_the_same_history_has_no_fault() -> None:
    assert check(CALM, CALM) == []


def test_a_token_that_is_left_out_is_missing() -> None:
    events = pieces()
    del events[3:5]
    assert said(faults_of(events)) == [("missing", "tokens", 2), ("missing", "text", 10)]
    assert faults_of(events)[0].at_ns == 50, "seen with the event behind the gap"


def test_the_last_tokens_are_missing_too() -> None:
    events = pieces()
    del events[8:10]
    assert said(faults_of(events)) == [("missing", "tokens", 2), ("missing", "text", 4)]


def test_an_event_that_comes_twice_is_doubled() -> None:
    events = pieces()
    events.insert(4, events[3])
    assert said(faults_of(events)) == [("doubled", "tokens", 1), ("doubled", "text", 4)]


def test_text_that_is_sent_twice_under_right_tokens_is_doubled() -> None:
    events = pieces()
    events[3] = replace(events[3], text="fox fox ")
    assert said(faults_of(events)) == [("doubled", "text", 4)]


def test_all_from_the_beginning_once_more_is_doubled() -> None:
    events = pieces()
    events[6:6] = events[:6]
    assert kinds_of(faults_of(events)) == {"doubled"}


def test_another_token_is_different() -> None:
    events = pieces()
    events[2] = replace(events[2], ids=(99,))
    assert said(faults_of(events)) == [("different", "tokens", 1)]
    assert faults_of(events)[0].at_ns == 20


def test_swapped_events_are_found() -> None:
    events = pieces()
    events[3], events[4] = events[4], events[3]
    assert "different" in kinds_of(faults_of(events))


def test_another_end_is_different() -> None:
    assert said(faults_of(pieces(finish="stop"))) == [("different", "finish", 1)]


def test_no_end_and_two_ends_are_found() -> None:
    assert ("missing", "finish", 1) in said(faults_of(pieces()[:-1]))
    assert ("doubled", "finish", 1) in said(faults_of([*pieces(), pieces()[-1]]))


def test_a_piece_behind_the_end_is_found() -> None:
    events = pieces()
    events[9], events[10] = events[10], events[9]
    assert ("different", "order", 1) in said(faults_of(events))


def test_usage_counts_but_for_its_drafts() -> None:
    def with_usage(*usages: dict[str, object]) -> list[tuple[str, str, int]]:
        events = [*pieces(), *(Event(answer="a", usage=usage) for usage in usages), Event(done=True)]
        return said(check(CALM, History(tuple(events))))

    assert with_usage({**USAGE, "completion_tokens_details": {"accept_length": 2.0}}) == []
    assert with_usage({**USAGE, "completion_tokens": 11}) == [("different", "usage", 1)]
    assert with_usage() == [("missing", "usage", 1)]
    assert with_usage(USAGE, USAGE) == [("doubled", "usage", 1)]


def test_events_of_two_answers_are_found() -> None:
    events = pieces()
    events[5] = replace(events[5], answer="b")
    assert said(faults_of(events)) == [("different", "answer", 1)]


def test_another_prompt_and_another_choice_are_found() -> None:
    events = pieces()
    events[0] = replace(events[0], prompt_ids=(7, 8))
    assert said(faults_of(events)) == [("different", "prompt", 1)]
    assert ("different", "choice", 1) in said(faults_of([*pieces(), replace(pieces()[0], choice=1)]))


def test_a_choice_that_never_came_is_missing() -> None:
    both = ended([*pieces(), *pieces(choice=1)])
    assert check(both, both) == []
    assert ("missing", "tokens", 10) in said(check(both, CALM))


@pytest.mark.parametrize("end", ["cut", "late", "refused"])
def test_a_stream_without_an_end_is_lost(end: str) -> None:
    found = History(tuple(pieces()[:4]), end, 50, "gone")  # type: ignore[arg-type]
    assert said(check(CALM, found)) == [("lost", end, 1)]


def test_an_error_event_is_lost_even_where_the_connection_may_be_cut() -> None:
    found = History((*pieces()[:4], Event(at_ns=60, error="no"), Event(done=True)), "done", 70)
    assert said(check(CALM, found)) == said(check(CALM, found, excused=True)) == [("lost", "error", 1)]


def test_an_answer_that_just_stops_is_lost() -> None:
    assert ("lost", "end", 1) in said(check(CALM, History(tuple(pieces()))))


@pytest.mark.parametrize("end", ["left", "cut"])
def test_what_was_cut_has_to_be_a_beginning(end: str) -> None:
    def cut(events: Sequence[Event]) -> list[tuple[str, str, int]]:
        return said(check(CALM, History(tuple(events), end, 99), excused=True))  # type: ignore[arg-type]

    events = pieces()
    assert cut(events[:5]) == cut([]) == cut(events) == []
    assert cut([*events[:2], *events[3:6]])[0] == ("missing", "tokens", 1)
    assert cut([*events[:3], events[2]])[0] == ("doubled", "tokens", 1)
    assert cut([replace(events[0], ids=(5,)), *events[1:3]])[0][0] == "different"
    assert ("missing", "tokens", 8) in cut([*events[:2], events[-1]]), "an end says that there is no more"


Ids = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(Ids, st.data())
def test_other_cuts_are_no_fault(ids: list[int], data: st.DataObject) -> None:
    """However the pieces are cut, the sequence is the same."""

    def cut() -> History:
        ends = sorted(data.draw(st.sets(st.integers(1, len(ids)))) | {len(ids)})
        begins = [0, *ends]
        events = [
            Event(text="".join(map(str, ids[a:b])), ids=tuple(ids[a:b]), answer="a")
            for a, b in zip(begins, ends, strict=False)
        ]
        return ended([*events, Event(finish="length", answer="a")])

    assert check(cut(), cut()) == []


@given(Ids, Ids, st.booleans())
def test_no_deviation_means_the_same(wanted: list[int], found: list[int], complete: bool) -> None:
    same = found == (wanted if complete else wanted[: len(found)])
    assert same == (not list(deviations(wanted, found, complete)))


@given(st.integers(2, 30), st.data())
def test_faults_between_tokens_that_differ_get_their_names(count: int, data: st.DataObject) -> None:
    wanted = list(range(count))
    begin = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(begin + 1, count))
    part = wanted[begin:end]

    def kinds(found: list[int]) -> set[str]:
        return {kind for kind, *_ in deviations(wanted, found, True)}

    assert kinds(wanted[:begin] + wanted[end:]) == {"missing"}
    assert kinds(wanted[:end] + part + wanted[end:]) == {"doubled"}
    assert kinds(wanted[:begin] + [token + 1000 for token in part] + wanted[end:]) == {"different"}


def chunk(**choice: object) -> bytes:
    return b"data: " + orjson.dumps({"id": "x", "choices": [{"index": 0, **choice}]})


def test_streams_are_read_in_both_formats() -> None:
    text = [chunk(text="a", token_ids=[1], prompt_token_ids=[5], finish_reason=None)]
    chat = [
        chunk(delta={"role": "assistant", "content": ""}, finish_reason=None),
        chunk(delta={"content": "a"}, finish_reason=None),
        chunk(delta={}, finish_reason="stop"),
    ]
    assert list(read_stream([*text, b"data: [DONE]"], [3, 4])) == [
        Event(at_ns=3, answer="x", text="a", ids=(1,), prompt_ids=(5,)),
        Event(at_ns=4, done=True),
    ]
    opening, piece, closing = read_stream(chat, [1, 2, 3])
    assert (opening.role, piece.text) == ("assistant", "a")
    assert closing.finish == "stop"
    assert next(iter(read_stream([b'data: {"error": {"message": "no"}}'], [1]))).error == "{'message': 'no'}"


def test_whole_answers_are_read_like_streams() -> None:
    choice = {"index": 0, "text": "ab", "token_ids": [1, 2], "finish_reason": "stop"}
    body = orjson.dumps({"id": "x", "choices": [choice], "usage": USAGE})
    piece, usage, done = read_whole(body, 9)
    assert (piece.text, piece.ids, piece.finish, piece.role) == ("ab", (1, 2), "stop", None)
    assert (usage.usage, done.done) == (USAGE, True)
    chat = {"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
    assert next(iter(read_whole(orjson.dumps({"id": "x", "choices": [chat]}), 1))).text == "ab"
