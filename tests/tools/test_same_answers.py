"""The comparison of answers, against a small server made here that gives other ones when it is told to."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tools import held_out_prompts, same_answers
from tools.bench_serve import BenchError, Server
from tools.drafter_data import split_of
from tools.same_answers import Answer, main, number_of, questions_of, same

LINES = [
    {"question": f"What is {i} and 1?", "answer": f"It is <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}"} for i in range(6)
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


def test_the_number_of_an_answer() -> None:
    assert [number_of(text) for text in ("so 3 and 4.\n#### 1,234", "5 or 7.", "none", "#### -2.5 dollars")] == [
        "1234",
        "7",
        "",
        "-2.5",
    ]


def test_shots_stand_before_every_question(questions: Path, tmp_path: Path) -> None:
    found = questions_of(questions, 2, 3)
    assert [question.answer for question in found] == ["3", "4", "5"]
    assert found[0].prompt.count("Answer:") == 3 and found[0].prompt.endswith("Question: What is 2 and 1?\nAnswer:")
    with pytest.raises(BenchError, match="6 questions, and 2 \\+ 5"):
        questions_of(questions, 2, 5)
    (tmp_path / "bad").write_text('{"question": "?"}\n')
    with pytest.raises(BenchError, match="not a jsonl file"):
        questions_of(tmp_path / "bad", 0, 1)


def test_ids_and_text_have_to_be_the_same() -> None:
    answers = [Answer((1, 2), "a"), Answer((3,), "b")]
    assert same(answers, answers) == 2
    assert same(answers, [Answer((1, 3), "a"), Answer((3,), "c")]) == 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was started. A server that was started with `other` says 9 to one of the questions."""
    started: list[str] = []
    asked = [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked[0] += 5
            self.say(f"stepahead_gpu_steps_total 1\nstepahead_retractions_total {asked[0]}\n")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["prompt"]
            about = prompt[-1] if isinstance(prompt, list) else int(prompt.rpartition("What is ")[2].split()[0])
            number = 9 if started[-1] == "other" and about == 3 else about + 1
            self.say(json.dumps({"choices": [{"token_ids": [number], "text": f" #### {number}"}]}))

        def say(self, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def start(arguments: str, api_key: str | None) -> Server:
        started.append(arguments)
        return Server(f"stepahead {arguments}", f"http://127.0.0.1:{server.server_port}", "tiny")

    monkeypatch.setattr(same_answers, "start", start)
    yield started
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_difference_is_counted(served: list[str], questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--questions", str(questions), "--shots", "2", "--count", "4", "--start", "one"]
    assert main([*given, "--start", "two"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[1]
        == "stepahead two, 32 at once: 4 of 4 answers the same (4 tokens), 4 right, - tokens a window, 5 retractions"
    )
    assert main([*given, "--start", "other"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("stepahead other, 32 at once: 3 of 4 answers the same (4 tokens), 3 right")
    assert served == ["one", "two", "one", "other"]


def test_answers_that_are_known_are_compared_token_by_token(
    served: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "greedy.jsonl"
    lines = [{"prompt_ids": [7, i], "token_ids": [i + 1] if i else [5]} for i in range(4)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--greedy", str(file), "--start", "one", "--start", "other", "--at-once", "1,3"]) == 1
    said = [line.partition(" tokens a window")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "stepahead one, 1 at once: 4 of 4 answers the same (4 tokens), 3 right, -",
        "stepahead one, 3 at once: 4 of 4 answers the same (4 tokens), 3 right, -",
        "stepahead other, 1 at once: 3 of 4 answers the same (4 tokens), 2 right, -",
        "stepahead other, 3 at once: 3 of 4 answers the same (4 tokens), 2 right, -",
    ]
    file.write_text('{"prompt_ids": [1]}\n')
    assert main(["--greedy", str(file)]) == 1
    assert "not a jsonl file of prompt_ids and token_ids" in capsys.readouterr().err


def test_held_out_prompts_are_of_the_test_split(tmp_path: Path) -> None:
    talk = [{"id": f"talk{i}_0", "conversations": [{"from": "human", "value": f"say {i}"}]} for i in range(400)]
    (tmp_path / "talk.json").write_text(json.dumps(talk))
    out = tmp_path / "out.jsonl"
    held_out_prompts.main(["--sharegpt", str(tmp_path / "talk.json"), "--count", "5", str(out)])
    prompts = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    assert len(prompts) == 5
    assert all(split_of(f"talk{prompt.split()[1]}") == "test" for prompt in prompts)
