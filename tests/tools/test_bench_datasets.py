"""What a benchmark asks: files in their forms, what is drawn from a seed, and arrivals that are a Poisson process."""

import statistics
from pathlib import Path

import orjson
import pytest

from tools import sharegpt_file
from tools.bench_datasets import (
    SHAREGPT,
    DatasetError,
    arrivals_s,
    gsm8k,
    ordered,
    random_ids,
    shared_prefix,
    sharegpt,
)
from tools.sharegpt_file import entries


def conversation(name: str, *turns: tuple[str, str]) -> dict[str, object]:
    return {"id": name, "conversations": [{"from": who, "value": text} for who, text in turns]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Conversations in ShareGPT's own form, cut off in the last one."""
    whole = orjson.dumps(
        [
            conversation("a_0", ("human", "first? {"), ("gpt", "yes")),
            conversation("a_1", ("human", "a later part")),
            conversation("b", ("human", " second? ")),
            conversation("c_0", ("gpt", "I begin")),
            conversation("d_0", ("human", "")),
            conversation("e_10", ("human", "a later part too")),
            conversation("f_0"),
            conversation("g_0", ("human", "third, long?")),
            conversation("h_0", ("human", "cut off")),
        ]
    )
    path = tmp_path / "conversations.json"
    path.write_bytes(whole[:-20])
    return path


@pytest.mark.parametrize("chars", [1, 7, 1 << 20])
def test_first_questions_are_read_however_the_file_is_cut(
    file: Path, chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharegpt_file, "CHARS_READ", chars)
    assert sharegpt(file, 100) == ["first? {", "second?", "third, long?"]
    assert len(list(entries(file))) == 8


def test_too_long_ones_are_left_out(file: Path) -> None:
    assert sharegpt(file, 8) == ["first? {", "second?"]
    with pytest.raises(DatasetError, match="no prompt of at most 2"):
        sharegpt(file, 2)


def test_those_that_come_with_the_program_are_lines() -> None:
    assert len(sharegpt(SHAREGPT, 4000)) > 300


@pytest.mark.parametrize("content", [b"no json", b'{"text": "x"}', b"3"])
def test_other_files_are_told_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(DatasetError, match=r"x.jsonl: not a jsonl file of prompts"):
        sharegpt(tmp_path / "x.jsonl", 10)


def test_examples_are_no_questions(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps({"question": f"q{i}", "answer": f"a{i}"}) for i in range(3)))
    assert gsm8k(path, 0) == [f"Question: q{i}\nAnswer:" for i in range(3)]
    assert gsm8k(path, 2) == ["Question: q0\nAnswer: a0\n\nQuestion: q1\nAnswer: a1\n\nQuestion: q2\nAnswer:"]
    with pytest.raises(DatasetError, match="it has 3 questions"):
        gsm8k(path, 3)


def test_ids_are_of_their_range_and_seed() -> None:
    drawn = random_ids(50, 4, (7, 10), "s")
    assert {one for prompt in drawn for one in prompt} == {7, 8, 9} and {len(prompt) for prompt in drawn} == {4}
    assert drawn == random_ids(50, 4, (7, 10), "s") != random_ids(50, 4, (7, 10), "t")


def test_prefixes_come_in_turn_and_what_is_behind_them_is_new() -> None:
    drawn = shared_prefix(7, 3, (20, 10), (0, 1000), "s")
    heads, tails = [tuple(one[:20]) for one in drawn], [tuple(one[20:]) for one in drawn]
    assert heads[:3] == heads[3:6] and heads[6] == heads[0] and len(set(heads)) == 3
    assert len(set(tails)) == 7 and {len(tail) for tail in tails} == {10}


def test_a_seed_orders_a_files_prompts_and_none_leaves_them() -> None:
    prompts = [str(number) for number in range(30)]
    assert ordered(prompts, None) == prompts
    assert ordered(prompts, "1") == ordered(prompts, "1") != ordered(prompts, "2") != prompts
    assert sorted(ordered(prompts, "1")) == sorted(prompts)


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = arrivals_s(20_000, 50.0, "s")
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0 and times == arrivals_s(20_000, 50.0, "s") != arrivals_s(20_000, 50.0, "t")
    # Exponential: mean and deviation are the same, and as many gaps as should be are longer than twice the mean.
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.05)
    assert sum(gap > 0.04 for gap in gaps) / len(gaps) == pytest.approx(0.1353, abs=0.01)
