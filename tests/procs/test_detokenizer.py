"""The detokenizer stage behind a scheduler that the test plays, over real rings, planes and channels."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from procs.detokenizer import Detokenizer
from procs.text_stream import StopStrings
from procs.token_text import TextTable
from procs.tokenizer_files import load_tokenizer
from shm.ledger import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_NAMES, FINISH_NONE, FINISH_STOP
from shm.limits import MAX_STOP_TOKEN_IDS
from tests.model_factory import EOS_TOKEN_IDS, TinyLlama, vocabulary
from tests.procs.text_rig import TextRig

EOS = EOS_TOKEN_IDS[0]
BYTE = 3  # id of byte 0
STOP_ID = BYTE + ord("b")  # a stop token of the property test: its text is part of stop strings, too
STOPS = ["ab", "ba\ufffd", "€"]


def ids(text: str) -> list[int]:
    """One token for each byte."""
    return [BYTE + byte for byte in text.encode()]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama(layers=1).write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


class Bell:
    rung = 0

    def ring(self) -> None:
        self.rung += 1


class Frontend:
    """Keeps what is sent, in place of a channel."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def take(self) -> list[list[Any]]:
        """The items of all messages so far."""
        items = [item for message in self.messages for item in message["items"]]
        self.messages.clear()
        return items


class Stage:
    """The stage without its process, and the scheduler's side of a row."""

    def __init__(self, path: Path) -> None:
        self.rig = TextRig(path)
        self.child = self.rig.child("detokenizer")
        self.ledger = self.rig.ledger
        self.progress = self.rig.scheduler.ring_producer("progress")
        self.consumer = self.child.ring_consumer("progress")
        self.tokenizer = load_tokenizer(path)
        self.table = TextTable(self.tokenizer, self.rig.config.model.vocab_size, EOS_TOKEN_IDS)
        self.bell = Bell()
        self.frontend = Frontend()
        self.streak = 0  # of its deaths
        self.restart()

    def restart(self) -> None:
        """A new stage that knows nothing but the ledger."""
        self.stage = Detokenizer(
            self.child.ledger,
            self.consumer,
            self.frontend,  # type: ignore[arg-type]
            self.bell,
            self.table,
            self.child.stats_writer(),
            self.child.trace(),
            self.streak,
        )

    def start(
        self, row: int, stops: list[str] | None = None, prompt_len: int = 3, stop_ids: tuple[int, ...] = ()
    ) -> int:
        """Allocates a row with a prompt; returns its generation."""
        gen = self.rig.open(row)
        self.ledger.prompt_len[row] = prompt_len
        self.ledger.write_stop_strings(row, stops or [])
        self.ledger.stop_ids[row] = [*stop_ids, *[-1] * (MAX_STOP_TOKEN_IDS - len(stop_ids))]
        self.ledger.count[row] = 0
        return gen

    def advance(self, row: int, gen: int, tokens: list[int], finish: int = FINISH_NONE) -> None:
        """What the scheduler does with new output tokens of a row."""
        count = self.rig.write_output(row, tokens)
        self.progress.push(self.rig.record((row, gen, count, finish)), source_seq=1)

    def turn(self) -> list[list[Any]]:
        self.stage.turn()
        return self.frontend.take()


@pytest.fixture
def stage(path: Path) -> Iterator[Stage]:
    stage = Stage(path)
    yield stage
    stage.rig.close()


def test_text_follows_tokens(stage: Stage) -> None:
    gen = stage.start(5)
    stage.advance(5, gen, ids("ab"))
    assert stage.turn() == [[5, gen, 0, 2, "ab", None, False]]
    stage.advance(5, gen, ids("c"), FINISH_LENGTH)
    assert stage.turn() == [[5, gen, 2, 3, "c", "length", True]]
    assert stage.stage.open_rows == 0


def test_records_of_one_turn_become_one_message(stage: Stage) -> None:
    gens = [stage.start(row) for row in range(3)]
    for char in "xyz":
        for row, gen in enumerate(gens):
            stage.advance(row, gen, ids(char))
    stage.stage.turn()
    assert len(stage.frontend.messages) == 1
    assert stage.frontend.take() == [[row, gen, 0, 3, "xyz", None, False] for row, gen in enumerate(gens)]
    assert stage.consumer.available() == 0
    assert stage.turn() == []


def test_nothing_is_sent_without_text(stage: Stage) -> None:
    gen = stage.start(0, ["stop"])
    stage.advance(0, gen, ids("€")[:2])
    stage.stage.turn()
    stage.advance(0, gen, [EOS])
    stage.stage.turn()
    assert stage.frontend.messages == []
    stage.advance(0, gen, [*ids("€")[2:], *ids("st")])
    assert stage.turn() == [[0, gen, 0, 6, "€", None, False]]
    stage.advance(0, gen, ids("a"))
    assert stage.turn() == [[0, gen, 6, 7, "sta", None, False]]


@pytest.mark.parametrize("finish", [FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, FINISH_ERROR])
def test_the_end_brings_what_was_held(stage: Stage, finish: int) -> None:
    gen = stage.start(0, ["stop"])
    stage.advance(0, gen, [*ids("a sto"), BYTE + 0xE2])
    assert stage.turn() == [[0, gen, 0, 6, "a ", None, False]]
    stage.advance(0, gen, [EOS], finish)
    assert stage.turn() == [[0, gen, 6, 7, "sto\ufffd", FINISH_NAMES[finish], True]]


def test_an_end_without_tokens(stage: Stage) -> None:
    gen = stage.start(0, prompt_len=0)
    stage.advance(0, gen, [], FINISH_ABORT)
    assert stage.turn() == [[0, gen, 0, 0, "", "abort", True]]


def test_a_stop_string_ends_the_text_before_the_scheduler_does(stage: Stage) -> None:
    gen = stage.start(4, ["END"])
    stage.advance(4, gen, ids("so E"))
    assert stage.turn() == [[4, gen, 0, 4, "so ", None, False]]
    stage.advance(4, gen, ids("ND!"))
    assert stage.turn() == [[4, gen, 4, 6, "", "stop", False]]
    assert (stage.ledger.text_stop_count[4], stage.ledger.text_stop[4], stage.bell.rung) == (6, gen, 1)
    # The scheduler goes on for a while: none of it leaves.
    stage.advance(4, gen, ids("more END"))
    assert stage.turn() == []
    stage.advance(4, gen, ids("x"), FINISH_STOP)
    assert stage.turn() == [[4, gen, 6, 6, "", None, True]]
    assert stage.stage.open_rows == 0


def test_a_stop_string_before_the_end_in_the_same_record(stage: Stage) -> None:
    gen = stage.start(4, ["b"])
    stage.advance(4, gen, [*ids("abc"), EOS], FINISH_STOP)
    assert stage.turn() == [[4, gen, 0, 2, "a", "stop", True]]
    assert stage.ledger.text_stop[4] == gen
    assert stage.bell.rung == 0, "the scheduler has finished the row"


@pytest.mark.parametrize("records", [["so !"], ["so ", "!"], ["s", "o", " ", "!"]])
@pytest.mark.parametrize("restart", [False, True])
def test_a_stop_token_is_counted_and_does_not_leave(stage: Stage, records: list[str], restart: bool) -> None:
    gen = stage.start(4, stop_ids=(7, *ids("!")))
    items = []
    for text in records:
        if restart:
            stage.restart()
        stage.advance(4, gen, ids(text), FINISH_STOP if text.endswith("!") else FINISH_NONE)
        items += stage.turn()
        stage.ledger.delivered[4] = items[-1][3]
    assert "".join(item[4] for item in items) == "so "
    assert items[-1][3:4] + items[-1][5:] == [4, "stop", True]
    assert stage.ledger.text_stop[4] != gen


def test_what_was_held_leaves_before_a_stop_token(stage: Stage) -> None:
    gen = stage.start(4, ["stop!"], stop_ids=tuple(ids("!")))
    stage.advance(4, gen, ids("a stop"))
    assert stage.turn() == [[4, gen, 0, 6, "a ", None, False]]
    stage.advance(4, gen, ids("!"), FINISH_STOP)
    assert stage.turn() == [[4, gen, 6, 7, "stop", "stop", True]]
    assert stage.ledger.text_stop[4] != gen, "a stop token's text completes no stop string"


def test_stop_tokens_of_an_earlier_request_give_text(stage: Stage) -> None:
    first = stage.start(0, stop_ids=tuple(ids("!")))
    stage.advance(0, first, ids("!"), FINISH_STOP)
    assert stage.turn() == [[0, first, 0, 1, "", "stop", True]]
    second = stage.start(0)
    stage.advance(0, second, ids("!"), FINISH_LENGTH)
    assert stage.turn() == [[0, second, 0, 1, "!", "length", True]]


def test_a_death_before_the_message_leaves_loses_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    gen = stage.start(0)
    stage.advance(0, gen, ids("ab"))
    stage.advance(0, gen, ids("c"), FINISH_LENGTH)

    def die(message: dict[str, Any]) -> None:
        raise RuntimeError("died")

    with monkeypatch.context() as patch:
        patch.setattr(stage.frontend, "send", die)
        with pytest.raises(RuntimeError, match="died"):
            stage.stage.turn()
    assert stage.consumer.available() == 2, "what was not sent is not given back"
    stage.restart()
    assert stage.turn() == [[0, gen, 0, 3, "abc", "length", True]]
    assert stage.consumer.available() == 0


def test_a_row_is_used_again(stage: Stage) -> None:
    first = stage.start(0, ["b"])
    stage.advance(0, first, ids("ab"))
    stage.turn()
    stage.advance(0, first, [], FINISH_STOP)
    stage.turn()
    second = stage.start(0)
    stage.advance(0, second, ids("ab"), FINISH_LENGTH)
    assert stage.turn() == [[0, second, 0, 2, "ab", "length", True]]


def test_a_row_that_goes_on_after_its_end_is_a_bug(stage: Stage) -> None:
    gen = stage.start(0)
    stage.advance(0, gen, ids("a"), FINISH_LENGTH)
    stage.advance(0, gen, ids("b"))
    with pytest.raises(AssertionError, match="goes on after"):
        stage.stage.turn()


def test_a_generation_that_is_not_the_row_s_is_a_bug(stage: Stage) -> None:
    gen = stage.start(0)
    stage.advance(0, gen + 1, ids("a"))
    with pytest.raises(AssertionError, match="generation"):
        stage.stage.turn()


def whole(stage: Stage, tokens: list[int], stops: list[str], stop_ids: tuple[int, ...]) -> tuple[str, int]:
    """The text of an output, and its count, by plain search."""
    text = stage.tokenizer.decode([token for token in tokens if token not in (*EOS_TOKEN_IDS, *stop_ids)])
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(ends)[1]], 1) if ends else (text, 0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_contract_holds_whatever_comes(stage: Stage, data: st.DataObject) -> None:
    """Ranges tile, one finish, one release, text is the whole decode, over a restart at any turn."""
    stage.consumer.release(stage.consumer.available())  # of an example that failed
    stage.restart()
    rows = {row: stage.start(row, STOPS, stop_ids=(STOP_ID,) if row else ()) for row in range(3)}
    token = st.one_of(st.integers(0, len(vocabulary()) - 1), st.sampled_from([*ids("ab€"), EOS]))
    outputs: dict[int, list[int]] = {row: [] for row in rows}
    items: list[list[Any]] = []
    finished: dict[int, int] = {}
    for last_round in [*[False] * data.draw(st.integers(0, 12)), True]:
        for row in [row for row in rows if row not in finished]:
            tokens = data.draw(st.lists(token, max_size=4))
            finish = FINISH_LENGTH if last_round else data.draw(st.sampled_from([0, 0, 0, FINISH_STOP]))
            if row and STOP_ID in tokens:
                tokens, finish = tokens[: tokens.index(STOP_ID) + 1], FINISH_STOP
            outputs[row] += tokens
            stage.advance(row, rows[row], tokens, finish)
            if finish:
                finished[row] = finish
        if data.draw(st.booleans()):
            news = stage.turn()
            for item in news:
                stage.ledger.delivered[item[0]] = item[3]
            items += news
            if data.draw(st.booleans()):
                stage.restart()
    items += stage.turn()
    for row, gen in rows.items():
        own = [item for item in items if item[0] == row]
        text, stopped = whole(stage, outputs[row], STOPS, (STOP_ID,) if row else ())
        assert "".join(item[4] for item in own) == text
        assert {item[1] for item in own} == {gen}
        bounds = [(item[2], item[3]) for item in own]
        assert bounds[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(bounds))
        (end,) = [item for item in own if item[5] is not None]
        assert end[5] == ("stop" if stopped else FINISH_NAMES[finished[row]])
        assert end[3] == len(outputs[row]) or stopped
        assert [item[6] for item in own].index(True) == len(own) - 1
        assert all(item[4] or item[5] or item[6] for item in own)
        assert (stage.ledger.text_stop[row] == gen) == bool(stopped)
        if stopped:
            assert stage.ledger.text_stop_count[row] == end[3]
        assert own.index(end) >= len(own) - 2


def test_automata_are_shared(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make(strings: tuple[str, ...]) -> StopStrings:
        made.append(strings)
        return StopStrings(strings)

    monkeypatch.setattr("procs.detokenizer.StopStrings", make)
    stage.restart()
    for row in range(4):
        stage.advance(row, stage.start(row, ["x", "y"] if row else ["z"]), ids("a"))
    stage.turn()
    assert made == [("z",), ("x", "y")]


def test_the_process(path: Path) -> None:
    rig = TextRig(path)
    try:
        progress = rig.scheduler.ring_producer("progress")
        with rig.process("detokenizer"):
            gens = []
            for row in range(8):
                gens.append(rig.open(row))
                rig.ledger.prompt_len[row] = 2
                rig.ledger.write_stop_strings(row, ["STOP"])
                rig.ledger.stop_ids[row] = -1
            texts = [f"row {row} says STOP and more" if row % 2 else f"row {row} says é" for row in range(8)]
            encoded = [text.encode() for text in texts]
            for step in range(max(map(len, encoded))):
                columns = []
                for row, text in enumerate(encoded):
                    if step < len(text):
                        last = step == len(text) - 1
                        count = rig.write_output(row, [BYTE + text[step]])
                        columns.append((row, gens[row], count, FINISH_LENGTH if last else FINISH_NONE))
                rig.wait_for(lambda: progress.space() > 0)
                progress.push(rig.record(*columns), source_seq=step)
            items: list[list[Any]] = []
            while sum(item[6] for item in items) < 8:
                items += [item for message in rig.receive() for item in message["items"]]
        for row, text in enumerate(texts):
            own = [item for item in items if item[0] == row]
            assert "".join(item[4] for item in own) == text.partition("STOP")[0]
            assert [item[5] for item in own if item[5]] == ["stop" if row % 2 else "length"]
            assert rig.ledger.text_stop[row] == (gens[row] if row % 2 else 0)
    finally:
        rig.close()
