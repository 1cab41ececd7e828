"""What a benchmark asks: ShareGPT's questions, random token ids, ids behind shared prefixes, or GSM8K with examples.

Pure functions of files and a seed: the same seed gives the same prompts in the same order, for every server.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from tools.sharegpt_file import entries

SHAREGPT = Path(__file__).with_name("data") / "sharegpt_prompts.jsonl"
DATASETS = ("sharegpt", "random", "prefix", "gsm8k")
LATER_PART = re.compile(r"_[1-9][0-9]*$")  # of a conversation's id: it does not begin with a question
FEW_SHOT_STOP = "\n\nQuestion:"  # behind a whole answer in the manner of the examples
Prompt = str | list[int]


class DatasetError(Exception):
    """Something that the person at the terminal can mend; its text is the one line to show."""


def read_lines(path: Path, fields: Sequence[str], what: str) -> list[list[str]]:
    """These fields of each line of a jsonl file. Raises DatasetError, saying `what` the file is not."""
    try:
        lines: list[dict[str, Any]] = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        return [[str(line[name]) for name in fields] for line in lines]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DatasetError(f"{path}: not a jsonl file of {what} ({error})") from error


def sharegpt(path: Path, chars_max: int) -> list[str]:
    """First questions, of ShareGPT's own file or of a jsonl file with a `prompt` a line; none that are longer."""
    if _is_list(path):
        questions = [question for entry in entries(path) if (question := _question_of(entry))]
    else:
        questions = [prompt for (prompt,) in read_lines(path, ("prompt",), "prompts")]
    chosen = [question for question in questions if len(question) <= chars_max]
    if not chosen:
        raise DatasetError(f"{path}: no prompt of at most {chars_max} characters")
    return chosen


def _is_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b"[")
    except OSError:
        return False  # whoever reads it says so


def _question_of(entry: dict[str, Any]) -> str:
    turns = entry.get("conversations") or []
    if LATER_PART.search(str(entry.get("id", ""))) or not turns or turns[0].get("from") != "human":
        return ""
    return str(turns[0].get("value", "")).strip()


def gsm8k(path: Path, shots: int) -> list[str]:
    """Its questions, each behind the file's first `shots` with their answers."""
    pairs = read_lines(path, ("question", "answer"), "questions and answers")
    if len(pairs) <= shots:
        raise DatasetError(f"{path}: it has {len(pairs)} questions, and {shots} of them are the examples")
    return few_shot(pairs[:shots], [question for question, _ in pairs[shots:]])


def few_shot(examples: Sequence[Sequence[str]], questions: Sequence[str]) -> list[str]:
    """A prompt for each question, behind the examples with their answers. An answer ends where FEW_SHOT_STOP begins."""
    before = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in examples)
    return [f"{before}Question: {question}\nAnswer:" for question in questions]


def random_ids(count: int, tokens: int, ids: tuple[int, int], seed: str) -> list[list[int]]:
    """So many prompts of so many token ids, each id at least the first of `ids` and less than the second."""
    source = random.Random(f"{seed} ids")
    return [[source.randrange(*ids) for _ in range(tokens)] for _ in range(count)]


def shared_prefix(
    count: int, prefixes: int, tokens: tuple[int, int], ids: tuple[int, int], seed: str
) -> list[list[int]]:
    """Random ids, tokens[0] of a prefix and tokens[1] of its own for each prompt; the prefixes come in turn."""
    shared = random_ids(prefixes, tokens[0], ids, f"{seed} prefix")
    own = random_ids(count, tokens[1], ids, f"{seed} own")
    return [shared[number % prefixes] + behind for number, behind in enumerate(own)]


def ordered(prompts: Sequence[Prompt], seed: str | None) -> list[Prompt]:
    """The prompts of a file in an order of their own for each seed; as they are without one."""
    if seed is None:
        return list(prompts)
    return random.Random(f"{seed} order").sample(list(prompts), len(prompts))


def arrivals_s(count: int, rate: float, seed: str) -> list[float]:
    """When each of `count` requests comes, in seconds from the begin, at `rate` a second: a Poisson process."""
    source, at, times = random.Random(f"{seed} arrivals"), 0.0, list[float]()
    for _ in range(count):
        at += source.expovariate(rate)
        times.append(at)
    return times
