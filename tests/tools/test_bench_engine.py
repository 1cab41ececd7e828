"""The engine's benchmark: its model can be served, its rows are laid out, and an answer that changes is found."""

from pathlib import Path
from xml.etree import ElementTree

import orjson
import pytest

from procs.model_files import load_tokenizer, read_model_info
from tests.tools.test_overlap_figures import seen
from tools.bench_engine import STAGES, Row, asks_of, learn, picture, row_of, table_text
from tools.bench_run import Ask, Load, judged, read
from tools.clocked_model import answer, answers, main
from tools.openai_stream import Answer
from tools.random_llama import VOCAB, write_random_llama


def test_the_random_model_is_one_that_is_served(tmp_path: Path) -> None:
    info = read_model_info(write_random_llama(tmp_path / "random"))
    assert (info.vocab_size, info.num_layers, info.hidden_size, info.eos_token_ids) == (VOCAB, 2, 64, ())
    tokenizer = load_tokenizer(info.path)
    assert tokenizer.get_vocab_size() == VOCAB
    assert tokenizer.decode([256, VOCAB - 1]).split()[0] == "aa"


def rows() -> list[Row]:
    load = Load(8, 1000, 1.0, 0.01, 0, 0, (), None)
    return [row_of(at_once, streamed, load, seen()) for at_once in (1, 64) for streamed in (False, True)]


def test_a_row_has_every_stages_time_for_a_token() -> None:
    row = rows()[0]
    assert set(row.cpu_us) == {*STAGES, "client"}
    assert (row.cpu_us["scheduler"], row.cpu_us["tokenizer"], row.cpu_us["client"]) == (15, 0, 10)


def test_table_and_picture_are_well_formed() -> None:
    lines = table_text(rows()).splitlines()
    assert len({len(line) for line in lines[:5]}) == 1 and "streamed" in lines[2]
    root = ElementTree.fromstring(picture(rows()))
    assert sum(element.get("class") == "scheduler" for element in root.iter()) == 1 + 4


def test_the_first_answer_to_a_prompt_is_what_later_ones_are_compared_with() -> None:
    known: dict[tuple[int, ...], list[int]] = {}
    drawn = [[1, 2], [3, 4]]
    asks = asks_of(drawn, 3, 2, known)
    assert [ask.prompt for ask in asks] == [[1, 2], [3, 4], [1, 2]] and asks[0].wanted is None
    learn(asks, Load(3, 6, 1.0, 0.0, 0, 0, ((5, 6), (7, 8), (9, 9)), None), known)
    assert known == {(1, 2): [5, 6], (3, 4): [7, 8]}
    assert asks_of(drawn, 1, 2, known)[0].wanted == [5, 6]


def whole(ids: list[int]) -> Answer:
    return Answer(status=200, rest=orjson.dumps({"choices": [{"token_ids": ids}]}))


def streamed(*pieces: list[int]) -> Answer:
    events = [b"data: " + orjson.dumps({"choices": [{"token_ids": ids}]}) for ids in pieces]
    return Answer(status=200, events=[*events, b"data: [DONE]"], times_ns=[0] * (len(events) + 1))


def test_answers_are_read_and_judged() -> None:
    ask = Ask([1], 2, [5, 6])
    given = [
        whole([5, 6]),
        whole([5, 7]),
        whole([5]),
        Answer(status=503, rest=b"busy"),
        Answer(error="gone"),
        whole([]),
    ]
    load = judged([ask] * 6, [read(one, False) for one in given], 1.0, 0.0)
    assert (load.requests, load.wrong, load.failed, load.tokens) == (6, 3, 2, 5)
    assert load.error == "status 503: busy"
    load = judged([ask, ask], [read(streamed(*one), True) for one in ([[5], [], [6]], [[6], [5]])], 2.0, 0.0)
    assert (load.wrong, load.failed, load.tokens_per_s) == (1, 0, 2.0)
    broken = Answer(status=200, events=[b'data: {"error": {"message": "no"}}'], times_ns=[0])
    assert judged([ask], [read(broken, True)], 1.0, 0.0).failed == 1


@pytest.mark.parametrize("length", [1, 2, 17])
def test_answers_all_at_once_are_those_one_by_one(length: int) -> None:
    drawn = [[(7 * i + j) % 256 for j in range(length)] for i in range(5)]
    assert answers(drawn, 40, 3) == [answer(prompt, 40, 3) for prompt in drawn]


def test_a_preset_can_be_written_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["glm-5.3-mtp", str(tmp_path / "glm")]) == 0
    assert read_model_info(capsys.readouterr().out.strip()).format == "clocked"
