"""Whether a server gives the same answers in every setting: `python -m tools.same_answers --questions FILE.jsonl`.

Few-shot questions in the manner of GSM8K: the file's first lines, with their answers, stand before each of the others.
Or (`--greedy`) prompts whose answers are known token by token. One server after the other is started (`--start ARGS`,
the first one is what the others are compared with), answers all questions greedily, so many at once, and is ended.
Prints how many answers are the same, token by token, and how many are right. Owns the comparison; it never imports the
server.
"""

import argparse
import re
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import Progress

from tools.bench_datasets import FEW_SHOT_STOP, few_shot
from tools.bench_figures import Counters, read_counters
from tools.bench_serve import BenchError, Server, get, interrupt_on_sigterm, start, stop

NUMBER = re.compile(r"-?[\d,]*\.?\d+")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Question:
    """A prompt, text or ids, and what answers it: a number, or all ids."""

    prompt: str | list[int]
    answer: str | tuple[int, ...]
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a server said: ids, text, and why it ended."""

    ids: tuple[int, ...]
    text: str
    finish: str = ""


def questions_of(path: Path, shots: int, count: int) -> list[Question]:
    """Read lines with `question` and `answer`, the number behind ####. Raises BenchError for another file."""
    try:
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        pairs = [(str(line["question"]), str(line["answer"])) for line in lines]
    except (OSError, ValueError, LookupError) as error:
        raise BenchError(f"{path}: not a jsonl file of questions and answers ({error})") from error
    if len(pairs) < shots + count:
        raise BenchError(f"{path}: it has {len(pairs)} questions, and {shots} + {count} are wanted")
    chosen = pairs[shots : shots + count]
    prompts = few_shot(pairs[:shots], [question for question, _ in chosen])
    numbers = [number_of(answer.rpartition("####")[2]) for _, answer in chosen]
    return [Question(prompt, number, (FEW_SHOT_STOP,)) for prompt, number in zip(prompts, numbers, strict=True)]


def known_answers(path: Path) -> list[Question]:
    """Read lines with `prompt_ids` and `token_ids`. Raises BenchError for another file."""
    try:
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        return [Question(list(line["prompt_ids"]), tuple(line["token_ids"])) for line in lines]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{path}: not a jsonl file of prompt_ids and token_ids ({error})") from error


def number_of(text: str) -> str:
    """The number that an answer ends with: what stands behind ####, or the last one; empty where there is none."""
    found = NUMBER.findall(text.partition("####")[2]) or NUMBER.findall(text)[-1:]
    return found[0].replace(",", "").rstrip(".") if found else ""


def ask(server: Server, question: Question, tokens: int) -> Answer:
    """One greedy answer, ended by the next question. Raises OSError where there is none."""
    body: dict[str, Any] = {"model": server.model, "prompt": question.prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"stop": list(question.stop), "return_token_ids": True}
    request = urllib.request.Request(f"{server.url}/v1/completions", orjson.dumps(body))
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        choice = orjson.loads(response.read())["choices"][0]
    return Answer(tuple(choice["token_ids"]), choice["text"], choice.get("finish_reason") or "")


def same(wanted: Sequence[Answer], found: Sequence[Answer]) -> int:
    """How many are equal: ids, text and end."""
    return sum(a == b for a, b in zip(wanted, found, strict=True))


def is_right(question: Question, answer: Answer) -> bool:
    """Whether all ids are known and found, or the number is."""
    if isinstance(question.answer, tuple):
        return answer.ids == question.answer
    return number_of(answer.text) == question.answer


def counters_of(server: Server) -> tuple[Counters | None, int]:
    """The server's counters of steps and windows so far, and how often it took a request's pages away."""
    text = get(f"{server.url}/metrics", None).decode()
    found = re.search(r"^stepahead_retractions_total (\d+)", text, re.MULTILINE)
    return read_counters(text), int(found[1]) if found else 0


def accept_length(before: Counters | None, after: Counters | None) -> str:
    """Tokens that a window has brought in between, or a dash."""
    if before is None or after is None:
        return "-"
    windows = [b - a for a, b in zip(before.windows, after.windows, strict=True)]
    rows = sum(windows)
    return f"{sum(n * (1 + drafts) for drafts, n in enumerate(windows)) / rows:.2f}" if rows else "-"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 where all answers are the same, or else 1."""
    parser = argparse.ArgumentParser("same_answers", description=(__doc__ or "").partition("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--questions", type=Path, help="jsonl with a `question` and an `answer` a line")
    source.add_argument("--greedy", type=Path, help="jsonl with `prompt_ids` and `token_ids` a line")
    parser.add_argument("--start", action="append", default=[], metavar="ARGS", help="of `stepahead serve`; repeatable")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=192, help="of an answer, at most")
    parser.add_argument(
        "--at-once", type=_counts, default=[32], metavar="N,N", help="requests at once, one after the other"
    )
    options = parser.parse_args(argv)
    interrupt_on_sigterm()
    try:
        if options.greedy:
            return _compare(options, known_answers(options.greedy))
        return _compare(options, questions_of(options.questions, options.shots, options.count))
    except (BenchError, OSError) as error:
        print(f"same_answers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def answers_of(server: Server, questions: Sequence[Question], tokens: int, at_once: int) -> list[Answer]:
    """All answers of one server, in the order of the questions."""
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(ask, server, question, tokens) for question in questions]
        try:
            for _ in progress.track(as_completed(asked), len(asked), description=server.name):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [one.result() for one in asked]


def _counts(text: str) -> list[int]:
    counts = [int(part) for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return counts


def _compare(options: argparse.Namespace, questions: Sequence[Question]) -> int:
    wanted: list[Answer] = []
    differing = 0
    for arguments in options.start or [""]:
        server = start(arguments, None)
        try:
            for at_once in options.at_once:
                before = counters_of(server)
                found = answers_of(server, questions, options.tokens, at_once)
                wanted = wanted or found
                differing += len(found) - same(wanted, found)
                right = sum(is_right(question, answer) for question, answer in zip(questions, found, strict=True))
                (steps, taken), (steps_then, taken_then) = counters_of(server), before
                said = f"{server.name}, {at_once} at once: {same(wanted, found)} of {len(found)} answers the same ("
                said += f"{sum(len(a.ids) for a in found)} tokens), {right} right, "
                said += f"{accept_length(steps_then, steps)} tokens a window"
                print(said + (f", {taken - taken_then} retractions" if taken > taken_then else ""), flush=True)
        finally:
            if server.process is not None:
                stop(server.process)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
