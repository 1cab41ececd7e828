"""Whether a server gives the same answers in every setting: `python -m tools.same_answers --questions FILE.jsonl`.

Few-shot questions in the manner of GSM8K: the file's first lines, with their answers, stand before each of the others.
One server after the other is started (`--start ARGS`, the first one is what the others are compared with), answers all
questions greedily, many at once, and is ended. Prints how many answers are the same, token by token, and how many are
right. Owns the comparison; it never imports the server.
"""

import argparse
import re
import sys
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import Progress

from tools.bench_figures import read_counters
from tools.bench_serve import BenchError, Server, get, start, stop

NUMBER = re.compile(r"-?[\d,]*\.?\d+")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Question:
    """A prompt, and the number that answers it."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Answer:
    """What a server said: ids and text."""

    ids: tuple[int, ...]
    text: str


def questions_of(path: Path, shots: int, count: int) -> list[Question]:
    """Read lines with `question` and `answer`, the number behind ####. Raises BenchError for another file."""
    try:
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        pairs = [(str(line["question"]), str(line["answer"])) for line in lines]
    except (OSError, ValueError, LookupError) as error:
        raise BenchError(f"{path}: not a jsonl file of questions and answers ({error})") from error
    if len(pairs) < shots + count:
        raise BenchError(f"{path}: it has {len(pairs)} questions, and {shots} + {count} are wanted")
    before = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in pairs[:shots])
    chosen = pairs[shots : shots + count]
    return [Question(f"{before}Question: {q}\nAnswer:", number_of(a.rpartition("####")[2])) for q, a in chosen]


def number_of(text: str) -> str:
    """The number that an answer ends with: what stands behind ####, or the last one; empty where there is none."""
    found = NUMBER.findall(text.partition("####")[2]) or NUMBER.findall(text)[-1:]
    return found[0].replace(",", "").rstrip(".") if found else ""


def ask(server: Server, question: Question, tokens: int) -> Answer:
    """One greedy answer, ended by the next question. Raises OSError where there is none."""
    body = {"model": server.model, "prompt": question.prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"stop": ["\n\nQuestion:"], "return_token_ids": True}
    request = urllib.request.Request(f"{server.url}/v1/completions", orjson.dumps(body))
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        choice = orjson.loads(response.read())["choices"][0]
    return Answer(tuple(choice["token_ids"]), choice["text"])


def same(wanted: Sequence[Answer], found: Sequence[Answer]) -> int:
    """How many are equal, ids and text."""
    return sum(a == b for a, b in zip(wanted, found, strict=True))


def accept_length(server: Server) -> str:
    """Tokens that a window has brought, or a dash."""
    counters = read_counters(get(f"{server.url}/metrics", None).decode())
    if counters is None or not sum(counters.windows):
        return "-"
    rows = sum(counters.windows)
    return f"{sum(n * (1 + drafts) for drafts, n in enumerate(counters.windows)) / rows:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 where all answers are the same, or else 1."""
    parser = argparse.ArgumentParser("same_answers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--questions", type=Path, required=True, help="jsonl with a `question` and an `answer` a line")
    parser.add_argument("--start", action="append", default=[], metavar="ARGS", help="of `stepahead serve`; repeatable")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=192, help="of an answer, at most")
    parser.add_argument("--at-once", type=int, default=32)
    options = parser.parse_args(argv)
    try:
        return _compare(options, questions_of(options.questions, options.shots, options.count))
    except (BenchError, OSError) as error:
        print(f"same_answers: {error}", file=sys.stderr)
        return 1


def answers_of(server: Server, questions: Sequence[Question], tokens: int, at_once: int) -> list[Answer]:
    """All answers of one server, in the order of the questions."""
    with Progress(console=Console(stderr=True), transient=True) as progress, ThreadPoolExecutor(at_once) as pool:
        asked = [pool.submit(ask, server, question, tokens) for question in questions]
        for _ in progress.track(as_completed(asked), len(asked), description=server.name):
            pass
        return [one.result() for one in asked]


def _compare(options: argparse.Namespace, questions: Sequence[Question]) -> int:
    wanted: list[Answer] = []
    differing = 0
    for arguments in options.start or [""]:
        server = start(arguments, None)
        try:
            found = answers_of(server, questions, options.tokens, options.at_once)
            length = accept_length(server)
        finally:
            if server.process is not None:
                stop(server.process)
        wanted = wanted or found
        differing += len(found) - same(wanted, found)
        right = sum(number_of(a.text) == q.answer for a, q in zip(found, questions, strict=True))
        tokens = sum(len(answer.ids) for answer in found)
        print(
            f"{server.name}: {same(wanted, found)} of {len(found)} answers the same ({tokens} tokens), {right} right, "
            f"{length} tokens a window",
            flush=True,
        )
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
